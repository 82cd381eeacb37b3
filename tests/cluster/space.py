"""A Kubernetes namespace for one test; its ServiceAccount has only the rights that manycpu documents."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml
from cluster.command import PATIENCE, wait_for
from cluster.settings import PROJECT
from kubernetes import client, config, utils
from kubernetes.client import ApiClient, ApiException
from kubernetes.stream import stream
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_fixed
from urllib3.exceptions import HTTPError

ACCOUNT = "manycpu"
TOKEN_SECONDS = 3600
LOG_LINES = 100
EXEC_SECONDS = 60
BUSY_SECONDS = 6
BUSY = frozenset({429, 500, 503})  # with these answers the API server has created nothing
# The account's Roles: in its own namespace, and in a namespace where images are built.
RIGHTS = PROJECT / "pipeline" / "targets" / "kubernetes" / "rights.yaml"
BUILD_RIGHTS = PROJECT / "pipeline" / "targets" / "kubernetes" / "build_rights.yaml"
# Kind -> group, version and plural of the operators' jobs.
JOBS = {
    "PyTorchJob": ("kubeflow.org", "v1", "pytorchjobs"),
    "MPIJob": ("kubeflow.org", "v2beta1", "mpijobs"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
}
ENDED = ("Succeeded", "Complete", "Failed")


@dataclass(frozen=True)
class Space:
    """One test's namespace.

    Attributes:
        name: the namespace.
        admin: client of the cluster's administrator, to prepare and to inspect.
        user: client of the ServiceAccount, for the code under test.
        kubeconfig: file for the ServiceAccount, with this namespace as its default.
    """

    name: str
    admin: ApiClient
    user: ApiClient
    kubeconfig: Path

    @property
    def core(self) -> client.CoreV1Api:
        return client.CoreV1Api(self.user)

    @property
    def objects(self) -> client.CustomObjectsApi:
        return client.CustomObjectsApi(self.user)

    @property
    def by_admin(self) -> "Space":
        """The same namespace with the administrator's rights, for actions that the account may not do."""
        return replace(self, user=self.admin)

    def create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Create an object of any kind that the account may create; return it.

        On a busy machine a webhook may time out, so that the API server refuses: retry for a minute.
        """
        retrying = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, ApiException) and error.status in BUSY),
            stop=stop_after_delay(PATIENCE * BUSY_SECONDS),
            wait=wait_fixed(0.5),
            reraise=True,
        )
        return retrying(self._create, manifest)

    def _create(self, manifest: dict[str, Any]) -> dict[str, Any]:
        if job := JOBS.get(manifest["kind"]):
            group, version, plural = job
            return dict(
                self.objects.create_namespaced_custom_object(group, version, self.name, plural, manifest)
            )
        try:
            made = utils.create_from_dict(self.user, manifest, namespace=self.name)
        except utils.FailToCreateError as error:
            raise error.api_exceptions[0] from None
        return dict(self.user.sanitize_for_serialization(made[0]))

    def job(self, kind: str, name: str) -> dict[str, Any]:
        """Return a PyTorchJob, MPIJob or TrainJob in its present state."""
        group, version, plural = JOBS[kind]
        return dict(self.objects.get_namespaced_custom_object(group, version, self.name, plural, name))

    def pods(self, selector: str = "") -> list[client.V1Pod]:
        return list(self.core.list_namespaced_pod(self.name, label_selector=selector).items)

    def pod(self, name: str) -> client.V1Pod:
        return self.core.read_namespaced_pod(name, self.name)

    def log(self, pod: str, **options: Any) -> str:
        return read_log(self.core, pod, self.name, **options)

    def run(self, pod: str, *command: str) -> str:
        """Run a command in a pod's first container; return its output."""
        attach = self.core.connect_get_namespaced_pod_exec
        options = {"stdout": True, "stderr": True, "stdin": False, "_preload_content": False}
        channel = stream(attach, pod, self.name, command=list(command), **options)
        try:
            channel.run_forever(timeout=EXEC_SECONDS)
            return str(channel.read_all())
        finally:
            channel.close()
            channel.sock.shutdown()

    def wait_pod(self, name: str, *phases: str, seconds: float = 90) -> client.V1Pod:
        """Wait until a pod is in one of the phases; return the pod."""
        wait_for(f"pod {name} to be {phases}", lambda: self.pod(name).status.phase in phases, seconds=seconds)
        return self.pod(name)

    def wait_job(self, kind: str, name: str, *, seconds: float = 240) -> str:
        """Wait until an operator's job has ended; return `Succeeded`, `Complete` or `Failed`."""

        def ended() -> str:
            conditions = self.job(kind, name).get("status", {}).get("conditions") or []
            return next((c["type"] for c in conditions if c["type"] in ENDED and c["status"] == "True"), "")

        return wait_for(f"{kind} {name} to end", ended, seconds=seconds, every=0.3)

    def dump(self) -> str:
        """Return pods, events and logs for the report of a failed test, or why the cluster did not answer."""
        try:
            return "\n".join([*_pods(self), *_events(self), *_logs(self)])
        except (ApiException, HTTPError) as error:
            return f"(the cluster did not tell: {error})"


