"""The pods of a job: what all kinds of job share, under the Pod Security level ``restricted``.

Kubernetes expands ``$(NAME)`` in commands and variables; what comes from the user is written so that it stays
as it is.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Final

from manycpu.pipeline.launchers.environment import environment
from manycpu.pipeline.launchers.pod_spec import (
    HOME,
    TPU,
    UID,
    env_list,
    on_nodes,
    pod_spec,
    security_context,
    unprivileged,
)
from manycpu.pipeline.spec import cpu_plan, node_spec
from manycpu.pipeline.spec.cpu_request import CpuRequest
from manycpu.pipeline.spec.job_kinds import PRIORITY_LABEL, QUEUE_LABEL, Role
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.placement import LIB, Placement
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.spec.words import format_cores, half_of_memory

__all__ = [
    "USER",
    "add_volumes",
    "container",
    "metadata",
    "rank_resources",
    "rank_template",
    "rank_variables",
    "resources",
    "restart_policy",
    "run_policy",
    "template",
    "with_end",
    "with_fields",
    "with_library",
]

USER: Final = "manycpu"
# Any image will do, also one that knows no such user: ssh and Python's getpass ask for its name.
PASSWD: Final = f"root:x:0:0::/root:/bin/sh\n{USER}:x:{UID}:{UID}::{HOME}:/bin/sh\n"
_LONGEST: Final = 2**31 - 1  # seconds: what fits into a pod's field
FILES: Final = "files"  # a volume of small files that come from the pod's own annotations


def metadata(target: Kubernetes, placement: Placement) -> KubeObject:
    """Build name, labels and owner of a job."""
    queue = {QUEUE_LABEL: target.queue, PRIORITY_LABEL: target.queue_priority}
    fields: KubeObject = {
        "name": placement.job,
        "namespace": target.namespace,
        "labels": labels(placement.name, attempt=str(placement.attempt))
        | {label: name for label, name in queue.items() if name},
    }
    return fields | ({"ownerReferences": list(placement.owners)} if placement.owners else {})


def run_policy(run: TrainingRun, target: Kubernetes, *, clean: str, backoff: int) -> KubeObject:
    """Build the operator's policy for failures and the job's end; no time to live, which would delete it."""
    policy: KubeObject = {"cleanPodPolicy": clean, "backoffLimit": backoff, **latest_end(run)}
    # Its queue lets it go on: where there is no Kueue, nothing starts past the queue.
    return policy | ({"suspend": True} if target.queue else {})


def latest_end(run: TrainingRun) -> KubeObject:
    """Say when it ends also where nobody waits for it any more; with a waiter the time budgets come first.

    It stands in the job and in its pods: training-operator looks at the job's only when something else
    happens to it, and then lets running pods be; mpi-operator starts it with the launcher, after all workers.
    """
    return {"activeDeadlineSeconds": min(run.longest, _LONGEST)}


def with_end(template: KubeObject, run: TrainingRun) -> KubeObject:
    """Have the kubelet end a template's pods at the latest end of the run."""
    return template | {"spec": template["spec"] | latest_end(run)}


def restart_policy(run: TrainingRun, target: Kubernetes) -> str:
    """Choose what becomes of a rank's container that failed."""
    return target.restart_policy or ("OnFailure" if run.max_restarts else "Never")


def with_library(run: TrainingRun) -> TrainingRun:
    """Put manycpu itself, which images have on PYTHONPATH, before what the user's has."""
    path = run.env.get("PYTHONPATH")
    env = run.env | {"PYTHONPATH": f"{LIB}:{path}"} if path else run.env
    return run.model_copy(update={"env": env})


def rank_variables(run: TrainingRun, placement: Placement) -> dict[str, str]:
    """Build the environment of a rank's container: the user's ``env`` wins over the CPU plan."""
    device = {"PJRT_DEVICE": "TPU"} if run.device == "xla" else {}
    return {"HOME": HOME, **device, **_threads(run), **environment(with_library(run), placement)}


def _threads(run: TrainingRun) -> Mapping[str, str]:
    """Plan CPUs as far as the run says what a node grants; each rank plans again, from its cgroup."""
    cores = run.resources.cpu
    if cores is None:
        return {"OMP_NUM_THREADS": "1"}  # or torchrun warns
    machine = node_spec.describe(f"cores={math.ceil(cores)}")
    request = CpuRequest(processes=run.processes, subprocesses=run.subprocesses, cpus=cores, env=run.env)
    return cpu_plan.plan(machine, request).env


def rank_resources(run: TrainingRun) -> KubeObject:
    """Build what a rank's pod asks for: the run's resources, and on device xla the devices of its node."""
    tpus = run.nproc_per_node if run.device == "xla" else 0
    return resources(run.resources.cpu, run.resources.memory, tpus)


def resources(cpu: float | None, memory: str | None, tpus: int = 0) -> KubeObject:
    """Build limits equal to requests, so that the pod is of the class Guaranteed."""
    amounts = {"cpu": format_cores(cpu) if cpu else None, "memory": memory}
    amounts |= {TPU: str(tpus) if tpus else None}
    present = {name: amount for name, amount in amounts.items() if amount}
    return {"requests": present, "limits": dict(present)} if present else {}


def container(  # noqa: PLR0913 - what makes up a container
    name: str,
    target: Kubernetes,
    placement: Placement,
    *,
    command: Iterable[str],
    variables: Mapping[str, str],
    limits: KubeObject,
) -> KubeObject:
    """Build a container with no privileges; the command is taken as Kubernetes reads it."""
    fields: KubeObject = {
        "name": name,
        "image": placement.image,
        "command": list(command),
        "workingDir": placement.code,
        "env": env_list(variables, placement.secret),
        "resources": limits,
        "securityContext": unprivileged(),
    }
    return fields | ({"imagePullPolicy": target.pull_policy} if target.pull_policy else {})


