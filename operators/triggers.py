"""What the triggerer runs for a supervised process: a trigger that follows its log to its end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from manycpu.pipeline.spec.naming import run_key

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from manycpu.pipeline.spec.state import Status
    from manycpu.pipeline.verbs.context import RunContext
    from manycpu.pipeline.verbs.wait import Watch

__all__ = ["TrainingTrigger"]


class TrainingTrigger(BaseTrigger):
    """Follow a supervised process to its end, every line of its ranks into the task's log.

    Args:
        handle: The handle of the attempt, as JSON.
        cursor: How much of the log the worker has told.
        by: The try of the task that follows: what the record says when a person ends the task.
        not_before: Seconds since the epoch. An event that comes too soon after the deferral meets the
            scheduler before the worker's own end does, and the scheduler then fails the task.
        deadline: Seconds since the epoch at which the training is ended; None: no deadline.
    """

    def __init__(
        self,
        *,
        handle: dict[str, Any],
        cursor: Any,
        by: str,
        not_before: float = 0,
        deadline: float | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handle, self.cursor, self.by = handle, cursor, by
        self.not_before, self.deadline = not_before, deadline

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Say how to make this trigger anew, on any triggerer of this machine."""
        names = ("handle", "cursor", "by", "not_before", "deadline")
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow; the one event carries the handle, the final status, and whether the deadline was met."""
        from manycpu.pipeline.verbs.wait import POLL

        watch = await asyncio.to_thread(self._watch)
        timed_out = False
        # Files are read, and long logs written, on a thread: other triggers share this event loop.
        while not (seen := await asyncio.to_thread(self._look, watch)).state.terminal:
            if self.deadline is not None and time.time() >= self.deadline:
                timed_out = True
                await asyncio.to_thread(self._cancel, watch.ctx, "execution_timeout")
            await asyncio.sleep(POLL)
        await asyncio.sleep(max(0.0, self.not_before - time.time()))
        payload = {"handle": self.handle, "status": seen.model_dump(mode="json"), "timed_out": timed_out}
        yield TriggerEvent(payload)  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """End the training: a person marked the task, or cleared it. Not called when the triggerer goes."""
        watch = await asyncio.to_thread(self._watch)
        ended = await asyncio.to_thread(self._cancel, watch.ctx, self.by)
        self.log.info("the training %s", "was ended" if ended else "had ended before")

    def _watch(self) -> Watch:
        from manycpu.pipeline.ledger.file import FileLedger
        from manycpu.pipeline.spec.handle import read_handle
        from manycpu.pipeline.verbs.context import reopen
        from manycpu.pipeline.verbs.wait import watch

        directory = Path(self.handle["directory"]).parents[1]
        context = reopen(FileLedger(directory).read(), str(directory.parents[1]))
        cursor = _read_number(self._bookmark)
        if cursor is None:
            cursor = self.cursor
            self._bookmark.write_text(str(cursor))
        return watch(context, read_handle(self.handle), cursor)

    def _look(self, watch: Watch) -> Status:
        from manycpu.pipeline.spec.events import readable
        from manycpu.pipeline.verbs.wait import outcome

        lines, seen = watch.look()
        for line in lines:
            self.log.info("%s", readable(line))
        if lines:
            self._bookmark.write_text(str(watch.cursor))
        return outcome(watch.ctx, watch.handle, seen) if seen.state.terminal else seen

    def _cancel(self, context: RunContext, by: str) -> bool:
        from manycpu.pipeline.verbs.cancel import cancel

        return cancel(context, by=by, attempt=self.handle["attempt"])

    @property
    def _bookmark(self) -> Path:
        """How far the log was told to this try: a trigger that moves to another triggerer repeats nothing."""
        return Path(self.handle["directory"]) / f"told.{run_key(self.by)}"


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
