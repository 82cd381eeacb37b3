"""A namespace of a Kubernetes cluster: plain dictionaries in and out, every call with a deadline.

It wraps the package ``kubernetes``. Transient errors are retried: an API server that is busy, away or
restarting, a webhook that is not back yet, a token that was just renewed.
"""

import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from decimal import Decimal
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Final, TypeVar

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.utils import parse_quantity
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from manycpu.pipeline.spec.credentials import proxies
from manycpu.pipeline.spec.errors import ClusterError, ConflictError, NotFoundError
from manycpu.pipeline.spec.job_kinds import TRAINJOB, kind_of, resource_of
from manycpu.pipeline.spec.kube_object import KubeObject

Result = TypeVar("Result")
Connect = Callable[[], client.ApiClient]
"""Makes a client with fresh credentials."""

_LOG: Final = logging.getLogger(__name__)
_NO_KUBECONFIG: Final = (AttributeError, LookupError, TypeError, yaml.YAMLError)
"""Errors of the package ``kubernetes`` for a file that is no kubeconfig."""
RETRY_TIMEOUT_S: Final = 60.0  # seconds of retries
_UNAUTHORIZED_GRACE_S: Final = 15.0  # in which a token that was just renewed may be refused
_TIMEOUT: Final = (5.0, 30.0)  # seconds to connect and to read, for each try
_WARN_ATTEMPT: Final = 5  # after so many failed tries, a few seconds, the log says why nothing is created
_UNAUTHORIZED: Final = 401
_POLL_INTERVAL_S: Final = 0.25
_TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})
# The words of API servers if another creation changes a quota's use at the same moment.
_QUOTA_CONFLICT: Final = "cannot be fulfilled on resourcequotas"
_PATCH: Final = "application/merge-patch+json"


def poll(read: Callable[[], Result], done: Callable[[Result], bool], timeout_s: float) -> Result:
    """Call ``read`` until ``done`` accepts its result or the time is over; return the last result."""
    deadline = time.monotonic() + timeout_s
    while not done(result := read()) and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
    return result


def amount(quantity: str) -> Decimal:
    """Parse an amount as Kubernetes writes it, such as ``1500m`` cores or ``8Gi`` bytes."""
    return Decimal(parse_quantity(quantity))


def connect(connection: str | None = None) -> client.ApiClient:
    """Make a client from the kubeconfig at the path ``connection``.

    None: with the account of the pod that this process is in, else from $KUBECONFIG or ~/.kube/config.

    Raises:
        ClusterError: There is no kubeconfig, or it cannot be used.
    """
    try:
        if connection is not None:
            return config.new_client_from_config(str(Path(connection).expanduser()))
        settings = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=settings)
        except config.ConfigException:  # not in a pod
            return config.new_client_from_config()
        return client.ApiClient(settings)
    except (config.ConfigException, OSError, ValueError, *_NO_KUBECONFIG) as error:
        what = "this is no kubeconfig: " if isinstance(error, _NO_KUBECONFIG) else ""
        fix = "Give the path of a kubeconfig in target.connection, or set KUBECONFIG"
        if isinstance(error, urllib3.exceptions.ProxySchemeUnknown):  # it is a ValueError
            fix = f"See proxy-url in the kubeconfig, and the environment: {proxies(os.environ) or 'no proxy'}"
        raise ClusterError(
            f"no cluster can be reached: {what}{error}", field="target.connection", fix=fix
        ) from error


