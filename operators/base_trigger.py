"""The base of both triggers: follow an attempt to its end, and cancel it when a person ends the task."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from manycpu.operators import task_log
from manycpu.operators.clean_up import clean_up
from manycpu.operators.live import Live
from manycpu.operators.task_state import ENDED_FOR_GOOD, state_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from manycpu.pipeline.listeners import RankListener
    from manycpu.pipeline.spec.events import RankLine
    from manycpu.pipeline.spec.handle import Handle
    from manycpu.pipeline.spec.observed import Observed
    from manycpu.pipeline.spec.state import Status
    from manycpu.pipeline.targets.context import RunContext

__all__ = ["FollowingTrigger"]


class FollowingTrigger(BaseTrigger):
    """Follow an attempt to its end, every line of its ranks into the task's log.

    Args:
        handle: The handle of the attempt, as JSON.
        cursor: How much of the logs the worker has printed.
        by: The try of the task that follows: what the record says when a person ends the task.
        not_before: Seconds since the epoch. An event that comes too soon after the deferral meets the
            scheduler before the worker's own end does, and the scheduler then fails the task.
        deadline: Seconds since the epoch at which the training is ended; None: no deadline.
        place: The task, as :func:`state_of` wants it; None: a task of an older version.
        cleans: The same where the run ends with the task; None: others clean up.
    """

    def __init__(  # noqa: PLR0913 - each has a name
        self,
        *,
        handle: dict[str, Any],
        cursor: Any,
        by: str,
        not_before: float = 0,
        deadline: float | None = None,
        place: dict[str, Any] | None = None,
        cleans: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handle, self.cursor, self.by = handle, cursor, by
        self.not_before, self.deadline, self.place, self.cleans = not_before, deadline, place, cleans
        self._live: Live | None = None
        self._listeners: Sequence[RankListener] = ()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return what this trigger is made from anew, on another triggerer."""
        names = ("handle", "cursor", "by", "not_before", "deadline", "place", "cleans")
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {name: getattr(self, name) for name in names}

    @asynccontextmanager
    async def _keeping_alive(self, ctx: RunContext) -> AsyncIterator[None]:
        """Renew the run's lease for as long as the block follows it."""
        renewing = asyncio.create_task(self._renew(ctx))
        try:
            yield
        finally:
            renewing.cancel()

    async def _renew(self, ctx: RunContext) -> None:
        from manycpu.pipeline.ledger.base import pause
        from manycpu.pipeline.spec.errors import ManycpuError

        while True:
            await asyncio.sleep(pause())
            try:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(_RENEWALS, ctx.ledger.renew, ctx.waiting_lease)
            except (OSError, ManycpuError) as error:
                # The next time, then: the lease is far longer. That a run is gone, whoever follows it sees.
                self.log.info("the run's lease was not renewed: %s", error)

    async def on_kill(self) -> None:
        """Cancel the training: a person marked or cleared the task. Not called when the triggerer goes."""
        # In one thread, which goes on: Airflow cancels this, too, a second later.
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        ended = self._cancel(self.by)
        self.log.info("the training %s", "was ended" if ended else "had ended before")
        if self.cleans is not None:
            self._clean_up(self.cleans)

    def _cancel(self, by: str) -> bool:
        from manycpu.pipeline.verbs.cancel import cancel

        return cancel(self._context(), by=by, attempt=self.handle["attempt"])

    def _clean_up(self, task: dict[str, Any]) -> None:
        """Leave nothing of the run, unless its task was cleared: the next try goes on with it."""
        if state_of(task) in ENDED_FOR_GOOD:
            clean_up(self._context(), self.log, task)

    def _context(self) -> RunContext:
        raise NotImplementedError

    def _listen(self, ctx: RunContext, handle: Handle, observed: Observed) -> None:
        """Make those who hear the attempt from here on."""
        from manycpu.pipeline.listeners import Guarded

        self._listeners = [*map(Guarded, task_log.listeners(self.log, ctx, handle, observed.progress))]
        self._live = Live(ctx, self.place, self.log, wait=True)

    def _show(self, status: Status, observed: Observed) -> None:
        """Keep the training's page up to date."""
        if self._live is not None:
            self._live.show(status, observed)

    def _fall_silent(self) -> None:
        """Pass on what listeners hold back, and write nothing more: the worker goes on."""
        from manycpu.pipeline.listeners import flush

        flush(self._listeners)
        if self._live is not None:
            self._live.close()

    def _pass_on(self, lines: Iterable[RankLine]) -> None:
        """Have the listeners hear lines."""
        from manycpu.pipeline.listeners import tell

        tell(lines, *self._listeners)

    async def _event(self, status: Status, *, timed_out: bool) -> TriggerEvent:
        """Build the final event: handle, status, and whether the deadline passed; not sent too soon."""
        await asyncio.to_thread(self._fall_silent)
        await asyncio.sleep(max(0.0, self.not_before - time.time()))
        payload = {"handle": self.handle, "status": status.model_dump(mode="json"), "timed_out": timed_out}
        return TriggerEvent(payload)  # type: ignore[no-untyped-call]


_RENEWALS = ThreadPoolExecutor(2, thread_name_prefix="renew")
"""Of their own: while an API server is away, renewals must not hold the threads that all else needs."""
