"""What a cell shows of a run: its rank 0's prints, and in Jupyter one block with the curve that moves."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from manycpu.pipeline.listeners import Paced, Silent
from manycpu.pipeline.notebook.block import Block
from manycpu.pipeline.notebook.returned import Returned
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.event_types import (
    ErrorEvent,
    Event,
    ExitEvent,
    MetricsEvent,
    ProgressEvent,
    ProofEvent,
    ResultEvent,
    WarningEvent,
)
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.state import describe_exit

__all__ = ["Shown", "shown"]

_TRACE: Final = "Traceback (most recent call last):"
_CHAINED: Final = ("direct cause of the following exception:", "another exception occurred:")
_LINE: Final = 2000  # characters of a line that are kept
_LINES: Final = 500  # of a rank that are kept, from its last traceback on
Failure = tuple[int, str, str]
"""A rank, its host, and its traceback."""


@contextmanager
def shown() -> Iterator["Shown"]:
    """Show a run where this process writes: in Jupyter's cell, else as lines."""
    display = Shown(Block.of_cell())
    try:
        yield display
    finally:
        display.close()


class Shown(Silent):
    """Shows a run, and keeps what its ranks tell of how the function ended.

    Args:
        block: What moves while the run goes on; None where there are only lines.
    """

    def __init__(self, block: Block | None) -> None:
        self._block, self._paced = block, Paced(self._say_progress)
        self._tails: dict[int, list[str]] = {}
        self.returned = Returned()
        """What rank 0 returned."""
        self._meeting: str | None = None
        self._raised: set[int] = set()
        self._failures: list[Failure] = []
        self._warned: set[str] = set()

    def say(self, text: str) -> None:
        """Print a line of our own."""
        with suppress(OSError):  # a closed terminal or pipe, a full disk: what is returned is still to come
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def warn(self, text: str) -> None:
        """Print a warning, once whichever ranks give it."""
        if text not in self._warned:
            self._warned.add(text)
            self.say(f"warning: {text}")

    def close(self) -> None:
        """Let the block stand as it is now."""
        if self._block is not None:
            self._block.close()

    def begin(self, verb: str) -> None:
        """Name the step that the run is at."""
        if self._block is not None:
            self._block.step(verb)

    def progress(self, done: int, total: int) -> None:
        """Show how much of a transfer is done."""
        if self._block is not None:
            self._block.transfer(done, total)

    def finding(self, finding: Finding) -> None:
        """Print what preflight warns of."""
        self.warn(str(finding))

    def line(self, line: RankLine) -> None:
        """Print what rank 0 prints as it is, and what others print with their names."""
        if line.rank is not None:
            self._keep(line.rank, line.text)
        self.say(line.text if line.rank in (0, None) else str(line))

    def event(self, event: Event, line: RankLine) -> None:
        """Move the block, print warnings, keep what is returned and how a rank ended."""
        match event:
            case ProofEvent():
                self._meet(event.meeting)
            case ResultEvent() if line.rank == 0:
                self.returned.take(event)
            case ExitEvent() if event.code != 0 and line.rank is not None:
                trace = "\n".join(self._tails.get(line.rank, ()))
                self._failures.append((line.rank, event.host, trace or describe_exit(event.code)))
            case ErrorEvent() if line.rank is not None:
                self._note_error(line.rank, event)
            case WarningEvent():
                self.warn(event.message)
            case ProgressEvent() | MetricsEvent() if self._block is not None:
                self._block.move(event)
        if self._block is None:
            self._paced.event(event, line)

    def flush(self) -> None:
        """Print the last progress, where there is no block."""
        self._paced.flush()

    def report(self, written: Report, path: str) -> None:
        """Say in the block how the run ended, and where its report is."""
        if self._block is not None:
            self._block.end(written, path)

    def failure(self) -> Failure | None:
        """Return the first rank that failed, of those that raised where any did; None where no rank did.

        A rank that raised has others fail, which miss it.
        """
        raised = [failure for failure in self._failures if failure[0] in self._raised]
        return next(iter([*raised, *self._failures]), None)

    def _keep(self, rank: int, text: str) -> None:
        tail = self._tails.setdefault(rank, [])
        if text == _TRACE and not any(line.endswith(_CHAINED) for line in tail[-2:]):
            tail.clear()
        tail.append(text[:_LINE])
        del tail[:-_LINES]

    def _note_error(self, rank: int, event: ErrorEvent) -> None:
        if event.kind != "Refusal":  # of ours: a rank that ended early, or misses another
            self._raised.add(rank)
        if event.message[:_LINE] not in "\n".join(self._tails.get(rank, ())):
            self._keep(rank, event.message)

    def _meet(self, meeting: str | None) -> None:
        """Begin anew where the ranks meet anew: what they did before a restart is undone."""
        if meeting != self._meeting:
            self._meeting, self._raised, self._failures = meeting, set(), []
            self.returned.begin_round()

    def _say_progress(self, event: Event, line: RankLine) -> None:  # noqa: ARG002 - rank 0's
        if isinstance(event, (ProgressEvent, MetricsEvent)):
            self.say(event.sentence())
