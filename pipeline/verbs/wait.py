"""wait: follow a training until it ends. Airflow workers, triggers and terminals use the same watch."""

import logging
import time
from collections.abc import Iterable
from contextlib import closing
from typing import Any, Final

from manycpu.pipeline.ledger import End, Result, VerbRecord
from manycpu.pipeline.listeners import RankListener, flush, tell
from manycpu.pipeline.spec.errors import (
    CancelledError,
    ClusterError,
    DeadlineError,
    ManycpuError,
    TrainingFailedError,
)
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets import Watch
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import as_started
from manycpu.pipeline.targets.outcome import outcome
from manycpu.pipeline.targets.program_code import hint
from manycpu.pipeline.tracking.ending import tell_state

_LOG = logging.getLogger(__name__)
POLL_INTERVAL_S = 0.5  # seconds between two looks at a training

_NO_GPU_MESSAGES: Final = ("Found no NVIDIA driver on your system", "Torch not compiled with CUDA enabled")
"""Messages of torch, with and without CUDA, if a program asks for a GPU that does not exist."""


def watch(ctx: RunContext, handle: Handle, cursor: Any = None) -> Watch:
    """Watch an attempt, from its beginning or from the cursor of another watch.

    The watch uses the fields that the attempt was started with, even if they were edited later.
    """
    ctx = as_started(ctx, ctx.ledger.read(), handle.attempt)
    return ctx.driver.watch(ctx, handle, cursor)


def lines_so_far(ctx: RunContext, handle: Handle) -> Iterable[RankLine]:
    """Read the lines that an attempt has written up to now."""
    ctx = as_started(ctx, ctx.ledger.read(), handle.attempt)
    return ctx.driver.lines_so_far(ctx, handle)


def wait(ctx: RunContext, handle: Handle, *listeners: RankListener) -> Status:
    """Wait until a training has ended, deliver its output to the listeners, and return its final status.

    This does not renew the run's lease. A caller that works on the run must do so (``Ledger.kept_alive``).
    """
    with closing(watch(ctx, handle)) as watching:
        while True:
            lines, status = watching.look()
            tell(lines, *listeners)
            if status.state.terminal:
                flush(listeners)
                return outcome(watching.ctx, status, watching.observed)
            if not watching.behind:  # else there is more to read at once
                time.sleep(POLL_INTERVAL_S)


def conclude(ctx: RunContext, handle: Handle, status: Status) -> None:
    """Record the end of a training, send it to the trackers, and raise an error unless it succeeded.

    Raises:
        CancelledError: The training was cancelled.
        DeadlineError: The training used up a time budget.
        TrainingFailedError: The training failed; with the first rank that failed and its last lines.
    """
    error = _error(ctx, status)
    try:
        seconds = ctx.driver.seconds(ctx, handle)
        with ctx.ledger.update() as entry:
            result: Result = "failed" if error else "done"
            entry.ends[handle.attempt] = End(state=status.state, reason=status.in_short, seconds=seconds)
            entry.verbs["wait"] = VerbRecord(seconds=seconds, result=result, error=error and str(error))
    except (ClusterError, OSError) as unrecorded:  # such as a full disk: the result counts all the same
        _LOG.warning("how the training ended could not be recorded: %s", unrecorded)
    tell_state(ctx, handle, status)
    if error is not None:
        raise error


def _error(ctx: RunContext, status: Status) -> ManycpuError | None:
    """Make the error for a final status, with advice if the cause is known; None: the training succeeded."""
    if status.state is RunState.SUCCEEDED:
        return None
    kind: type[ManycpuError] = TrainingFailedError
    verb = "failed"
    if status.state is RunState.CANCELLED:
        kind, verb = CancelledError, "was cancelled"
    elif status.budget is not None:
        kind, verb = DeadlineError, "was ended"
    parts = [f"the training {verb}: {status.reason}", status.failure and str(status.failure)]
    lines = status.failure.last_lines if status.failure else ()
    advice = hint(ctx, lines)
    if advice is None and any(message in line for line in lines for message in _NO_GPU_MESSAGES):
        advice = (
            "Ranks have no GPU: have the program compute on torch.device('cpu'), without .cuda() and 'cuda'"
        )
    return kind("\n".join(part for part in parts if part), field=status.budget, fix=advice)
