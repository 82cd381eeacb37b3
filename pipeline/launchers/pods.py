"""The pods of a job: what all kinds of job share, under the Pod Security level ``restricted``.

Kubernetes expands ``$(NAME)`` in commands and variables; the user's text is escaped, so it stays unchanged.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
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
from manycpu.pipeline.spec import rank_logs
from manycpu.pipeline.spec.cpu_plan import CpuRequest, plan
from manycpu.pipeline.spec.job_kinds import PRIORITY_LABEL, QUEUE_LABEL, Role
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.machine import Cpu, Machine
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.placement import LIB, Placement
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.spec.words import format_cores, half_of_memory

USER: Final = "manycpu"
# For images that lack this user: ssh and Python's getpass look up its name.
PASSWD: Final = f"root:x:0:0::/root:/bin/sh\n{USER}:x:{UID}:{UID}::{HOME}:/bin/sh\n"
_LONGEST_S: Final = 2**31 - 1  # the maximum of a pod's field
FILES: Final = "files"  # a volume of small files that are annotations of the pod


def metadata(target: Kubernetes, placement: Placement) -> KubeObject:
    """Build the metadata of an attempt's job: name, namespace, labels, and the run's ledger as its owner."""
    job_labels = labels(placement.name, attempt=str(placement.attempt))
    if target.queue:
        job_labels[QUEUE_LABEL] = target.queue
    if target.queue_priority:
        job_labels[PRIORITY_LABEL] = target.queue_priority
    fields: KubeObject = {"name": placement.job, "namespace": target.namespace, "labels": job_labels}
    if placement.owners:
        fields["ownerReferences"] = list(placement.owners)
    return fields


def run_policy(run: TrainingRun, target: Kubernetes, *, clean: str, backoff: int) -> KubeObject:
    """Build a job's ``runPolicy``: what the operator does when pods fail, and when the job ends.

    ``clean``: which pods the operator deletes at the end. ``backoff``: the number of restarts at which the
    operator gives up. There is no TTL (time to live), so the operator never deletes a job that has ended.
    """
    policy: KubeObject = {"cleanPodPolicy": clean, "backoffLimit": backoff, **deadline(run)}
    if target.queue:  # Kueue resumes the job when it admits it; until then, no operator must start it
        policy["suspend"] = True
    return policy


def deadline(run: TrainingRun) -> KubeObject:
    """Build the field by which Kubernetes ends a job or a pod after ``run.longest`` seconds.

    It matters only if no manycpu process follows the run: a follower applies the run's shorter time budgets.

    The deadline of the job does not suffice, so the pods have one too. training-operator checks the job's
    deadline only when the job or a pod changes, and does not stop running pods. mpi-operator counts only from
    the start of the launcher, after all workers.
    """
    return {"activeDeadlineSeconds": min(run.longest, _LONGEST_S)}


def with_deadline(template: KubeObject, run: TrainingRun) -> KubeObject:
    """Add the run's deadline to a template, so that the kubelet ends its pods."""
    return template | {"spec": template["spec"] | deadline(run)}


def restart_policy(run: TrainingRun, target: Kubernetes) -> str:
    """Choose the restartPolicy of a rank's pod: the user's, else one that allows ``run.max_restarts``."""
    return target.restart_policy or ("OnFailure" if run.max_restarts else "Never")


def with_manycpu_on_path(run: TrainingRun) -> TrainingRun:
    """Return the run with the image's copy of manycpu first in the user's PYTHONPATH, if the user sets one.

    Otherwise that variable would replace the image's own, and the pods could not import manycpu.
    """
    path = run.env.get("PYTHONPATH")
    if not path:
        return run
    return run.model_copy(update={"env": run.env | {"PYTHONPATH": f"{LIB}:{path}"}})


