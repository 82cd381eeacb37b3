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

CONTAINER: Final = "pytorch"  # the operator looks at no other container
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
                # Running pods stay: they may still write when the operator calls the job a success.
                # The operator gives up at this number of restarts of all pods: one more than is allowed.
                "runPolicy": pods.run_policy(run, target, clean="None", backoff=run.max_restarts + 1),
                "nprocPerNode": str(run.processes),
                **({"elasticPolicy": _elastic(run, placement)} if torchrun_pods.restarts(run) else {}),
                "pytorchReplicaSpecs": {"Worker": workers},
            },
        }
    ]


def state(job: KubeObject | None, pods: Sequence[KubeObject]) -> Status:
    """Derive the run's state: it has succeeded when the job has and no pod still works.

    The operator calls a job with a rendezvous a success when the first pod is; others may still write.
    """
    status = job_state(PYTORCHJOB, job)
    if job is None or status.state is not RunState.SUCCEEDED:
        return status
    ended = completion_time(job)
    if working := _names(pod for pod in pods if _works(pod, ended)):
        return Status(state=RunState.RUNNING, reason=f"waiting for {working} to end")
    failed = _names(pod for pod in pods if _failed(pod))
    elastic = job["spec"].get("elasticPolicy")
    may_shrink = elastic is not None and elastic["minReplicas"] < elastic["maxReplicas"]
    if failed and not may_shrink:
        reason = f"the PyTorchJob is called a success, but {failed} failed"
        return Status(state=RunState.FAILED, reason=reason)
    return status


def ranks(job: KubeObject) -> Ranks | None:
    """Read the number of workers that the job needs to begin, and the pod spec of each."""
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
        "rdzvConf": [
            {"key": key, "value": str(value)} for key, value in torchrun_pods.join_timeouts(run).items()
        ],
    }


def _names(pods: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(sorted(pod["metadata"]["name"] for pod in pods))


def _works(pod: Mapping[str, Any], ended: str | None) -> bool:
    """Whether a pod has ranks that started before the job ended; later ones find no other ranks."""
    running = _container(pod, "state").get("running")
    return running is not None and (ended is None or running["startedAt"] <= ended)


def _failed(pod: Mapping[str, Any]) -> bool:
    """Whether a pod's ranks failed last."""
    phase = (pod.get("status") or {}).get("phase")
    last = _container(pod, "lastState").get("terminated") or {}
    return phase == "Failed" or (phase != "Succeeded" and last.get("exitCode", 0) != 0)


def _container(pod: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    for inner in (pod.get("status") or {}).get("containerStatuses") or ():
        if inner["name"] == CONTAINER:
            return inner.get(what) or {}
    return {}