def read_log(core: client.CoreV1Api, pod: str, namespace: str, **options: Any) -> str:
    answer = core.read_namespaced_pod_log(pod, namespace, _preload_content=False, **options)
    return bytes(answer.data).decode(errors="replace")


def token(admin: ApiClient, namespace: str, bound_to: dict[str, str] | None = None) -> str:
    """Return a token of the account; if it is bound to an object, it expires when the object is deleted."""
    spec: dict[str, Any] = {"audiences": [], "expirationSeconds": TOKEN_SECONDS}
    if bound_to:
        spec["boundObjectRef"] = bound_to
    core = client.CoreV1Api(admin)
    return str(core.create_namespaced_service_account_token(ACCOUNT, namespace, {"spec": spec}).status.token)


def write_kubeconfig(path: Path, admin_kubeconfig: Path, namespace: str, bearer: str) -> None:
    """Write a kubeconfig with a token, for the cluster of the administrator's kubeconfig."""
    document = yaml.safe_load(admin_kubeconfig.read_text())
    current = next(c for c in document["contexts"] if c["name"] == document["current-context"])
    cluster = next(c for c in document["clusters"] if c["name"] == current["context"]["cluster"])
    context = {"cluster": cluster["name"], "user": ACCOUNT, "namespace": namespace}
    document |= {
        "clusters": [cluster],
        "users": [{"name": ACCOUNT, "user": {"token": bearer}}],
        "contexts": [{"name": ACCOUNT, "context": context}],
        "current-context": ACCOUNT,
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document))


@contextmanager
def connect(kubeconfig: Path) -> Iterator[ApiClient]:
    """Yield a client; close its connections at the end."""
    with config.new_client_from_config(config_file=str(kubeconfig)) as api:
        try:
            yield api
        finally:
            api.rest_client.pool_manager.clear()


@contextmanager
def create(
    admin_kubeconfig: Path, folder: Path, prefix: str, labels: Mapping[str, str] | None = None
) -> Iterator[Space]:
    """Create a namespace with these labels, the account, its rights and its kubeconfig (in `folder`)."""
    kubeconfig = folder / "kubeconfig"
    with connect(admin_kubeconfig) as admin:
        name = _make_namespace(admin, prefix, labels or {})
        client.CoreV1Api(admin).create_namespaced_service_account(name, {"metadata": {"name": ACCOUNT}})
        _grant(admin, name, RIGHTS, account_namespace=name)
        write_kubeconfig(kubeconfig, admin_kubeconfig, name, token(admin, name))
        with connect(kubeconfig) as user:
            yield Space(name, admin, user, kubeconfig)


def beside(space: Space, prefix: str, labels: Mapping[str, str]) -> Space:
    """Create another namespace, in which the account of `space` has the rights to build images."""
    name = _make_namespace(space.admin, prefix, labels)
    _grant(space.admin, name, BUILD_RIGHTS, account_namespace=space.name)
    return replace(space, name=name)


