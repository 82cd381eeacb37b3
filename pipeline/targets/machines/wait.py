"""Follow a supervised process: its log has its output, and its exit record says how it ended."""

import time
from pathlib import Path
from typing import Final

from manycpu.pipeline.adapters import process
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.errors import DeadlineError
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.attempt import with_canceller
from manycpu.pipeline.targets.machines.activity_log import ActivityLog
from manycpu.pipeline.targets.machines.context import MachineContext
from manycpu.pipeline.targets.machines.launch import status

__all__ = ["MachineWatch"]

_BLOCK: Final = 1 << 20  # bytes of the log that one look reads
_LATE: Final = 600.0  # seconds after the deadline; a supervisor that has not ended by then hangs


class MachineWatch:
    """Follows an attempt: each look returns its new lines and its status."""

    def __init__(self, ctx: MachineContext, handle: ProcessHandle, cursor: int | None) -> None:
        self.ctx, self.handle = ctx, handle
        self._log = process.LogFollower(Path(handle.directory) / process.LOG, cursor or 0)
        self._activity = ActivityLog(Path(handle.directory))
        self._until = time.monotonic() + ctx.run.run_timeout + _LATE
        self.spoken = False
        self.behind = False
        """Whether more lines can be read at once: a look reads only a part of a long log."""

    @property
    def observed(self) -> Observed:
        """What the ranks have reported so far."""
        return self._activity.observed

    @property
    def cursor(self) -> int:
        """Bytes of the log that were read: a watch that resumes from here misses and repeats no line."""
        return self._log.offset

    def look(self) -> tuple[list[RankLine], Status]:
        """Read the lines since the last look, and the status. After a terminal status no more lines come.

        Raises:
            DeadlineError: The supervisor hangs: it has not ended the training after its deadline.
        """
        entry = self.ctx.ledger.read()
        current = with_canceller(status(self.ctx, self.handle, entry, self._activity), self.handle, entry)
        before = self._log.offset
        lines = [events.split(line) for line in self._log.read(_BLOCK)]
        self.spoken = self.spoken or any(line.rank is not None for line in lines)
        ended = current.state.terminal
        self.behind = bool(lines) and (ended or self._log.offset - before > _BLOCK // 2)
        if ended and self.behind:
            return lines, Status(state=RunState.RUNNING)  # the last lines have not been read yet
        if ended:
            self._activity.read_all()
        elif time.monotonic() > self._until:
            raise self._hang_error()
        return lines, current

    def _hang_error(self) -> DeadlineError:
        return DeadlineError(
            f"process {self.handle.pid}, which was to end the training after {self.ctx.run.run_timeout} s, "
            f"still has not done so {_LATE:g} s later; it is left as it is",
            field="run.run_timeout",
            fix=f"See what holds it up, and end it: manycpu cancel {self.handle.run}",
        )

    def close(self) -> None:
        """Do nothing: no file stays open between looks."""
