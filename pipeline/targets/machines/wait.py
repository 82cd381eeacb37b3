"""Follow a supervised process: its log has its output, and its exit record says how it ended."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import BaseModel, Field

from manycpu.pipeline.adapters import process
from manycpu.pipeline.launchers.states import process_state
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.observed import Observer, add_exit_records
from manycpu.pipeline.spec import events, exit_records
from manycpu.pipeline.spec.errors import DeadlineError
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.attempt import with_canceller
from manycpu.pipeline.targets.machines.context import MachineContext
from manycpu.pipeline.targets.outcome import outcome

ACTIVITY: Final = "heard.json"
_SAVE_EVERY_BYTES: Final = 4 << 20  # of the log; after a kill, at most so many are read again
_BLOCK_BYTES: Final = 1 << 20  # of the log that one look reads
_LATE_S: Final = 600.0  # after run_timeout: if the supervisor has not ended the training by then, it hangs


class _Saved(BaseModel):
    """The content of the file ``ACTIVITY``."""

    offset: int = 0
    """Bytes of the log that were read."""
    observed: Observed = Field(default_factory=Observed)
    tails: dict[int, list[str]] = Field(default_factory=dict)
    """Rank -> its last lines."""


class ActivityLog:
    """Reads the log of an attempt block by block, and saves beside it what its ranks have reported.

    It also saves how far it has read: a later reader resumes there.
    """

    def __init__(self, directory: Path) -> None:
        self._file = directory / ACTIVITY
        saved = _Saved()
        with suppress(OSError, ValueError):  # nothing was saved, or it is unreadable: read the whole log
            saved = _Saved.model_validate_json(self._file.read_text())
        self._log = process.LogFollower(directory / process.LOG, saved.offset)
        self._saved_offset = saved.offset
        self._observer = Observer(saved.observed, saved.tails)

    @property
    def observed(self) -> Observed:
        """What the ranks have reported so far."""
        return self._observer.observed

    def read_new(self) -> Observed:
        """Read the new lines of the log to its present end; return what the ranks have reported so far."""
        while lines := self._log.read():
            for line in lines:
                self._observer.add_line(events.split(line))
            if self._log.offset - self._saved_offset > _SAVE_EVERY_BYTES:  # a kill may cut a long read
                self._save()
        return self.observed

    def read_all(self) -> Observed:
        """Read the new lines, and save the result, so that no later reader reads these lines again.

        Returns what the ranks have reported so far.
        """
        self.read_new()
        if self._log.offset > self._saved_offset:
            self._save()
        return self.observed

    def _save(self) -> None:
        """Save how far the log was read, and what the ranks have reported."""
        self._saved_offset = self._log.offset
        saved = _Saved(offset=self._saved_offset, observed=self.observed, tails=self._observer.tails)
        with suppress(OSError):  # such as a full disk: the log is read again then
            process.write_json(self._file, saved.model_dump(mode="json", exclude_defaults=True))


def status(
    ctx: MachineContext, handle: ProcessHandle, entry: Entry, activity: ActivityLog | None = None
) -> Status:
    """Read the status of an attempt; a success needs the proof of scale, which is in the log.

    If the supervisor's exit record does not say how the ranks ended, the ranks' own exit records decide. They
    are added to what the ranks have reported.

    ``activity`` is a reader of the log, which continues where it stopped. None: a new reader continues at the
    saved offset, and saves the new one.
    """
    observation = process.observe(handle)  # before the log, so that the log of an ended attempt is complete
    observed = activity.read_new() if activity else ActivityLog(Path(handle.directory)).read_all()
    facts = {"cancelled": handle.attempt in entry.cancelled, "met": observed.met}
    judged = process_state(observation | facts)
    record = observation["exit"]
    ends_are_unknown = record is None or record["reason"]  # no exit record, or a budget was used up
    if judged.state is RunState.FAILED and ends_are_unknown:
        with suppress(OSError):  # the records of the ranks cannot be read: it stays a failure
            finished = exit_records.finished_round(Path(handle.directory) / exit_records.FOLDER)
            add_exit_records(observed, finished)
        if observed.finished:
            reason = f"all ranks had finished before: {judged.in_short}"
            judged = Status(state=RunState.SUCCEEDED, reason=reason)
    if judged.state is RunState.FAILED and record is None and entry.cancelled_by_person(handle.attempt):
        # The supervisor was killed after the cancellation, before it wrote its exit record.
        judged = Status(state=RunState.CANCELLED, reason=judged.reason)
    return outcome(ctx, judged, observed) if judged.state is RunState.SUCCEEDED else judged


class MachineWatch:
    """Follows an attempt: each look returns its new lines and its status.

    Its ``cursor`` is the number of bytes of the log that were read.
    """

    def __init__(self, ctx: MachineContext, handle: ProcessHandle, cursor: int | None) -> None:
        self.ctx, self.handle = ctx, handle
        # Two readers of one log: the lines resume from the cursor, what ranks reported from its own offset.
        self._log = process.LogFollower(Path(handle.directory) / process.LOG, cursor or 0)
        self._activity = ActivityLog(Path(handle.directory))
        self._deadline = time.monotonic() + ctx.run.run_timeout + _LATE_S
        self.behind = False

    @property
    def observed(self) -> Observed:
        return self._activity.observed

    @property
    def cursor(self) -> int:
        return self._log.offset

    def look(self) -> tuple[list[RankLine], Status]:
        """Read the lines since the last look, and the status. After a terminal status no more lines come.

        Raises:
            DeadlineError: The supervisor has not ended the training ten minutes after its time was over.
        """
        entry = self.ctx.ledger.read()
        # Before the lines: those of an ended attempt are then complete.
        new_status = with_canceller(status(self.ctx, self.handle, entry, self._activity), self.handle, entry)
        offset_before = self._log.offset
        lines = [events.split(line) for line in self._log.read(_BLOCK_BYTES)]
        ended = new_status.state.terminal
        # Only whole lines are read, so a full block may be shorter than its limit; then there may be more.
        is_full_block = self._log.offset - offset_before > _BLOCK_BYTES // 2
        # After the end, look again until no line is left.
        self.behind = bool(lines) and (ended or is_full_block)
        if ended and self.behind:
            return lines, Status(state=RunState.RUNNING)  # the last lines have not been read yet
        if ended:
            self._activity.read_all()  # also saves what the ranks reported
        elif time.monotonic() > self._deadline:
            timeout = self.ctx.run.run_timeout
            raise DeadlineError(
                f"process {self.handle.pid}, which was to end the training after {timeout} s, "
                f"still has not done so {_LATE_S:g} s later; it is left as it is",
                field="run.run_timeout",
                fix=f"See what holds it up, and end it: manycpu cancel {self.handle.run}",
            )
        return lines, new_status

    def close(self) -> None:
        """Do nothing: no file stays open between looks."""
