"""Judge the outcome of a training: a success needs the proof of scale."""

from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState, Status, describe_exit
from manycpu.pipeline.targets.context import RunContext


def outcome(ctx: RunContext, status: Status, observed: Observed) -> Status:
    """Return the final status: a success without the proof of scale becomes a failure.

    The status of a failure also names the first rank that failed, if the ranks reported one.
    """
    if status.state is RunState.FAILED:
        return status.model_copy(update={"failure": observed.failure or status.failure})
    if status.state is RunState.SUCCEEDED and (fault := _lacking_proof(ctx, observed)):
        return Status(state=RunState.FAILED, reason=fault)
    return status


def _lacking_proof(ctx: RunContext, observed: Observed) -> str:
    """Explain what the proof of scale lacks; empty: nothing.

    The proof of scale is the evidence that the ranks that met are those asked for, in number, hosts and
    backend.
    """
    run, world_size = ctx.run, observed.world_size
    least, most = (nodes * run.processes for nodes in run.nodes)  # ranks: an elastic run has a range of nodes
    if world_size is None:
        return "no rank ever introduced itself, so nothing shows that the training ran as asked"
    if not least <= world_size <= most:
        asked = str(least) if least == most else f"{least} to {most}"
        return f"{asked} ranks were asked for, {world_size} met"
    if len(observed.ranks) != world_size:
        return f"{world_size} ranks met, but {len(observed.ranks)} introduced themselves"
    # Whether a run without an observed backend is a fault, `_lacking_end` decides.
    if run.backend is not None and observed.backend not in (None, run.backend):
        return f"backend {run.backend} was asked for, {observed.backend} was used"
    devices = {rank.devices for rank in observed.ranks}
    if run.device == "xla" and devices != {run.nproc_per_node}:
        return f"{run.nproc_per_node} devices of XLA were asked for, and the ranks drive {devices}"
    return _lacking_spread(ctx, observed) or _lacking_end(ctx, observed)


def _lacking_spread(ctx: RunContext, observed: Observed) -> str:
    """Explain that the ranks ran on fewer nodes or machines than the run asks for; empty: on enough."""
    least = ctx.run.nodes.least
    # Each pod has a host name of its own, which a rank reports if it is not the machine's.
    hostnames = sorted({rank.hostname or rank.host for rank in observed.ranks})
    if ctx.target.has_host_per_node and len(hostnames) < least:
        return f"{least} nodes were asked for, and all ranks ran in {', '.join(hostnames)}"
    if ctx.run.spread == "require" and len(observed.hosts) < least:
        return f"run.spread requires {least} machines, and all ranks ran on {', '.join(observed.hosts)}"
    return ""


def _lacking_end(ctx: RunContext, observed: Observed) -> str:
    """Explain why the success that a launcher reports does not count; empty: it counts.

    It does not count if a rank failed, if the end of a rank is unknown, or if the ranks formed no group.
    """
    success = f"the {ctx.target.launch} is called a success, but"
    # An exit code that is neither 0 nor unknown (None).
    failed = next((rank for rank in observed.ranks if rank.exit_code), None)
    if failed is not None and failed.exit_code is not None:
        who = f"rank {failed.rank} on {failed.hostname or failed.host}"
        return f"{success} {who} ended with {describe_exit(failed.exit_code)}"
    silent = [rank.hostname or rank.host for rank in observed.ranks if rank.exit_code is None]
    if silent and not ctx.target.vouches_for_ranks:  # a launcher that vouches would have failed with a rank
        return (
            f"{success} nothing shows how the ranks on {', '.join(dict.fromkeys(silent))} ended: "
            "their pods are gone, or were restarted since"
        )
    if observed.backend is None and len(observed.ranks) > 1:
        # A rank reports its backend itself, unless its program ends by `os._exit`.
        return (
            f"{observed.world_size} ranks met, but none of them ever initialised torch.distributed: each "
            "trained alone, or did so in another program that it started or became (os.exec). Make that one "
            "run.program, or call torch.distributed.init_process_group in this one"
        )
    return ""
