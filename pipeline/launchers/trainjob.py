"""TrainJob (trainer.kubeflow.org/v1alpha1): a JobSet that Trainer makes from a runtime.

Either the runtime is made for the run, and describes its pods in full. Or it is a runtime of the cluster, and
the job patches those fields of its pods that Trainer allows. A JobSet gives its pods names with random
suffixes, so the ranks meet by host names, which have none. torchrun starts the ranks. If an MPI is named,
mpirun starts them instead, in a launcher pod, and Trainer makes the keys.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final

from manycpu.pipeline.launchers import mpijob, mpirun, pods, pytorchjob
from manycpu.pipeline.launchers.pod_spec import Ranks, literal
from manycpu.pipeline.launchers.states import container_state, job_state
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.exit_records import EXIT_CODES
from manycpu.pipeline.spec.job_kinds import TRAINING_RUNTIME, TRAINJOB
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.targets import DEFAULT_RUNTIME, OWN_RUNTIME, Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun

UNSUPPORTED = {
    "elastic": "a TrainJob has a fixed number of nodes; target.launch 'pytorchjob' takes a range",
    "target.restart_policy": "a TrainJob has a new pod in the place of one that failed",
}
NODE: Final = TRAINJOB.containers[0]  # also the name of the job that has it
LAUNCHER: Final = "launcher"
HOSTFILE_PATH: Final = f"/etc/manycpu/{mpirun.HOSTFILE}"
SPEAKER: Final = {"manycpu/speaker": "launcher"}  # label: the launcher's log has the ranks' lines
STEP: Final = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
NUMBER: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
MANAGER: Final = "manycpu.dev/run"
RANKS: Final = "manycpu/ranks"
"""Annotation with the spec of a rank's pod, for other jobs that wait for the same nodes."""
_PATCHABLE_FIELDS: Final = (
    *("affinity", "imagePullSecrets", "nodeSelector", "securityContext", "serviceAccountName"),
    *("tolerations", "volumes"),
)
"""Fields of a runtime's pods that a job may change."""
_ARGUMENTS_LIMIT: Final = 128  # of Trainer's API
_RUN_IN_FOLDER: Final = ("/bin/sh", "-c", 'cd "$0" && exec "$@"')


def objects(run: TrainingRun, target: Kubernetes, placement: Placement) -> list[KubeObject]:
    """Build the manifest of the TrainJob, and before it that of the run's own TrainingRuntime if it has one.

    Raises:
        BadInputError: A field that a job may not change in a runtime of the cluster.
    """
    metadata = pods.metadata(target, placement)
    # Without numProcPerNode Trainer counts CPUs, and torchrun starts a rank for each.
    trainer: KubeObject = {"numNodes": run.nodes.most, "numProcPerNode": run.processes}
    if target.mpi:
        template = mpijob.worker_template(NODE, run, target, placement)
    else:
        first = _host_name(placement, 0)
        template = pytorchjob.template(NODE, run, target, placement, first=first, number=NUMBER)
    (container,) = template["spec"]["containers"]  # a pod of manycpu has one
    own_runtime: list[KubeObject] = []
    patches: KubeObject = {}
    if _has_own_runtime(target):
        own_runtime = [_runtime(run, target, placement, template)]
        runtime = {"apiGroup": TRAINING_RUNTIME.group, "kind": TRAINING_RUNTIME.kind, "name": placement.job}
    else:
        # _RUN_IN_FOLDER takes the folder first, and then the command.
        arguments = [literal(placement.code), *container["command"]]
        _check_patch(run, target, arguments)
        runtime = {"name": target.runtime}  # without a kind, a ClusterTrainingRuntime
        patches = {"runtimePatches": [_patch(template)]}
        # A runtime of the cluster has another program and working folder: the TrainJob replaces them.
        program = {
            "image": container["image"],
            "command": list(_RUN_IN_FOLDER),
            "args": arguments,  # else the runtime's own arguments would follow
            "env": container["env"],
            "resourcesPerNode": container["resources"],
        }
        # Without a value, such as resources, that of the runtime stays.
        trainer = {name: value for name, value in program.items() if value} | trainer
    if target.mpi:  # other TrainJobs have no launcher: their ranks' pods print the lines
        metadata["labels"] |= SPEAKER
    job = {
        "apiVersion": TRAINJOB.resource.api_version,
        "kind": TRAINJOB.resource.kind,
        "metadata": metadata | {"annotations": {RANKS: _pod_to_place(template["spec"])}},
        "spec": {
            "runtimeRef": runtime,
            "trainer": trainer,
            **pods.deadline(run),
            **({"suspend": True} if target.queue else {}),  # until Kueue admits it
            **patches,
        },
    }
    return [*own_runtime, job]


