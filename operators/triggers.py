"""The triggers: what both kinds share, and the trigger for a supervised process.

A trigger follows an attempt to its end, and cancels it when a person ends the task.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from airflow.triggers.base import BaseTrigger, TriggerEvent
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from manycpu.operators import following
from manycpu.operators.airflow_versions import CALLS_ON_KILL, AirflowException
from manycpu.operators.following import ENDED_FOR_GOOD, NOTHING_FOLLOWS, Live, state_of
from manycpu.operators.steps import clean_up_and_log
from manycpu.pipeline.ledger import base as ledgers
from manycpu.pipeline.ledger.file import FileLedger
from manycpu.pipeline.listeners import Guarded, RankListener, flush, tell
from manycpu.pipeline.spec.errors import ClusterError, LaunchError, ManycpuError, RunGoneError
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import Handle, read_handle
from manycpu.pipeline.spec.naming import run_key
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets import Watch
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import reopen
from manycpu.pipeline.targets.outcome import outcome
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.wait import POLL_INTERVAL_S, watch

_RENEWALS = ThreadPoolExecutor(2, thread_name_prefix="renew")
"""Threads for lease renewals only: they block while an API server is away, and must not block the rest."""
_ENDINGS = set[asyncio.Task[None]]()
"""Asyncio tasks that end a training: asyncio itself keeps no reference to them."""
_ON_KILL_TIMEOUT_S = 60.0
"""Maximum that `on_kill` waits. Before Airflow 3.3, a stopping triggerer waits for it; 3.3 waits a second."""
_RETRY_INTERVAL_S = 5.0  # between tries to reach a cluster that does not answer
_RETRY_TIMEOUT_S = 3600.0
T = TypeVar("T")


class FollowingTrigger(BaseTrigger):
    """Follow an attempt to its end, and write every line of its ranks to the task's log.

    Args:
        handle: The handle of the attempt, as JSON.
        cursor: How much of the logs the worker has printed, as JSON.
        by: The try of the task, in words: if a person ends the task, the ledger names it as the canceller.
        not_before: Seconds since the epoch, before which no event is sent. The scheduler fails a task whose
            event arrives before it has noticed that the worker has ended.
        deadline: Seconds since the epoch at which the training is ended; None: no deadline.
        place: The task, as :func:`place_of` names it; None: an older version deferred it.
        cleans: The same as ``place`` if the run belongs to this task alone: when a person ends the task, the
            run is cleaned up. None: another task cleans up.
    """

    _listeners: Sequence[RankListener]
    _live: Live

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

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments from which another triggerer makes this trigger."""
        names = ("handle", "cursor", "by", "not_before", "deadline", "place", "cleans")
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow the attempt; the one event carries its handle and status."""
        try:
            async for event in self._follow():
                yield event
        except asyncio.CancelledError as error:
            # A cancellation with a message means that the triggerer stops, and another one continues.
            if not CALLS_ON_KILL and not error.args:
                await self.on_kill()
            raise

    def _follow(self) -> AsyncIterator[TriggerEvent]:
        """Follow the attempt to its end, and yield one event."""
        raise NotImplementedError

    async def on_kill(self) -> None:
        """Cancel the training if a person marked or cleared the task. Not called when the triggerer stops.

        Airflow also calls this if this triggerer was late and another one has taken over the trigger. Then
        the task is still deferred, and the training continues.
        """
        # A separate asyncio task, which runs to its end: Airflow 3.3 cancels this coroutine after a second.
        ending = asyncio.create_task(self._retry_ending())
        _ENDINGS.add(ending)
        ending.add_done_callback(_ENDINGS.discard)
        await asyncio.wait({ending}, timeout=_ON_KILL_TIMEOUT_S)

    async def _retry_ending(self) -> None:
        """End the training; retry while Airflow or the cluster does not answer, or the job does not end.

        After ``on_kill``, Airflow closes the task's log: what is logged then is in the triggerer's log.
        """
        try:
            retried = (AirflowException, ClusterError, LaunchError)
            await self._retry_on_thread(self._end_with_task, retried=retried)
        except RunGoneError:
            self.log.info("the run is cleaned up")
        except Exception:
            self.log.exception("the training was not ended; `manycpu cancel` ends it")

    async def _retry_on_thread(
        self, act: Callable[..., T], *args: Any, retried: tuple[type[Exception], ...] = (ClusterError,)
    ) -> T:
        """Call a function on a thread, and return its result; after errors of ``retried``, retry for an hour.

        Raises:
            Exception: The last error after an hour, or at once any other error of the function.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(retried),
            stop=stop_after_delay(_RETRY_TIMEOUT_S),
            wait=wait_fixed(_RETRY_INTERVAL_S),
            before_sleep=lambda state: self.log.warning("%s", state.outcome and state.outcome.exception()),
            reraise=True,
        )
        return await retrying(asyncio.to_thread, act, *args)

    def _end_with_task(self) -> None:
        """End the training, unless the task is still deferred: then another triggerer follows it."""
        if self.place is None or state_of(self.place) != "deferred":
            self._cancel_and_clean_up()
        else:
            self.log.info("another triggerer follows the training: the task is still deferred")

    def _cancel_and_clean_up(self) -> None:
        """Cancel the training; clean up its run if no other task does so."""
        ended = self._cancel(self.by)
        self.log.info("the training %s", "was ended" if ended else "had ended before")
        # The run of a cleared task is kept: the next try resumes it.
        last_states = NOTHING_FOLLOWS if self.cleans is None else ENDED_FOR_GOOD
        place = self.cleans or self.place
        if place is not None and state_of(place) in last_states:
            # A person may clear the task during this slow call: the number protects the next attempt.
            clean_up_and_log(self._context(), self.log, place, attempt=self.handle["attempt"])

    def _cancel(self, by: str) -> bool:
        """Cancel the attempt; returns whether it was running. The ledger records ``by`` as the canceller."""
        return cancel(self._context(), by=by, attempt=self.handle["attempt"])

    def _context(self) -> RunContext:
        """Open the run that the handle names, with the fields that the attempt was started with."""
        raise NotImplementedError

    @asynccontextmanager
    async def _keeping_alive(self, ctx: RunContext) -> AsyncIterator[None]:
        """Renew the run's lease until the block ends."""

        async def renew() -> None:
            """Renew the lease at intervals, until this is cancelled; a failure is only logged."""
            while True:
                await asyncio.sleep(ledgers.renewal_pause())
                try:
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(_RENEWALS, ctx.ledger.renew, ctx.waiting_lease)
                except (OSError, ManycpuError) as error:
                    # The lease lasts far longer than one pause. The follower itself notices a deleted run.
                    self.log.info("the run's lease was not renewed: %s", error)

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()

    def _make_listeners(self, ctx: RunContext, handle: Handle, observed: Observed) -> None:
        """Make the listeners of the attempt, and the writer of its page."""
        self._listeners = [*map(Guarded, following.listeners(self.log, ctx, handle, observed.progress))]
        self._live = Live(ctx, self.place, self.log, delay_first=True)  # the worker has just written one

    def _deliver(self, lines: Iterable[RankLine]) -> None:
        """Deliver lines of the ranks to the task's log and the trackers."""
        tell(lines, *self._listeners)

    async def _final_event(self, status: Status) -> TriggerEvent:
        """Flush the listeners and stop writing the page, then return the event that resumes the task."""
        await asyncio.to_thread(flush, self._listeners)
        await asyncio.to_thread(self._live.close)
        return await self._event(status)

    async def _event(self, status: Status) -> TriggerEvent:
        """Wait until ``not_before``, and return the event that resumes the task."""
        await asyncio.sleep(max(0.0, self.not_before - time.time()))
        payload = {"handle": self.handle, "status": status.model_dump(mode="json")}
        return TriggerEvent(payload)  # type: ignore[no-untyped-call]