def rank_variables(run: TrainingRun, placement: Placement) -> dict[str, str]:
    """Build the variables of a rank's container; those of the user's ``run.env`` win over all others."""
    device = {"PJRT_DEVICE": "TPU"} if run.device == "xla" else {}
    logs = {"MANYCPU_LOGS": str(PurePosixPath(placement.output).with_name(rank_logs.FOLDER))}
    own = {"HOME": HOME, **logs, **device, **_thread_variables(run)}
    return own | environment(with_manycpu_on_path(run), placement)


def _thread_variables(run: TrainingRun) -> Mapping[str, str]:
    """Return the variables with the number of threads, computed from ``run.resources.cpu``.

    They are only for what runs before a rank starts. Each rank computes its own, from the pod's cgroup.
    """
    cores = run.resources.cpu
    if cores is None:
        return {"OMP_NUM_THREADS": "1"}  # else torchrun warns
    # The node is not known yet: assume one socket with as many cores as the run asks for.
    numbers = range(math.ceil(cores))
    machine = Machine(cpus=tuple(Cpu(socket=0, node=0, core=number, number=number) for number in numbers))
    request = CpuRequest(processes=run.processes, subprocesses=run.subprocesses, cpus=cores, env=run.env)
    return plan(machine, request).env


def rank_resources(run: TrainingRun) -> KubeObject:
    """Build the resources of a rank's pod: those of the run, and on device xla the devices of its node."""
    tpus = run.nproc_per_node if run.device == "xla" else 0
    return resources(run.resources.cpu, run.resources.memory, tpus)


def resources(cpu: float | None, memory: str | None, tpus: int = 0) -> KubeObject:
    """Build a container's resources; limits equal requests, so that the pod gets the QoS class Guaranteed."""
    amounts = {}
    if cpu:
        amounts["cpu"] = format_cores(cpu)
    if memory:
        amounts["memory"] = memory
    if tpus:
        amounts[TPU] = str(tpus)
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def container(  # noqa: PLR0913 - what makes up a container
    name: str,
    target: Kubernetes,
    placement: Placement,
    *,
    command: Iterable[str],
    variables: Mapping[str, str],
    limits: KubeObject,
) -> KubeObject:
    """Build a container without privileges.

    Kubernetes expands ``$(NAME)`` in ``command``, so escape the user's text with :func:`literal`. Values of
    ``variables`` are escaped here, and those with secrets refer to the run's Secret. ``limits`` is the
    container's ``resources``: both requests and limits.
    """
    fields: KubeObject = {
        "name": name,
        "image": placement.image,
        "command": list(command),
        "workingDir": placement.code,
        "env": env_list(variables, placement.secret),
        "resources": limits,
        "securityContext": unprivileged(),
    }
    if target.pull_policy:
        fields["imagePullPolicy"] = target.pull_policy
    return fields


def with_fields(container: KubeObject, fields: Mapping[str, str]) -> KubeObject:
    """Add variables that Kubernetes sets from fields of the pod; ``fields``: variable -> field's path."""
    variables = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    return container | {"env": [*variables, *container["env"]]}


def template(
    target: Kubernetes, placement: Placement, role: Role, container: KubeObject, files: Mapping[str, str]
) -> KubeObject:
    """Build a pod template around a container; ``files``: path in the container -> content.

    Each file becomes an annotation of the pod with the file's name. The downward API shows annotations as
    files of a volume, and each of these is mounted at its path. ``role`` becomes a label.
    """
    files = {"/etc/passwd": PASSWD, **files}  # the image may lack the name of its user
    names = {path: path.rsplit("/", 1)[-1] for path in files}  # path -> name of the file
    mounts, items = list[KubeObject](), list[KubeObject]()
    for path in sorted(files):
        name = names[path]
        mounts.append({"name": FILES, "mountPath": path, "subPath": name, "readOnly": True})
        items.append({"path": name, "fieldRef": {"fieldPath": f"metadata.annotations['manycpu/{name}']"}})
    volume = {"name": FILES, "downwardAPI": {"items": items}}
    nodes = on_nodes(target, ranks=role == "rank")
    inner = container | {"volumeMounts": mounts}
    return {
        "metadata": {
            "labels": labels(placement.name, attempt=str(placement.attempt), verb="launch", role=role),
            "annotations": {f"manycpu/{names[path]}": content for path, content in files.items()},
        },
        "spec": pod_spec(inner, [volume], securityContext=security_context(), **nodes),
    }


