"""wait: watch a training to its end, live, in steps that a worker, a trigger and a terminal can all take."""

import time
from collections.abc import Callable
from pathlib import Path

from manycpu.pipeline import report
from manycpu.pipeline.adapters import process
from manycpu.pipeline.ledger import Result, VerbRecord
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.errors import CancelledError, ManycpuError, TrainingFailedError
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.verbs.context import RunContext
from manycpu.pipeline.verbs.launch import status

__all__ = ["POLL", "Watch", "conclude", "outcome", "wait"]

POLL = 0.5  # seconds between looks: a training's end is seen within a second


class Watch:
    """One look after another at a training: its new lines, and its state."""

    def __init__(self, ctx: RunContext, handle: Handle, offset: int = 0) -> None:
        self.ctx, self.handle = ctx, handle
        self._log = process.LogFollower(Path(handle.directory) / process.LOG, offset)
        self.spoken = False

    @property
    def offset(self) -> int:
        """How much of the log was read, in bytes: whoever goes on from here misses and repeats nothing."""
        return self._log.offset

    def look(self) -> tuple[list[RankLine], Status]:
        """Read what came since the last look. After a terminal state nothing more comes."""
        seen = status(self.handle, self.ctx.ledger.read())
        lines = [events.split(line) for line in self._log.read()]
        if seen.state.terminal:
            while more := self._log.read():
                lines += [events.split(line) for line in more]
        self.spoken = self.spoken or any(line.rank is not None for line in lines)
        return lines, seen


def wait(ctx: RunContext, handle: Handle, on_line: Callable[[RankLine], None]) -> Status:
    """Stay until the training has ended; its deadlines are kept by its supervisor."""
    watch = Watch(ctx, handle)
    while True:
        lines, seen = watch.look()
        for line in lines:
            on_line(line)
        if seen.state.terminal:
            return outcome(ctx, handle, seen)
        time.sleep(POLL)


def outcome(ctx: RunContext, handle: Handle, seen: Status) -> Status:
    """Complete a terminal state with the rank that failed first, and with the proof of scale."""
    observed = observed_of(handle)
    if seen.state is RunState.FAILED:
        return seen.model_copy(update={"failure": observed.failure})
    if seen.state is RunState.SUCCEEDED and (lack := _lacking_proof(ctx, observed)):
        return Status(state=RunState.FAILED, reason=lack)
    return seen


def conclude(ctx: RunContext, handle: Handle, seen: Status) -> None:
    """Note how the wait ended, and raise what a terminal state other than success means.

    Raises:
        CancelledError: Somebody ended the training.
        TrainingFailedError: It failed; with the first rank that failed and its last lines.
    """
    error = _error(seen)
    with ctx.ledger.update() as (entry, _):
        result: Result = "failed" if error else "done"
        entry.verbs["wait"] = VerbRecord(seconds=_seconds(handle), result=result, error=error and str(error))
    if error is not None:
        raise error


def _error(seen: Status) -> ManycpuError | None:
    if seen.state is RunState.SUCCEEDED:
        return None
    kind, verb = (
        (CancelledError, "was cancelled")
        if seen.state is RunState.CANCELLED
        else (TrainingFailedError, "failed")
    )
    parts = [f"the training {verb}: {seen.reason}", seen.failure and str(seen.failure)]
    return kind("\n".join(part for part in parts if part))


def _seconds(handle: Handle) -> float:
    record = process.observe(handle)["exit"]
    return record["ended"] - record["started"] if record else 0.0


def observed_of(handle: Handle) -> report.Observed:
    """Read what the ranks of an attempt said."""
    log = process.LogFollower(Path(handle.directory) / process.LOG)
    lines: list[str] = []
    while more := log.read():
        lines += more
    return report.observe(lines)


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
    return ""