def _make_namespace(admin: ApiClient, prefix: str, labels: Mapping[str, str]) -> str:
    name = f"{prefix[:40].strip('-')}-{secrets.token_hex(3)}"
    metadata = {"name": name, "labels": {"manycpu.test": "true", **labels}}
    core = client.CoreV1Api(admin)
    core.create_namespace({"metadata": metadata})

    def accounts() -> list[str]:
        return [found.metadata.name for found in core.list_namespaced_service_account(name).items]

    # Without this account no pod can be created; it may take seconds after a restart of the API server.
    wait_for("the namespace's default account", lambda: "default" in accounts(), seconds=60)
    return name


def _grant(admin: ApiClient, name: str, rights: Path, *, account_namespace: str) -> None:
    """Create the Role of a file in namespace `name`, grant it to an account, and wait until it works."""
    rbac, role = client.RbacAuthorizationV1Api(admin), yaml.safe_load(rights.read_text())
    called = role["metadata"]["name"]
    rbac.create_namespaced_role(name, role)
    rbac.create_namespaced_role_binding(
        name,
        {
            "metadata": {"name": called},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": called},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": account_namespace}],
        },
    )
    rule = role["rules"][0]
    asked = {"namespace": name, "verb": rule["verbs"][0], "group": rule["apiGroups"][0]}
    asked["resource"] = rule["resources"][0]
    user = f"system:serviceaccount:{account_namespace}:{ACCOUNT}"
    review = {"spec": {"user": user, "resourceAttributes": asked}}
    reviews = client.AuthorizationV1Api(admin)

    def granted() -> bool:
        return bool(reviews.create_subject_access_review(review).status.allowed)

    # The authorizer reads Roles from a cache, which lags on a busy machine.
    wait_for(f"the rights of {user} in {name}", granted, seconds=30)


def serves(admin: ApiClient, kind: str) -> bool:
    """Return whether the cluster serves a kind of job."""
    group, version, plural = JOBS[kind]
    try:
        there = client.CustomObjectsApi(admin).get_api_resources(group, version).resources
    except ApiException as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return False
    return plural in [resource.name for resource in there]


def delete(space: Space) -> None:
    """Delete jobs, pods and claims, then the namespace: Kubernetes itself would begin 5 seconds later."""
    objects, core = client.CustomObjectsApi(space.admin), client.CoreV1Api(space.admin)
    for kind, (group, version, plural) in JOBS.items():
        if serves(space.admin, kind):
            objects.delete_collection_namespaced_custom_object(group, version, space.name, plural)
    core.delete_collection_namespaced_pod(space.name, grace_period_seconds=0)
    core.delete_collection_namespaced_persistent_volume_claim(space.name)
    core.delete_namespace(space.name)


def wait_emptied(space: Space, *, seconds: float = 60) -> None:
    """Wait until pods and claims of a deleted namespace are gone. Kubernetes deletes the rest later."""
    core = client.CoreV1Api(space.admin)

    def empty() -> bool:
        claims = core.list_namespaced_persistent_volume_claim(space.name).items
        return not claims and not core.list_namespaced_pod(space.name).items

    wait_for(f"pods and claims of {space.name} to be gone", empty, seconds=seconds)


def _pods(space: Space) -> Iterator[str]:
    yield "pods:"
    for pod in client.CoreV1Api(space.admin).list_namespaced_pod(space.name).items:
        states = [s.state.to_dict() for s in pod.status.container_statuses or []]
        seen = [{key: value for key, value in state.items() if value} for state in states]
        yield f"  {pod.metadata.name} {pod.status.phase} on {pod.spec.node_name}: {seen}"


def _events(space: Space) -> Iterator[str]:
    yield "events:"
    for event in client.CoreV1Api(space.admin).list_namespaced_event(space.name).items:
        place = f"{event.involved_object.kind}/{event.involved_object.name}"
        yield f"  {event.type} {event.reason} {place}: {event.message}"


def _logs(space: Space) -> Iterator[str]:
    core = client.CoreV1Api(space.admin)
    for pod in core.list_namespaced_pod(space.name).items:
        for container in [*(pod.spec.init_containers or []), *pod.spec.containers]:
            yield f"log of {pod.metadata.name}/{container.name}:"
            options = {"container": container.name, "tail_lines": LOG_LINES}
            try:
                yield read_log(core, pod.metadata.name, space.name, **options)
            except ApiException as error:
                yield f"  (none: {error.reason})"