def rank_template(
    container: KubeObject,
    run: TrainingRun,
    target: Kubernetes,
    placement: Placement,
    files: Mapping[str, str] | None = None,
) -> KubeObject:
    """Build the template of the ranks' pods around a container; ``files``: path in the container -> content.

    It adds a variable with the machine's name, the user's secrets, a deadline, the spread over machines, the
    claim (the run's volume) with data and model read-only, a ``/dev/shm`` in memory, and /etc/passwd.
    """
    container = with_fields(container, {"MANYCPU_HOST": "spec.nodeName"})
    if run.env_from:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in run.env_from]
    built = with_deadline(template(target, placement, "rank", container, files or {}), run)
    built = _spread(built, run)
    shm = {"medium": "Memory"}
    if run.resources.memory:
        # Half of the memory limit, towards which it counts: if it is full, the process that fills it gets an
        # error; without this size, the kernel would kill a rank.
        shm["sizeLimit"] = half_of_memory(run.resources.memory)
    volumes = [
        {"name": "volume", "persistentVolumeClaim": {"claimName": placement.claim}},
        {"name": "shm", "emptyDir": shm},
    ]
    mounts = {"volume": target.mount_path, "shm": "/dev/shm"}  # noqa: S108 - inside a pod
    # Staged folders are mounted a second time, read-only: later runs use them too.
    staged = [name for name, path in (("data", placement.data), ("model", placement.model)) if path]
    home_in_volume = target.home.removeprefix(target.mount_path).strip("/")  # a subPath is relative
    read_only: list[KubeObject] = [
        {
            "name": "volume",
            "mountPath": f"{target.home}/{name}",
            "subPath": f"{home_in_volume}/{name}",
            "readOnly": True,
        }
        for name in staged
    ]
    return _with_mounts(add_volumes(built, volumes, mounts), read_only)


def add_volumes(template: KubeObject, volumes: list[KubeObject], mounts: Mapping[str, str]) -> KubeObject:
    """Add volumes to a pod template, and mount them in its container; ``mounts``: volume -> path."""
    template = template | {"spec": template["spec"] | {"volumes": [*template["spec"]["volumes"], *volumes]}}
    return _with_mounts(template, [{"name": name, "mountPath": path} for name, path in mounts.items()])


def _with_mounts(template: KubeObject, mounts: list[KubeObject]) -> KubeObject:
    """Add volume mounts to the container of a template."""
    spec = template["spec"]
    (inner,) = spec["containers"]  # a pod of manycpu has one
    inner = inner | {"volumeMounts": [*inner["volumeMounts"], *mounts]}
    return template | {"spec": spec | {"containers": [inner]}}


def _spread(template: KubeObject, run: TrainingRun) -> KubeObject:
    """Require or prefer that each pod of ranks of an attempt has a machine of its own."""
    template_labels = template["metadata"]["labels"]
    names = ("manycpu/run", "manycpu/attempt", "manycpu/role")
    same_ranks = {"matchLabels": {name: template_labels[name] for name in names}}
    term = {"labelSelector": same_ranks, "topologyKey": "kubernetes.io/hostname"}
    rule: KubeObject
    if run.spread == "require":
        rule = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    else:
        weighted = {"weight": 100, "podAffinityTerm": term}  # 100 is the maximum
        rule = {"preferredDuringSchedulingIgnoredDuringExecution": [weighted]}
    return template | {"spec": template["spec"] | {"affinity": {"podAntiAffinity": rule}}}
