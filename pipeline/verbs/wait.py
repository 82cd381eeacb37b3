"""wait: watch a training to its end, live, in steps that a worker, a trigger and a terminal can all take."""

import logging
import time
from contextlib import closing
from typing import Any

from manycpu.pipeline.ledger import Result, VerbRecord
from manycpu.pipeline.listeners import RankListener, tell
from manycpu.pipeline.observed import Observed
from manycpu.pipeline.spec.errors import (
    CancelledError,
    ClusterError,
    DeadlineError,
    ManycpuError,
    TrainingFailedError,
)
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets import Watch, verbs_of
from manycpu.pipeline.targets.context import RunContext, as_started
from manycpu.pipeline.targets.outcome import outcome

__all__ = ["POLL", "conclude", "observed_of", "wait", "watch"]

_LOG = logging.getLogger(__name__)
POLL = 0.5  # seconds between looks: a training's end is seen within a second


def watch(ctx: RunContext, handle: Handle, cursor: Any = None) -> Watch:
    """Begin to watch an attempt, or go on from where another has come to.

    The watch's run is as the attempt was started, whatever the fields are now.
    """
    ctx = as_started(ctx, ctx.ledger.read(), handle.attempt)
    return verbs_of(ctx).watch(ctx, handle, cursor)


def wait(ctx: RunContext, handle: Handle, *listeners: RankListener) -> Status:
    """Stay until the training has ended; listeners hear all that its ranks write."""
    with ctx.ledger.kept_alive(ctx.waiting_lease), closing(watch(ctx, handle)) as watching:
        while True:
            lines, seen = watching.look()
            tell(lines, *listeners)
            if seen.state.terminal:
                return outcome(watching.ctx, seen, watching.observed)
            if not watching.behind:
                time.sleep(POLL)


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
    seconds = verbs_of(ctx).seconds(ctx, handle)
    with ctx.ledger.update() as entry:
        result: Result = "failed" if error else "done"
        entry.verbs["wait"] = VerbRecord(seconds=seconds, result=result, error=error and str(error))


def observed_of(ctx: RunContext, handle: Handle) -> Observed:
    """Tell what the ranks of an attempt said of themselves."""
    return verbs_of(ctx).observed_of(ctx, handle)


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