def _as_rank(container: KubeObject, run: TrainingRun) -> KubeObject:
    """Add to a container what only ranks have: the name of their machine, and secrets."""
    container = with_fields(container, {"MANYCPU_HOST": "spec.nodeName"})
    secrets = [{"secretRef": {"name": name}} for name in run.env_from]
    return container | ({"envFrom": secrets} if secrets else {})


def with_fields(container: KubeObject, fields: Mapping[str, str]) -> KubeObject:
    """Add fields of the pod to a container's environment: variable -> path of the field."""
    sources = {name: {"fieldRef": {"fieldPath": path}} for name, path in fields.items()}
    variables = [{"name": name, "valueFrom": source} for name, source in sources.items()]
    return container | {"env": [*variables, *container["env"]]}


def template(
    target: Kubernetes, placement: Placement, role: Role, container: KubeObject, files: Mapping[str, str]
) -> KubeObject:
    """Build a pod template around a container.

    Args:
        target: Where it runs.
        placement: What the attempt is called.
        role: What the pods are in their job.
        container: The container.
        files: Absolute path -> content of small files that the container finds.
    """
    files = {"/etc/passwd": PASSWD, **files}
    mounts = [
        {"name": FILES, "mountPath": path, "subPath": _key(path), "readOnly": True} for path in sorted(files)
    ]
    container = container | {"volumeMounts": mounts}
    nodes = on_nodes(target, ranks=role == "rank")
    spec = pod_spec(container, [_files_volume(files)], securityContext=security_context(), **nodes)
    named = labels(placement.name, attempt=str(placement.attempt), verb="launch", role=role)
    annotations = {f"manycpu/{_key(path)}": content for path, content in files.items()}
    return {
        "metadata": {"labels": named, "annotations": annotations},
        "spec": spec,
    }


def rank_template(
    container: KubeObject,
    run: TrainingRun,
    target: Kubernetes,
    placement: Placement,
    files: Mapping[str, str] | None = None,
) -> KubeObject:
    """Build the template of the ranks' pods around a container, with all that a run may ask of them.

    That is the name of their machine and secrets, a latest end, machines of their own, the claim, and
    ``/dev/shm``. Arguments as of :func:`template`.
    """
    built = template(target, placement, "rank", _as_rank(container, run), files or {})
    return _with_volumes(_spread(with_end(built, run), run), target, placement, run.resources.memory)


def _with_volumes(
    template: KubeObject, target: Kubernetes, placement: Placement, memory: str | None
) -> KubeObject:
    """Add to a rank's template the claim, and a /dev/shm in memory: half of the limit.

    What was staged is mounted once more, to be read only: later runs use it too.
    """
    shm = {"medium": "Memory"} | ({"sizeLimit": half_of_memory(memory)} if memory else {})
    volumes = [
        {"name": "volume", "persistentVolumeClaim": {"claimName": placement.claim}},
        {"name": "shm", "emptyDir": shm},
    ]
    mounts = {"volume": target.mount_path, "shm": "/dev/shm"}  # noqa: S108 - inside a pod
    template = add_volumes(template, volumes, mounts)
    return _with_mounts(template, [_read_only(target, name) for name in _staged(placement)])


def _staged(placement: Placement) -> list[str]:
    return [name for name, path in (("data", placement.data), ("model", placement.model)) if path]


def _read_only(target: Kubernetes, name: str) -> KubeObject:
    """Mount a folder of the claim in its own place."""
    path = f"{target.home}/{name}"
    below = path.removeprefix(target.mount_path).strip("/")
    return {"name": "volume", "mountPath": path, "subPath": below, "readOnly": True}


def add_volumes(template: KubeObject, volumes: list[KubeObject], mounts: Mapping[str, str]) -> KubeObject:
    """Add volumes to a template, mounted in its container: name -> path."""
    template = template | {"spec": template["spec"] | {"volumes": [*template["spec"]["volumes"], *volumes]}}
    return _with_mounts(template, [{"name": name, "mountPath": path} for name, path in mounts.items()])


def _with_mounts(template: KubeObject, mounts: list[KubeObject]) -> KubeObject:
    spec = template["spec"]
    (inner,) = spec["containers"]
    inner = inner | {"volumeMounts": [*inner["volumeMounts"], *mounts]}
    return template | {"spec": spec | {"containers": [inner]}}


def _spread(template: KubeObject, run: TrainingRun) -> KubeObject:
    """Keep the ranks' pods of an attempt on machines of their own, or try to."""
    template_labels = template["metadata"]["labels"]
    like = {name: template_labels[name] for name in ("manycpu/run", "manycpu/attempt", "manycpu/role")}
    term = {"labelSelector": {"matchLabels": like}, "topologyKey": "kubernetes.io/hostname"}
    rule: KubeObject = (
        {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
        if run.spread == "require"
        else {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    )
    return template | {"spec": template["spec"] | {"affinity": {"podAntiAffinity": rule}}}


def _files_volume(files: Mapping[str, str]) -> KubeObject:
    items = [
        {"path": _key(path), "fieldRef": {"fieldPath": f"metadata.annotations['manycpu/{_key(path)}']"}}
        for path in sorted(files)
    ]
    return {"name": FILES, "downwardAPI": {"items": items}}


def _key(path: str) -> str:
    return path.rsplit("/", 1)[-1]