def _pod_to_place(spec: KubeObject) -> str:
    """Write a rank's pod spec as JSON, without the user's text and variables, to see which nodes it fits."""
    (container,) = spec["containers"]
    left_out = ("command", "env", "envFrom")
    container = {name: value for name, value in container.items() if name not in left_out}
    return json.dumps({**spec, "containers": [container]}, sort_keys=True)


def state(job: KubeObject | None, pods: Sequence[KubeObject]) -> Status:
    """Derive the run's state from the job; if the run allows no restarts, one failed pod fails the run.

    That rule is for runtimes of a cluster. Even if the run allows no restarts, most of them restart failed
    ranks, and Trainer restarts a failed job whose JobSet is gone. Failed pods of suspended jobs do not count.
    """
    status = job_state(TRAINJOB, job)
    if job is None or status.state.terminal or TRAINJOB.suspended(job):
        return status
    # Only a job with a runtime of the cluster has arguments: torchrun's options, --no-python, the program.
    torchrun_options = takewhile(lambda word: word != "--no-python", job["spec"]["trainer"].get("args") or ())
    if "--max-restarts=0" not in torchrun_options:  # the run may be restarted, or has its own runtime
        return status
    # Also pods that run again: the runtime has restarted what this run must not restart.
    failed = sorted(pod["metadata"]["name"] for pod in pods if _has_ever_failed(pod))
    if not failed:
        return status
    reason = f"{', '.join(failed)} failed, and the runtime {job['spec']['runtimeRef']['name']} restarts them"
    return Status(state=RunState.FAILED, reason=reason)


def ranks(job: KubeObject) -> Ranks | None:
    """Read how many pods of ranks the job has, and the spec of each; None: manycpu did not create it."""
    try:
        pod = json.loads(job["metadata"]["annotations"][RANKS])
        return Ranks(nodes=job["spec"]["trainer"]["numNodes"], pod=pod)
    except (KeyError, TypeError, ValueError):  # not made by manycpu, or changed by a person
        return None


def _has_own_runtime(target: Kubernetes) -> bool:
    """Whether manycpu creates a runtime for the run: if the user asks for it, or with an MPI, or in a queue.

    In a queue, Kueue (as of 0.16) rewrites the whole job when it admits the job. The job would lose its
    patches of a runtime of the cluster.

    Raises:
        BadInputError: A run with an MPI or in a queue names a runtime of the cluster.
    """
    why = ""
    if target.mpi:
        why = "with an MPI"
    elif target.queue:
        why = "in a queue"
    if why and target.runtime not in (DEFAULT_RUNTIME, OWN_RUNTIME):
        raise BadInputError(
            f"{why} the runtime is made for the run, and target.runtime is {target.runtime!r}",
            field="target.runtime",
            fix="Leave it out",
        )
    return bool(why) or target.runtime == OWN_RUNTIME


def _check_patch(run: TrainingRun, target: Kubernetes, arguments: Sequence[str]) -> None:
    """Raise BadInputError if a run needs what a job may not change in a runtime of the cluster."""
    fields = {
        "run.env_from": bool(run.env_from),
        "target.priority_class": target.priority_class is not None,
        "target.pull_policy": target.pull_policy is not None,
    }
    for field, refused in fields.items():
        if refused:
            raise BadInputError(
                f"no TrainJob may change this of a runtime of the cluster's, such as {target.runtime!r}",
                field=field,
                fix=f"Set target.runtime to {OWN_RUNTIME!r}, or leave {field} out",
            )
    if len(arguments) > _ARGUMENTS_LIMIT:
        raise BadInputError(
            f"a TrainJob has {_ARGUMENTS_LIMIT} arguments at most, and {len(arguments)} were to be given",
            field="run.args",
            fix=f"Set target.runtime to {OWN_RUNTIME!r}",
        )


