"""wait: watch a training to its end, live, in steps that a worker, a trigger and a terminal can all take."""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, Protocol

from manycpu.pipeline import report
from manycpu.pipeline.ledger import Result, VerbRecord
from manycpu.pipeline.spec.errors import (
    CancelledError,
    ClusterError,
    DeadlineError,
    ManycpuError,
    TrainingFailedError,
)
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState, Status, describe_exit
from manycpu.pipeline.verbs.context import ClusterContext, RunContext, as_started
from manycpu.pipeline.verbs.place import on_target

__all__ = ["POLL", "Watch", "conclude", "observed_of", "outcome", "wait", "watch"]

_LOG = logging.getLogger(__name__)
POLL = 0.5  # seconds between looks: a training's end is seen within a second
_VOUCHES = frozenset({"processes", "torchrun", "mpirun", "mpijob"})
"""Launch kinds whose success is that of every rank: one launcher ends as the worst of them."""


class Watch(Protocol):
    """One look after another at a training: its new lines, and its state."""

    ctx: Any
    handle: Any
    spoken: bool
    """Whether a rank has said anything."""
    behind: bool
    """Whether more is there to be read at once: a long log comes in parts."""

    @property
    def observed(self) -> report.Observed:
        """What the ranks have said, whether or not it could be recorded."""

    @property
    def cursor(self) -> Any:
        """How far the log was read, as JSON: whoever goes on from here misses and repeats nothing."""

    def look(self) -> tuple[list[RankLine], Status]:
        """Read what came since the last look. After a terminal state nothing more comes."""

    def close(self) -> None:
        """Stop watching; a last look may still tell lines that came before."""


def watch(ctx: RunContext, handle: Handle, cursor: Any = None) -> Watch:
    """Begin to watch an attempt, or go on from where another has come to.

    The watch's run is as the attempt was started, whatever the fields are now.
    """
    ctx = as_started(ctx, ctx.ledger.read(), handle.attempt)
    made: Watch = on_target(ctx, "wait").Watch(ctx, handle, cursor)
    return made


def wait(ctx: RunContext, handle: Handle, on_line: Callable[[RankLine], None]) -> Status:
    """Stay until the training has ended."""
    with ctx.ledger.kept_alive(ctx.waiting_lease), closing(watch(ctx, handle)) as watching:
        while True:
            lines, seen = watching.look()
            for line in lines:
                on_line(line)
            if seen.state.terminal:
                return outcome(watching.ctx, handle, seen, watching.observed)
            if not watching.behind:
                time.sleep(POLL)


def outcome(ctx: RunContext, handle: Handle, seen: Status, observed: report.Observed | None = None) -> Status:
    """Complete a terminal state with the rank that failed first, and with the proof of scale.

    Args:
        ctx: The run, as the attempt was started.
        handle: The attempt.
        seen: Its terminal state.
        observed: What its ranks have said; None: read it anew.
    """
    observed = observed or observed_of(ctx, handle)
    if seen.state is RunState.FAILED:
        return seen.model_copy(update={"failure": observed.failure or seen.failure})
    if seen.state is RunState.SUCCEEDED and (lack := _lacking_proof(ctx, observed)):
        return Status(state=RunState.FAILED, reason=lack)
    return seen


def conclude(ctx: RunContext, handle: Handle, seen: Status) -> None:
    """Note how the wait ended, and raise what a terminal state other than success means.

    Raises:
        CancelledError: Somebody ended the training.
        DeadlineError: A time budget was used up.
        TrainingFailedError: It failed; with the first rank that failed and its last lines.
    """
    error = _error(seen)
    try:
        _record(ctx, handle, error)
    except ClusterError as unrecorded:  # which changes no end
        _LOG.warning("how the training ended could not be recorded: %s", unrecorded)
    if error is not None:
        raise error


def _record(ctx: RunContext, handle: Handle, error: ManycpuError | None) -> None:
    seconds: float = on_target(ctx, "wait").seconds(ctx, handle)
    with ctx.ledger.update() as entry:
        result: Result = "failed" if error else "done"
        entry.verbs["wait"] = VerbRecord(seconds=seconds, result=result, error=error and str(error))


def observed_of(ctx: RunContext, handle: Handle) -> report.Observed:
    """Tell what the ranks of an attempt said of themselves."""
    observed: report.Observed = on_target(ctx, "wait").observed_of(ctx, handle)
    return observed


def _error(seen: Status) -> ManycpuError | None:
    if seen.state is RunState.SUCCEEDED:
        return None
    kind, verb = _kind(seen)
    parts = [f"the training {verb}: {seen.reason}", seen.failure and str(seen.failure)]
    return kind("\n".join(part for part in parts if part), field=seen.budget)


def _kind(seen: Status) -> tuple[type[ManycpuError], str]:
    if seen.state is RunState.CANCELLED:
        return CancelledError, "was cancelled"
    return (TrainingFailedError, "failed") if seen.budget is None else (DeadlineError, "was ended")


def _lacking_proof(ctx: RunContext, observed: report.Observed) -> str:
    """Say what is missing for a success to be believed; empty where nothing is."""
    low, high = (nodes * ctx.run.nproc_per_node for nodes in ctx.run.nodes)
    world = observed.world_size
    if world is None:
        return "no rank ever introduced itself, so nothing shows that the training ran as asked"
    if not low <= world <= high:
        return f"{low if low == high else f'{low} to {high}'} ranks were asked for, {world} met"
    if len(observed.ranks) != world:
        return f"{world} ranks met, but {len(observed.ranks)} introduced themselves"
    if observed.backend not in (None, ctx.run.backend):
        return f"backend {ctx.run.backend} was asked for, {observed.backend} was used"
    return _lacking_spread(ctx, observed) or _lacking_end(ctx, observed)


def _lacking_spread(ctx: RunContext, observed: report.Observed) -> str:
    """Say whether ranks that were to run apart ran in one place: every pod is a host of its own."""
    nodes, places = ctx.run.nodes[0], sorted({rank.hostname or rank.host for rank in observed.ranks})
    if isinstance(ctx, ClusterContext) and len(places) < nodes:
        return f"{nodes} nodes were asked for, and all ranks ran in {', '.join(places)}"
    if ctx.run.spread == "require" and len(observed.hosts) < nodes:
        return f"run.spread requires {nodes} machines, and all ranks ran on {', '.join(observed.hosts)}"
    return ""


def _lacking_end(ctx: RunContext, observed: report.Observed) -> str:
    """Say which ranks of the last meeting did not end well, whatever the launcher is called."""
    failed = next((rank for rank in observed.ranks if rank.exit_code), None)
    if failed is not None and failed.exit_code is not None:
        who = f"rank {failed.rank} on {failed.hostname or failed.host}"
        how = describe_exit(failed.exit_code)
        return f"the {ctx.target.launch} is called a success, but {who} ended with {how}"
    silent = [rank.hostname or rank.host for rank in observed.ranks if rank.exit_code is None]
    if ctx.target.launch in _VOUCHES or not silent:
        return ""
    return (
        f"the {ctx.target.launch} is called a success, but nothing shows how the ranks on "
        f"{', '.join(dict.fromkeys(silent))} ended: their pods are gone, or were restarted since"
    )
