"""PyTorchJob (kubeflow.org/v1): torchrun in every pod, with a static rendezvous or an elastic one (c10d).

All pods are Workers, and the first is the master. With a pod of type Master, the operator would add an init
container to the Workers. Pod Security ``restricted`` refuses that container, and it costs the pods the QoS
class Guaranteed. The operator would also call the job a success while Workers still write.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from manycpu.pipeline.launchers import pods
from manycpu.pipeline.launchers.environment import node_command
from manycpu.pipeline.launchers.pod_spec import Ranks, literal
from manycpu.pipeline.launchers.states import container_state, job_state
from manycpu.pipeline.spec.job_kinds import PYTORCHJOB
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun

UNSUPPORTED = {
    "target.mpi": "a PyTorchJob's ranks are started by torchrun; target.launch 'mpijob' has an MPI",
    "target.runtime": "a runtime is of Trainer; target.launch 'trainjob' has one",
}

CONTAINER: Final = PYTORCHJOB.containers[0]
# The operator's own label: nothing else numbers the pods of a template.
NUMBER: Final = "metadata.labels['training.kubeflow.org/replica-index']"
PORT: Final = 23456


def objects(run: TrainingRun, target: Kubernetes, placement: Placement) -> list[dict[str, Any]]:
    """Build the manifest of the PyTorchJob, as a list of one."""
    first = f"{placement.job}-worker-0"
    low, high = run.nodes
    workers = {
        "replicas": high,
        "restartPolicy": pods.restart_policy(run, target),
        "template": template(CONTAINER, run, target, placement, first=first, number=NUMBER),
    }
    spec = {
        # clean: running pods stay, as they may still write when the operator calls the job a success.
        # backoff: the operator gives up at this number of restarts of all pods: one more than is allowed.
        "runPolicy": pods.run_policy(run, target, clean="None", backoff=run.max_restarts + 1),
        "nprocPerNode": str(run.processes),
    }
    if _needs_elastic_rendezvous(run):
        spec["elasticPolicy"] = {
            "rdzvBackend": "c10d",
            "rdzvId": placement.job,
            "minReplicas": low,
            "maxReplicas": high,
            "maxRestarts": run.max_restarts,
            "rdzvConf": [{"key": key, "value": str(value)} for key, value in _join_timeouts(run).items()],
        }
    return [
        {
            "apiVersion": PYTORCHJOB.resource.api_version,
            "kind": PYTORCHJOB.resource.kind,
            "metadata": pods.metadata(target, placement),
            "spec": spec | {"pytorchReplicaSpecs": {"Worker": workers}},
        }
    ]


def template(  # noqa: PLR0913 - what makes up a pod
    container: str, run: TrainingRun, target: Kubernetes, placement: Placement, *, first: str, number: str
) -> KubeObject:
    """Build the template of a pod in which torchrun starts ranks; TrainJobs without an MPI use it, too.

    All ranks meet at the host ``first``; ``number`` is the field with the pod's number in its job.
    """
    fields, variables = {"MANYCPU_NODE_RANK": number}, {}
    if _needs_elastic_rendezvous(run):
        # Ranks meet by address: the name of the next rank 0 may not be in DNS yet.
        fields["MANYCPU_ADDRESS"] = "status.podIP"
        # After each restart, the new rank 0 makes a new store: a shared one would stay on a lost node.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    inner = pods.container(
        container,
        target,
        placement,
        command=_command(run, placement, first),
        variables=pods.rank_variables(run, placement) | variables,
        limits=pods.rank_resources(run),
    )
    return pods.rank_template(pods.with_fields(inner, fields), run, target, placement)


def _needs_elastic_rendezvous(run: TrainingRun) -> bool:
    """Whether ranks may meet again, after a restart or on other nodes; a static rendezvous meets once."""
    return run.elastic or run.max_restarts > 0


def _join_timeouts(run: TrainingRun) -> dict[str, int]:
    """Compute torchrun's timeouts for the rendezvous, in seconds: the last pod may be queued that long."""
    seconds = run.queue_timeout + run.start_timeout
    # read_timeout is for the rendezvous itself, on a pod that may start last (default: 60 s).
    return {"join_timeout": seconds, "read_timeout": seconds}


