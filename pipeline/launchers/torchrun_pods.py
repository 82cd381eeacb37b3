"""torchrun in every pod of a job: its options, with a static rendezvous or an elastic one (c10d)."""

from collections.abc import Iterator
from typing import Final

from manycpu.pipeline.launchers import pods
from manycpu.pipeline.launchers.environment import node_command
from manycpu.pipeline.launchers.pod_spec import literal
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun

__all__ = ["PORT", "join_timeouts", "restarts", "template"]

PORT: Final = 23456


def template(  # noqa: PLR0913 - what makes up a pod
    container: str, run: TrainingRun, target: Kubernetes, placement: Placement, *, first: str, number: str
) -> KubeObject:
    """Build the template of a pod in which torchrun starts ranks.

    Args:
        container: Name of its container.
        run: The run.
        target: Where it runs.
        placement: Where everything is.
        first: The host of the first pod, where all meet.
        number: The field with the pod's number in its job.
    """
    if restarts(run):
        # By address: the name of the next rank 0 may not be in DNS yet.
        fields = {"MANYCPU_ADDRESS": "status.podIP"}
        # A new store for every round, on its rank 0: a shared store stays behind on a lost node.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    else:
        fields, variables = {"MANYCPU_NODE_RANK": number}, {}
    inner = pods.container(
        container,
        target,
        placement,
        command=_command(run, placement, first),
        variables=pods.rank_variables(run, placement) | variables,
        limits=pods.rank_resources(run),
    )
    return pods.rank_template(pods.with_fields(inner, fields), run, target, placement)


def restarts(run: TrainingRun) -> bool:
    """Whether ranks may meet again, after a restart or a change of nodes: needs an elastic rendezvous."""
    return run.elastic or run.max_restarts > 0


def join_timeouts(run: TrainingRun) -> dict[str, int]:
    """Compute the seconds that the first pods wait for the last, which may be queued all that time."""
    seconds = run.queue_timeout + run.start_timeout
    # The second one is for the meeting point itself, on a pod that may start last (default: 60 s).
    return {"join_timeout": seconds, "read_timeout": seconds}


def _command(run: TrainingRun, placement: Placement, first: str) -> Iterator[str]:
    """Build the command of a pod, in which Kubernetes expands the variables of the pod's fields."""
    low, high = run.nodes
    yield from (literal(placement.python), "-m", "torch.distributed.run")
    yield f"--nnodes={low if low == high else f'{low}:{high}'}"
    yield f"--nproc-per-node={run.processes}"
    yield f"--max-restarts={run.max_restarts}"
    if restarts(run):
        yield "--rdzv-backend=c10d"
        yield f"--rdzv-endpoint={first}:{PORT}"
        yield f"--rdzv-id={placement.job}"
        yield "--local-addr=$(MANYCPU_ADDRESS)"
        yield f"--rdzv-conf={','.join(f'{key}={value}' for key, value in join_timeouts(run).items())}"
    else:
        yield "--node-rank=$(MANYCPU_NODE_RANK)"
        yield f"--master-addr={first}"
        yield f"--master-port={PORT}"
        yield f"--rdzv-conf=timeout={join_timeouts(run)['join_timeout']}"
    yield from map(literal, ["--no-python", placement.python, *node_command(run, placement)])
