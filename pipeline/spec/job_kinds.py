"""The kinds of Kubernetes object that a run may have in its namespace, and where the API serves them.

The facts of each kind of job stand here; what only a TrainJob has is where it is used. To add a launch kind,
add a record here, and a file in ``launchers/`` that writes the manifest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from manycpu.pipeline.spec.kube_object import KubeObject

Role = Literal["rank", "launcher"]
"""What a pod is in its job; the value of the label ``manycpu/role`` on its template."""
FAILED: Final = "Failed"
"""The condition that holds when a job of any kind has failed."""


class ApiResource(NamedTuple):
    """A kind of object, and where the API serves it."""

    kind: str
    group: str
    """Empty: the core group, such as for pods."""
    version: str
    """Empty: the version that the cluster prefers."""
    plural: str
    alias: str = ""
    """What manycpu calls it, if another group has a kind of the same name, such as ``Job``."""

    @property
    def name(self) -> str:
        """What manycpu calls it: its alias, or its kind."""
        return self.alias or self.kind

    @property
    def api_version(self) -> str:
        """Group and version, as manifests name them."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def path(self) -> str:
        """Path of the group and version on the API server."""
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.version}"


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """A kind of job."""

    resource: ApiResource
    operator: str
    """Name of the operator that runs it, for people."""
    containers: tuple[str, ...]
    """Names of the containers that its pods are described with; a webhook may inject others beside them."""
    succeeded: str = "Succeeded"
    """The condition that holds when it has succeeded."""
    phases: Mapping[str, str] | None = None
    """Phase in ``status.state`` -> the condition that it stands for; None: the status has conditions."""
    suspend: tuple[str, ...] | None = ("spec", "runPolicy", "suspend")
    """Path of the field that suspends it; None: no field does, and another scheduler admits it."""
    launcher: bool = False
    """Whether a separate pod starts the ranks, passes on their lines, and ends as the worst of them.

    The ranks' pods then run no more than sshd, and a launcher that has begun is not suspended: the operator
    does not resume it.
    """
    companions: tuple[ApiResource, ...] = ()
    """Objects that are created before the job, such as its runtime, and deleted with the run."""

    @property
    def kind(self) -> str:
        """Name of the kind, such as ``PyTorchJob``; what manycpu calls it."""
        return self.resource.name

    @property
    def launch(self) -> str:
        """The launch kind, as ``target.launch`` names it."""
        return self.kind.lower()

    @property
    def speaker(self) -> Role:
        """Role of the pods whose logs are the ranks' lines."""
        return "launcher" if self.launcher else "rank"

    def conditions(self, job: KubeObject | None) -> list[KubeObject]:
        """List the conditions of a job that are true; ``job`` None: there are none.

        A kind with ``phases`` reports a phase instead: the list has the condition that the phase stands for.

        >>> MPIJOB.conditions({"status": {"conditions": [{"type": "Running", "status": "False"}]}})
        []
        """
        status = (job or {}).get("status") or {}
        if self.phases is None:
            # Former conditions stay in the list, with another status than "True".
            return [entry for entry in status.get("conditions") or () if entry["status"] == "True"]
        state = status.get("state") or {}
        phase = state.get("phase")
        if not phase:
            return []
        return [{**state, "type": self.phases.get(phase, phase), "status": "True"}]

    def condition(self, job: KubeObject | None, name: str) -> KubeObject | None:
        """Return a job's condition with this name if it is true; None: it is not."""
        return next((condition for condition in self.conditions(job) if condition["type"] == name), None)

    def end(self, job: KubeObject | None) -> KubeObject | None:
        """Return the condition with which a job has ended; None: it has not.

        If a job has both succeeded and failed, success counts: a worker may be evicted after the launcher has
        succeeded.
        """
        return self.condition(job, self.succeeded) or self.condition(job, FAILED)

    def suspended(self, job: KubeObject) -> bool:
        """Whether a job is suspended.

        >>> MPIJOB.suspended({"spec": {"runPolicy": {"suspend": True}}}), MPIJOB.suspended({"spec": {}})
        (True, False)
        """
        if self.suspend is None:
            return False
        value: Any = job
        for name in self.suspend:  # follow the path to the field
            value = (value or {}).get(name)
        return bool(value)

    def with_suspend(self, suspend: bool) -> KubeObject:
        """Build the patch that suspends or resumes a job; only of a kind that has such a field (``suspend``).

        >>> MPIJOB.with_suspend(True)
        {'spec': {'runPolicy': {'suspend': True}}}
        """
        *outer, last = self.suspend or ()
        patch: KubeObject = {last: suspend}
        for name in reversed(outer):  # wrap the field in the keys of its path, the innermost first
            patch = {name: patch}
        return patch