class Cluster:
    """One namespace, as one account may see it; ``connect`` is called again for renewed credentials."""

    def __init__(self, connect: Connect, namespace: str) -> None:
        self.connect, self.namespace = connect, namespace
        self._ahead_s: float | None = None  # by which the API server's clock is ahead; None: unknown
        self._open()

    def now(self) -> float:
        """Read the API server's clock, in seconds since the epoch."""
        if self._ahead_s is None:
            # Every answer of the API server has its time, from which the call computes the difference.
            with suppress(ClusterError):  # not allowed: use the worker's clock
                self.call("GET", "/version")
        return time.time() + (self._ahead_s or 0.0)

    def in_namespace(self, namespace: str) -> "Cluster":
        """Open another namespace of the same cluster."""
        return Cluster(self.connect, namespace)

    def _open(self) -> None:
        """Make a client with fresh credentials."""
        self.api = self.connect()
        # The client is in a reference cycle: without this, connections stay until garbage collection.
        weakref.finalize(self, self.api.rest_client.pool_manager.clear)

    def path(self, kind: str, name: str = "") -> str:
        """Build the API path of a kind's objects in this namespace, or of the object ``name``.

        Raises:
            NotFoundError: The cluster does not serve the group, so it prefers no version.
        """
        resource = resource_of(kind)
        if not resource.version:  # the cluster names the version that it prefers
            group = self.call("GET", f"/apis/{resource.group}")
            resource = resource._replace(version=group["preferredVersion"]["version"])
        return f"{resource.path}/namespaces/{self.namespace}/{resource.plural}" + (f"/{name}" if name else "")

    def get(self, kind: str, name: str, deadline: float = RETRY_TIMEOUT_S) -> KubeObject | None:
        """Read an object; None: it does not exist."""
        try:
            return self.call("GET", self.path(kind, name), deadline=deadline)
        except NotFoundError:
            return None

    def list(self, kind: str, labels: Mapping[str, str] | None = None, fields: str = "") -> list[KubeObject]:
        """List the objects that have all labels and match a field selector; each with its kind."""
        query = {
            "labelSelector": ",".join(f"{key}={value}" for key, value in (labels or {}).items()),
            "fieldSelector": fields,
        }
        answer = self.call("GET", self.path(kind), query={name: text for name, text in query.items() if text})
        # In a list, the API leaves out the kind of each item.
        return [{**item, "kind": kind} for item in answer.get("items", [])]

    def create(self, manifest: KubeObject, *, dry_run: bool = False) -> KubeObject:
        """Create an object and return it; if the name is taken, return the existing object of that name.

        A name belongs to one run, so the existing object is the run's own. ``dry_run``: the API server checks
        the object, and creates nothing.
        """
        kind, name = kind_of(manifest), manifest["metadata"]["name"]
        query = {"dryRun": "All"} if dry_run else {}
        with suppress(ConflictError):
            return self.call("POST", self.path(kind), query=query, body=manifest)
        existing = self.get(kind, name)
        # None: its deletion ended between the two calls.
        return existing or self.call("POST", self.path(kind), query=query, body=manifest)

    def patch(
        self, kind: str, name: str, body: KubeObject, *, deadline: float = RETRY_TIMEOUT_S
    ) -> KubeObject:
        """Change an object by a JSON merge patch, and return it.

        Raises:
            ConflictError: The patch has a uid or a resourceVersion that is not the object's present one.
        """
        return self.call("PATCH", self.path(kind, name), body=body, deadline=deadline)

    def delete(self, kind: str, name: str, *, uid: str | None = None, grace: int | None = None) -> bool:
        """Begin to delete an object and all that it owns, and do not wait.

        Returns False if the object is gone already, or has another uid.

        Args:
            kind: Its kind.
            name: Its name.
            uid: Delete only the object with this uid; None: whatever uid it has. A later object of the same
                name may belong to another run.
            grace: Grace period of its processes, in seconds; default: that of the object.
        """
        # In foreground deletion a TrainJob would wait for its JobSet, which Trainer creates again. And
        # Trainer refuses any change of a TrainJob whose runtime is gone, also while it is being deleted.
        body: KubeObject = {"propagationPolicy": "Background" if kind == TRAINJOB.kind else "Foreground"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            self.call("DELETE", self.path(kind, name), body=body)
        except (NotFoundError, ConflictError):
            return False
        return True

    def allowed(self, verb: str, resource: str, *, group: str = "", subresource: str = "") -> bool:
        """Ask whether this account has a right in this namespace, such as to ``create`` ``pods``."""
        attributes = {"namespace": self.namespace, "verb": verb, "group": group, "resource": resource}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {**attributes, "subresource": subresource}},
        }
        review = self.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=body)
        return bool(review["status"]["allowed"])

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: KubeObject | None = None,
        deadline: float = RETRY_TIMEOUT_S,
    ) -> KubeObject:
        """Send a request to the API and parse its answer; retry transient errors for ``deadline`` seconds."""
        text = self._ask(method, path, dict(query or {}), body, deadline)
        try:
            answer: KubeObject = json.loads(text)
        except ValueError as error:  # such as the page of a proxy, for people to log in
            raise ClusterError(
                f"{method} {path}: the answer is not JSON, so this is no API server",
                field="target.connection",
                fix="See the server in the kubeconfig, and any proxy before it",
            ) from error
        return answer

    def log(self, pod: str, container: str = "") -> str:
        """Read what a container has logged so far; by default the pod's only container.

        Raises:
            InvalidError: The container has not started.
        """
        query = {"container": container} if container else {}
        path = f"{self.path('Pod', pod)}/log"
        return self._ask("GET", path, query, body=None, deadline=RETRY_TIMEOUT_S).decode(errors="replace")

    def _ask(
        self, method: str, path: str, query: dict[str, str], body: KubeObject | None, deadline: float
    ) -> bytes:
        """Call the API and return the body of the answer; retry transient errors for ``deadline`` seconds.

        Refused credentials are renewed before the next try.

        Raises:
            ClusterError: The API server refuses the call, or the retries have failed too.
        """
        began = time.monotonic()

        def is_transient(error: BaseException) -> bool:
            """Whether a later try may succeed: the server is away or busy, or the token is still unknown."""
            if not isinstance(error, client.ApiException):  # no answer with an HTTP status
                return isinstance(error, urllib3.exceptions.HTTPError)
            if error.status == _UNAUTHORIZED:
                return time.monotonic() - began < _UNAUTHORIZED_GRACE_S
            return error.status in _TRANSIENT or (method == "POST" and _QUOTA_CONFLICT in str(error.body))

        retrying = Retrying(
            retry=retry_if_exception(is_transient),
            stop=stop_after_delay(deadline),
            wait=wait_exponential(multiplier=0.2, max=4.0) + wait_random(max=1.0),
            before_sleep=self._between_tries,
            reraise=True,
        )
        try:
            return retrying(self._call, method, path, query, body)
        except (client.ApiException, urllib3.exceptions.HTTPError) as error:
            raise _as_cluster_error(error, method, path) from error

    def _call(self, method: str, path: str, query: dict[str, str], body: KubeObject | None) -> bytes:
        """Call the API once, and return the body of the answer; compare the clocks by the time in it."""
        content = _PATCH if method == "PATCH" else "application/json"
        response = self.api.call_api(
            path,
            method,
            query_params=list(query.items()),
            header_params={"Accept": "application/json, */*", "Content-Type": content},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=_TIMEOUT,
        )
        with suppress(KeyError, ValueError):  # in whole seconds: half a second is cut off on average
            self._ahead_s = parsedate_to_datetime(response.headers["Date"]).timestamp() + 0.5 - time.time()
        return bytes(response.data)

    def _between_tries(self, state: RetryCallState) -> None:
        """Renew refused credentials; warn, once for each call, if an object cannot be created for seconds."""
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, client.ApiException) and error.status == _UNAUTHORIZED:
            self._open()
        method, path, *_ = state.args
        # Only creations (POST): callers report failed reads themselves.
        if isinstance(error, Exception) and method == "POST" and state.attempt_number == _WARN_ATTEMPT:
            _LOG.warning("%s: it is tried again", _as_cluster_error(error, method, path).message)


