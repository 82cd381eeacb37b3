"""The trigger for a supervised process: it follows the process's log to its end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from manycpu.operators.base_trigger import FollowingTrigger
from manycpu.pipeline.spec.naming import run_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from airflow.triggers.base import TriggerEvent

    from manycpu.pipeline.spec.state import Status
    from manycpu.pipeline.targets import Watch
    from manycpu.pipeline.targets.context import RunContext

__all__ = ["TrainingTrigger"]


class TrainingTrigger(FollowingTrigger):
    """Follow a supervised process, on any triggerer of its machine."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow the process; the one event carries handle, status, and whether the deadline passed."""
        from manycpu.pipeline.verbs.wait import POLL

        watch = await asyncio.to_thread(self._watch)
        timed_out = False
        # Files are read, and long logs written, on a thread: other triggers share this event loop.
        async with self._keeping_alive(watch.ctx):
            while not (status := await asyncio.to_thread(self._look, watch)).state.terminal:
                if self.deadline is not None and time.time() >= self.deadline:
                    timed_out = True
                    await asyncio.to_thread(self._cancel, "execution_timeout")
                if not watch.behind:
                    await asyncio.sleep(POLL)
        yield await self._event(status, timed_out=timed_out)

    def _context(self) -> RunContext:
        from manycpu.pipeline.ledger.file import FileLedger
        from manycpu.pipeline.targets.open_run import reopen

        directory = Path(self.handle["directory"]).parents[1]
        entry, home = FileLedger(directory).read(), str(directory.parents[1])
        return reopen(entry, home, attempt=self.handle["attempt"])

    def _watch(self) -> Watch:
        from manycpu.pipeline.spec.handle import read_handle
        from manycpu.pipeline.verbs.wait import watch

        cursor = _read_number(self._bookmark)
        if cursor is None:
            cursor = self.cursor
            self._bookmark.write_text(str(cursor))
        handle = read_handle(self.handle)
        watching = watch(self._context(), handle, cursor)
        self._listen(watching.ctx, handle)
        return watching

    def _look(self, watch: Watch) -> Status:
        from manycpu.pipeline.targets.outcome import outcome

        lines, status = watch.look()
        self._pass_on(lines)
        if lines:
            self._bookmark.write_text(str(watch.cursor))
        if not status.state.terminal:
            self._show(status, watch.observed)
        return outcome(watch.ctx, status, watch.observed) if status.state.terminal else status

    @property
    def _bookmark(self) -> Path:
        """File that says how much of the log this try has printed: another triggerer repeats nothing."""
        return Path(self.handle["directory"]) / f"told.{run_key(self.by)}"


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