PYTORCHJOB: Final = JobKind(
    resource=ApiResource("PyTorchJob", "kubeflow.org", "v1", "pytorchjobs"),
    operator="training-operator",
    containers=("pytorch",),  # the operator looks at no other container
)
MPIJOB: Final = JobKind(
    resource=ApiResource("MPIJob", "kubeflow.org", "v2beta1", "mpijobs"),
    operator="mpi-operator",
    containers=("launcher", "worker"),
    launcher=True,
)
TRAINING_RUNTIME: Final = ApiResource(
    "TrainingRuntime", "trainer.kubeflow.org", "v1alpha1", "trainingruntimes"
)
TRAINJOB: Final = JobKind(
    resource=ApiResource("TrainJob", "trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    operator="Trainer",
    containers=("node",),  # Trainer looks at no other container, nor at jobs of other names
    succeeded="Complete",
    suspend=("spec", "suspend"),
    companions=(TRAINING_RUNTIME,),
)
JOB_KINDS: Final[dict[str, JobKind]] = {kind.launch: kind for kind in (PYTORCHJOB, MPIJOB, TRAINJOB)}
"""Launch kind -> its facts; the first is the default of ``target.launch``."""


def resources() -> Mapping[str, ApiResource]:
    """Map each kind of object that launchers may create to where the API serves it.

    Kinds of jobs come before the kinds of their companions.
    """
    jobs = [kind.resource for kind in JOB_KINDS.values()]
    companions = [resource for kind in JOB_KINDS.values() for resource in kind.companions]
    return {resource.name: resource for resource in [*jobs, *companions]}


_KUEUE: Final = "kueue.x-k8s.io"
QUEUE_LABEL: Final = f"{_KUEUE}/queue-name"
"""Label of a job with the queue that admits it."""
PRIORITY_LABEL: Final = f"{_KUEUE}/priority-class"
"""Label of a job with its WorkloadPriorityClass."""
JOB_UID_LABEL: Final = f"{_KUEUE}/job-uid"
"""Label of a workload with the job that it stands for."""
# Without a version: Kueue drops its own after a few releases, so the cluster names the one it prefers.
WORKLOAD: Final = ApiResource("Workload", _KUEUE, "", "workloads")
LOCAL_QUEUE: Final = ApiResource("LocalQueue", _KUEUE, "", "localqueues")
VISIBILITY: Final = ApiResource("PendingWorkloadsSummary", f"visibility.{_KUEUE}", "", "localqueues")
"""The workloads that wait in a queue, in order: ``pendingworkloads`` of the queue."""


CORE_KINDS: Final = {
    "ConfigMap": "configmaps",
    "Event": "events",
    "LimitRange": "limitranges",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Pod": "pods",
    "ResourceQuota": "resourcequotas",
    "Secret": "secrets",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
}
"""Core kind that a run may have in its namespace -> its plural in the API's paths."""
_JOB: Final = ApiResource("Job", "batch", "v1", "jobs")
_OTHER_KINDS: Final = {resource.name: resource for resource in (_JOB, LOCAL_QUEUE, VISIBILITY, WORKLOAD)}


def kind_of(manifest: KubeObject) -> str:
    """Return manycpu's name for the kind of a manifest.

    It differs from the kind if another API group has a kind of the same name (``ApiResource.alias``).

    >>> kind_of({"apiVersion": "v1", "kind": "Pod"})
    'Pod'
    """
    version, kind = manifest.get("apiVersion"), manifest["kind"]
    for resource in resources().values():
        if (resource.api_version, resource.kind) == (version, kind):
            return resource.name
    return str(kind)


def resource_of(kind: str) -> ApiResource:
    """Look up where the API serves a kind of object that a run may have in its namespace.

    >>> resource_of("Pod").path, resource_of("MPIJob").path
    ('/api/v1', '/apis/kubeflow.org/v2beta1')
    """
    if kind in CORE_KINDS:
        return ApiResource(kind, "", "v1", CORE_KINDS[kind])
    return {**resources(), **_OTHER_KINDS}[kind]