def _command(run: TrainingRun, placement: Placement, first: str) -> Iterator[str]:
    """Yield the words of a pod's command: torchrun, its options, and a rank's program.

    Kubernetes replaces ``$(NAME)`` by a variable of the pod; ``literal`` protects the user's text from that.
    """
    low, high = run.nodes
    timeouts = _join_timeouts(run)
    elastic = _needs_elastic_rendezvous(run)
    module = "manycpu.pipeline.node.torchrun" if elastic else "torch.distributed.run"
    yield from (literal(placement.python), "-m", module)
    yield f"--nnodes={low if low == high else f'{low}:{high}'}"  # a number, or a range
    yield f"--nproc-per-node={run.processes}"
    yield f"--max-restarts={run.max_restarts}"
    if elastic:
        yield "--rdzv-backend=c10d"
        yield f"--rdzv-endpoint={first}:{PORT}"
        yield f"--rdzv-id={placement.job}"
        yield "--local-addr=$(MANYCPU_ADDRESS)"
        yield f"--rdzv-conf={','.join(f'{key}={value}' for key, value in timeouts.items())}"
    else:
        yield "--node-rank=$(MANYCPU_NODE_RANK)"
        yield f"--master-addr={first}"
        yield f"--master-port={PORT}"
        yield f"--rdzv-conf=timeout={timeouts['join_timeout']}"
    yield from map(literal, ["--no-python", placement.python, *node_command(run, placement)])


def state(job: KubeObject | None, pods: Sequence[KubeObject]) -> Status:
    """Derive the run's state: it has succeeded when the job has, and no pod works any more or has failed.

    With an elastic rendezvous, the operator calls the job a success as soon as its first pod has succeeded.
    Other pods may still write, or fail. If the number of nodes may shrink, a failed pod does not count.
    """
    status = job_state(PYTORCHJOB, job)
    if job is None or status.state is not RunState.SUCCEEDED:
        return status
    end_time = (job.get("status") or {}).get("completionTime")
    pods = sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))
    if working := [pod["metadata"]["name"] for pod in pods if _has_working_ranks(pod, end_time)]:
        return Status(state=RunState.RUNNING, reason=f"waiting for {', '.join(working)} to end")
    failed = [pod["metadata"]["name"] for pod in pods if _has_failed(pod)]
    # If the number of nodes may shrink, the others continue without a pod that failed.
    elastic = job["spec"].get("elasticPolicy")
    may_shrink = elastic is not None and elastic["minReplicas"] < elastic["maxReplicas"]
    if failed and not may_shrink:
        reason = f"the PyTorchJob is called a success, but {', '.join(failed)} failed"
        return Status(state=RunState.FAILED, reason=reason)
    return status


def ranks(job: KubeObject) -> Ranks | None:
    """Read how many workers the job needs to begin, and the pod spec of each; None: it has no workers."""
    worker = job["spec"].get("pytorchReplicaSpecs", {}).get("Worker")
    if not worker:
        return None
    min_nodes = (job["spec"].get("elasticPolicy") or {}).get("minReplicas")  # None: all must begin
    return Ranks(nodes=min_nodes or worker.get("replicas", 1), pod=worker["template"]["spec"])


def _has_working_ranks(pod: Mapping[str, Any], ended: str | None) -> bool:
    """Whether a pod runs ranks that started before the job ended; later ones find no others to train with.

    ``ended`` is a time as Kubernetes writes it; None: unknown.
    """
    running = container_state(pod, CONTAINER, "state", "running")
    # Times of this form can be compared as texts.
    return running is not None and (ended is None or running["startedAt"] <= ended)


def _has_failed(pod: Mapping[str, Any]) -> bool:
    """Whether a pod has failed, or its container ended with an error and has not succeeded since."""
    phase = (pod.get("status") or {}).get("phase")
    if phase in ("Failed", "Succeeded"):  # the pod has ended: its phase decides
        return bool(phase == "Failed")
    last = container_state(pod, CONTAINER, "lastState", "terminated") or {}
    return bool(last.get("exitCode", 0) != 0)
