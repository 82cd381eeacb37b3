"""PyTorchJob (kubeflow.org/v1): torchrun in every pod, with a static rendezvous or an elastic one (c10d).

All pods are Workers, and the first is the master. With a Master the operator would add an init container,
which Pod Security ``restricted`` refuses and which costs the pods the class Guaranteed, and would call the
job a success while Workers still write.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from manycpu.pipeline.launchers import pods, torchrun_pods
from manycpu.pipeline.launchers.pod_spec import Ranks
from manycpu.pipeline.launchers.states import completion_time, job_state
from manycpu.pipeline.spec.job_kinds import PYTORCHJOB
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun

__all__ = ["UNSUPPORTED", "objects", "ranks", "state"]

UNSUPPORTED = {
    "target.mpi": "a PyTorchJob's ranks are started by torchrun; target.launch 'mpijob' has an MPI",
    "target.runtime": "a runtime is of Trainer; target.launch 'trainjob' has one",
}

CONTAINER: Final = "pytorch"  # the only one that the operator looks at
# The operator's own label: nothing else numbers the pods of a template.
NUMBER: Final = "metadata.labels['training.kubeflow.org/replica-index']"


def objects(run: TrainingRun, target: Kubernetes, placement: Placement) -> list[dict[str, Any]]:
    """Describe the PyTorchJob."""
    first = f"{placement.job}-worker-0"
    template = torchrun_pods.template(CONTAINER, run, target, placement, first=first, number=NUMBER)
    workers = {
        "replicas": run.nodes[1],
        "restartPolicy": pods.restart_policy(run, target),
        "template": template,
    }
    return [
        {
            "apiVersion": PYTORCHJOB.resource.api_version,
            "kind": PYTORCHJOB.kind,
            "metadata": pods.metadata(target, placement),
            "spec": {
                # Running ones are let be: they may still write when the job is called a success.
                # Restarts of all pods together at which the operator gives up: one more than may be.
                "runPolicy": pods.run_policy(run, target, clean="None", backoff=run.max_restarts + 1),
                "nprocPerNode": str(run.processes),
                **({"elasticPolicy": _elastic(run, placement)} if torchrun_pods.restarts(run) else {}),
                "pytorchReplicaSpecs": {"Worker": workers},
            },
        }
    ]


def state(job: KubeObject | None, pods: Sequence[KubeObject]) -> Status:
    """Read the run's state: it has succeeded when the job says so and no pod still works.

    A job with a rendezvous is called a success when the first pod is; the others may still write, or fail.
    """
    status = job_state(PYTORCHJOB, job)
    if job is None or status.state is not RunState.SUCCEEDED:
        return status
    ended = completion_time(job)
    if working := _names(pod for pod in pods if _works(pod, ended)):
        return Status(state=RunState.RUNNING, reason=f"waiting for {working} to end")
    failed = _names(pod for pod in pods if _failed(pod))
    if failed and not _may_shrink(job):
        reason = f"the PyTorchJob is called a success, but {failed} failed"
        return Status(state=RunState.FAILED, reason=reason)
    return status


def ranks(job: KubeObject) -> Ranks | None:
    """Read how many workers it cannot begin without, and what each asks for."""
    worker = job["spec"].get("pytorchReplicaSpecs", {}).get("Worker")
    least = (job["spec"].get("elasticPolicy") or {}).get("minReplicas")
    return worker and Ranks(nodes=least or worker.get("replicas", 1), pod=worker["template"]["spec"])


def _elastic(run: TrainingRun, placement: Placement) -> dict[str, Any]:
    low, high = run.nodes
    return {
        "rdzvBackend": "c10d",
        "rdzvId": placement.job,
        "minReplicas": low,
        "maxReplicas": high,
        "maxRestarts": run.max_restarts,
        "rdzvConf": [{"key": key, "value": str(value)} for key, value in torchrun_pods.patience(run).items()],
    }


def _names(pods: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(sorted(pod["metadata"]["name"] for pod in pods))


def _works(pod: Mapping[str, Any], ended: str | None) -> bool:
    """Whether a pod has ranks that were there before the job ended: one that starts later finds nobody."""
    running = _container(pod, "state").get("running")
    return running is not None and (ended is None or running["startedAt"] <= ended)


def _failed(pod: Mapping[str, Any]) -> bool:
    """Whether a pod's ranks failed in the end."""
    phase = (pod.get("status") or {}).get("phase")
    last = _container(pod, "lastState").get("terminated") or {}
    return phase == "Failed" or (phase != "Succeeded" and last.get("exitCode", 0) != 0)


def _container(pod: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    for inner in (pod.get("status") or {}).get("containerStatuses") or ():
        if inner["name"] == CONTAINER:
            return inner.get(what) or {}
    return {}


def _may_shrink(job: Mapping[str, Any]) -> bool:
    """Whether the run goes on when it has lost a node."""
    elastic = job["spec"].get("elasticPolicy")
    return elastic is not None and elastic["minReplicas"] < elastic["maxReplicas"]