def _as_cluster_error(error: Exception, method: str, path: str) -> ClusterError:
    """Make a ClusterError that says what to do, from an error of the client."""
    if not isinstance(error, client.ApiException):
        reason = getattr(error, "reason", None) or error
        return ClusterError(
            f"the API server does not answer: {reason}",
            field="target.connection",
            fix="See that the cluster can be reached, and run again",
        )
    try:
        reason = str(json.loads(error.body)["message"])
    except (KeyError, TypeError, ValueError):
        reason = f"{error.status} {error.reason}"
    message = f"{method} {path}: {reason}"
    fix = _FIXES.get(error.status)
    if "failed calling webhook" in message:  # the words of API servers
        # Not the subclass for this status: callers would take it for a fault of the object itself.
        fix = "A webhook of the cluster does not answer: see that its operator runs, and run again"
        return ClusterError(message, field="target.connection", fix=fix, status=error.status)
    if "because it is being terminated" in message:  # of a namespace, with status 403
        fix = "The namespace is being deleted: name another in target.namespace, or make it again afterwards"
    return ClusterError.of_status(error.status, message, fix=fix)


_FIXES = {
    401: "The cluster does not accept the credentials: see target.connection",
    403: "Give this account the Role of docs/kubernetes.md there (`manycpu preflight` names what is missing)",
}