def _runtime(run: TrainingRun, target: Kubernetes, placement: Placement, template: KubeObject) -> KubeObject:
    """Build the manifest of the run's own TrainingRuntime, with the template of its ranks' pods.

    With torchrun it has one job, of ranks. With an MPI it has two: a launcher that runs mpirun, and the pods
    of the ranks, which run sshd.
    """
    node = _replicated_job(run, NODE, template)
    jobs: KubeObject
    if not target.mpi:
        policy: KubeObject = {"torch": {}}
        # The label makes it the job to which Trainer applies the TrainJob's ``trainer``.
        node["template"] = {"metadata": {"labels": STEP}, **node["template"]}
        jobs = {"replicatedJobs": [node]}
    else:
        # Trainer knows Open MPI alone, so only its ssh keys are used: the hostfile is manycpu's own.
        policy = {"mpi": {"sshAuthMountPath": mpijob.KEYS, "numProcPerNode": run.processes}}
        hosts = [_host_name(placement, number, target.namespace) for number in range(run.nodes.most)]
        launcher = mpijob.launcher_template(NODE, run, target, placement, hosts=hosts, hostfile=HOSTFILE_PATH)
        # A rank that refused to begin would refuse again: with these exit codes of the launcher, its job
        # fails at once, without the restarts of backoffLimit.
        codes = {"containerName": NODE, "operator": "In", "values": sorted(EXIT_CODES)}
        pod_failure_policy = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
        jobs = {
            "replicatedJobs": [
                _replicated_job(run, LAUNCHER, launcher, podFailurePolicy=pod_failure_policy),
                node,
            ],
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [LAUNCHER]},  # sshd never ends
        }
    return {
        "apiVersion": TRAINING_RUNTIME.api_version,
        "kind": TRAINING_RUNTIME.kind,
        "metadata": pods.metadata(target, placement),
        "spec": {"mlPolicy": {"numNodes": run.nodes.most, **policy}, "template": {"spec": jobs}},
    }


def _replicated_job(run: TrainingRun, name: str, template: KubeObject, **fields: Any) -> KubeObject:
    """Build a job of the runtime's JobSet from a pod template; ``fields`` are added to the job's spec.

    A pod that failed is not restarted: the job creates a new one, ``backoffLimit`` times at most.
    """
    spec = {
        "backoffLimit": run.max_restarts,
        **fields,
        "template": template | {"spec": template["spec"] | {"restartPolicy": "Never"}},
    }
    return {"name": name, "template": {"spec": spec}}


def _host_name(placement: Placement, number: int, namespace: str = "") -> str:
    """Return the DNS name that the JobSet gives to the pod of ranks ``number``, counted from 0.

    Without ``namespace`` the name is valid within the namespace only.
    """
    # JOBSET-JOB-INDEX-POD.SUBDOMAIN: the index of the only job of ranks is 0.
    name = f"{placement.job}-{NODE}-0-{number}.{placement.job}"
    return f"{name}.{namespace}.svc" if namespace else name


def _patch(template: KubeObject) -> KubeObject:
    """Build the patch by which a TrainJob changes the ranks' pods of a runtime of the cluster.

    Image, command, variables and resources are not in it: the TrainJob has them in ``trainer``.
    """
    spec = _with_one_mount_per_volume(template["spec"])
    (container,) = spec["containers"]
    changed = {name: container[name] for name in ("name", "securityContext", "volumeMounts")}
    pod = {name: spec[name] for name in _PATCHABLE_FIELDS if name in spec} | {"containers": [changed]}
    job = {"name": NODE, "template": {"spec": {"template": {"metadata": template["metadata"], "spec": pod}}}}
    return {
        "manager": MANAGER,
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
    }


def _with_one_mount_per_volume(spec: KubeObject) -> KubeObject:
    """Change a pod spec so that each mount has its own volume, by copies of volumes with several mounts.

    In a patch, Trainer identifies a mount by the name of its volume, so that two would count as one.
    """
    (container,) = spec["containers"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts: dict[str, KubeObject] = {}
    for mount in container["volumeMounts"]:
        volume_name = mount["name"]
        name = volume_name
        while name in mounts:  # an earlier mount has this name: use a copy of the volume with another name
            name = f"{volume_name}-{len(mounts)}"
        mounts[name] = mount | {"name": name}
        volumes[name] = volumes[volume_name] | {"name": name}
    return spec | {
        "volumes": list(volumes.values()),
        "containers": [container | {"volumeMounts": list(mounts.values())}],
    }


def _has_ever_failed(pod: Mapping[str, Any]) -> bool:
    """Whether a pod has failed, or its container has ended with an error, now or before its last restart."""
    if (pod.get("status") or {}).get("phase") == "Failed":
        return True
    ends = [container_state(pod, NODE, when, "terminated") or {} for when in ("state", "lastState")]
    return any(end.get("exitCode") for end in ends)