class TrainingTrigger(FollowingTrigger):
    """Follow a supervised process by its log, on a triggerer of the same machine.

    On another machine, the task resumes at once, and its worker follows the training.
    """

    async def _follow(self) -> AsyncIterator[TriggerEvent]:
        """Follow the process to its end, and yield one event; at the deadline, cancel the training.

        On another machine, yield an event with state UNKNOWN at once: the task's worker then follows.
        """
        if not await asyncio.to_thread(Path(self.handle["directory"]).exists):
            reason = f"{self.handle['directory']} is not on {socket.gethostname()}, where the triggerer runs"
            yield await self._event(Status(state=RunState.UNKNOWN, reason=reason))
            return
        watching = await asyncio.to_thread(self._begin_watching)
        # Files are read, and long logs written, on a thread: other triggers share this event loop.
        async with self._keeping_alive(watching.ctx):
            while True:
                status = await asyncio.to_thread(self._deliver_and_get_status, watching)
                if status.state.terminal:
                    break
                # Repeated at each look, until the training has ended.
                if self.deadline is not None and time.time() >= self.deadline:
                    await asyncio.to_thread(self._cancel, "execution_timeout")
                if not watching.behind:
                    await asyncio.sleep(POLL_INTERVAL_S)
        yield await self._final_event(status)

    def _context(self) -> RunContext:
        """Open the run from its ledger, whose folder is found by the attempt's folder in the handle."""
        attempt_directory = Path(self.handle["directory"])  # HOME/runs/NAME/attempts/NUMBER
        run_directory, home = attempt_directory.parents[1], attempt_directory.parents[3]
        entry = FileLedger(run_directory).read()
        return reopen(entry, str(home), attempt=self.handle["attempt"])

    @property
    def _bookmark(self) -> Path:
        """The file that holds how much of the log this try has printed: another triggerer repeats nothing."""
        return Path(self.handle["directory"]) / f"told.{run_key(self.by)}"

    def _write_bookmark(self, cursor: int) -> None:
        """Save ``cursor``, the position in the log up to which lines were printed."""
        with suppress(OSError):  # such as a full disk: another triggerer repeats lines then
            self._bookmark.write_text(str(cursor))

    def _begin_watching(self) -> Watch:
        """Watch the attempt from this try's bookmark on; without one, from where the worker stopped reading.

        Then the bookmark is made. The listeners are made in both cases.
        """
        try:
            cursor = int(self._bookmark.read_text())
        except (OSError, ValueError):
            cursor = self.cursor
            self._write_bookmark(cursor)  # the file also shows that a triggerer follows the attempt
        handle = read_handle(self.handle)
        watching = watch(self._context(), handle, cursor)
        self._make_listeners(watching.ctx, handle, watching.observed)
        return watching

    def _deliver_and_get_status(self, watching: Watch) -> Status:
        """Deliver the new lines, and return the status.

        When the process has ended, the status also depends on what the ranks reported, such as their proof.
        """
        lines, status = watching.look()
        self._deliver(lines)
        if lines:
            self._write_bookmark(watching.cursor)
        if status.state.terminal:
            return outcome(watching.ctx, status, watching.observed)
        self._live.show(status, watching.observed)
        return status
