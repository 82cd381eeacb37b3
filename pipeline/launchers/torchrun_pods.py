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

__all__ = ["PORT", "patience", "restarts", "template"]

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
    inner = pods.container(
        container,
        target,
        placement,
        command=_command(run, placement, first),
        variables=pods.rank_variables(run, placement) | _variables(run),
        limits=pods.rank_resources(run),
    )
    return pods.rank_template(pods.with_fields(inner, _places(run, number)), run, target, placement)


def _command(run: TrainingRun, placement: Placement, first: str) -> list[str]:
    """Build the command of a pod, in which Kubernetes expands :func:`_places`."""
    node = ["--no-python", placement.python, *node_command(run, placement)]
    return [*_torchrun(run, placement, first), *map(literal, node)]


def restarts(run: TrainingRun) -> bool:
    """Whether ranks meet again: nodes that come and go, or restarts. A static rendezvous knows neither."""
    return run.elastic or run.max_restarts > 0


def patience(run: TrainingRun) -> dict[str, int]:
    """Seconds that the first pods wait for the last, which may be queued all that time."""
    seconds = run.queue_timeout + run.start_timeout
    # Both: the second is for the meeting point itself, on a pod that may come last (60 s otherwise).
    return {"join_timeout": seconds, "read_timeout": seconds}


def _variables(run: TrainingRun) -> dict[str, str]:
    """List what the rendezvous reads in the environment."""
    # A store of its own for every round, on whoever is rank 0 then: a shared one stays behind on a lost node.
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if restarts(run) else {}


def _places(run: TrainingRun, number: str) -> dict[str, str]:
    """List the variables that are fields of the pod itself: variable -> field."""
    if restarts(run):
        # Whoever is rank 0 next is met at its address: its name may not have reached DNS yet.
        return {"MANYCPU_ADDRESS": "status.podIP"}
    return {"MANYCPU_NODE_RANK": number}


def _torchrun(run: TrainingRun, placement: Placement, first: str) -> Iterator[str]:
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
        yield f"--rdzv-conf={','.join(f'{key}={value}' for key, value in patience(run).items())}"
        return
    yield "--node-rank=$(MANYCPU_NODE_RANK)"
    yield f"--master-addr={first}"
    yield f"--master-port={PORT}"
    yield f"--rdzv-conf=timeout={patience(run)['join_timeout']}"
