"""Follow a job to its end: watch its objects and read its ranks' logs, in one event loop."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from manycpu.pipeline.adapters.cluster_watch import (
    FAILURES,
    Backoff,
    Changes,
    ClusterWatch,
    LogPart,
    NoLogError,
)
from manycpu.pipeline.spec.errors import ClusterError, InvalidError, NotFoundError
from manycpu.pipeline.spec.event_types import decode
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, claim_of, cluster_of
from manycpu.pipeline.targets.kubernetes.following import exit_records, judgement
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import (
    TAIL,
    WIDTH,
    AttemptRecorder,
    LogBatch,
)
from manycpu.pipeline.targets.kubernetes.following.diagnosis import endings
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot
from manycpu.pipeline.targets.kubernetes.following.judgement import budgets
from manycpu.pipeline.targets.kubernetes.following.kueue import QueueWaiting
from manycpu.pipeline.targets.kubernetes.following.launcher_release import LauncherRelease
from manycpu.pipeline.targets.kubernetes.following.logs import LogReaders, RateLimiter, parse
from manycpu.pipeline.targets.kubernetes.following.turns import TurnTaking
from manycpu.pipeline.targets.kubernetes.launch import observe

LINES_PER_SECOND: Final = 1000
_FIRST_NOTE_DELAY_S: Final = 5.0  # before the first note on why a job waits
_NOTE_INTERVAL_S: Final = 10.0  # minimum between two notes on why a job waits
_PREEMPTION_NOTE_DELAY_S: Final = 2.0  # maximum before a note that a job was preempted, and why
_AWAY_NOTE_INTERVAL_S: Final = 60.0  # minimum between two notes that the cluster cannot be reached
_MAX_BATCHES: Final = 64  # if so many log batches wait for delivery, reading pauses
_MAX_LINES: Final = 1000  # approximate number of lines to deliver at once
_TICK_S: Final = 30.0  # maximum between two checks, if nothing changes
_WAITING_TICK_S: Final = 5.0  # the same, while the job waits for room
_DRAIN_S: Final = 5.0  # after the job's end: if no line comes for this time, no more are expected
_DRAIN_TIMEOUT_S: Final = 120.0  # maximum time for the last lines after the job's end
_MIN_TICK_S: Final = 0.1  # minimum between two checks
_UNCONFIRMED_S: Final = 300.0  # then a used-up budget counts even if the API server does not confirm it
_SILENCE_TIMEOUT_S: Final = 3600.0  # after this time without news of the job or its pods, give up
_RECORDING_TIMEOUT_S: Final = 600.0  # retries to record the end stop after this time
_VOLUME_READERS: Final = ThreadPoolExecutor(
    4, thread_name_prefix="exits"
)  # so slow volumes delay no other calls

Result = TypeVar("Result")
Deliver = Callable[[list[RankLine]], Awaitable[None]]
"""Delivers lines to the person who follows the run."""


class Notes:
    """Notes for the person who follows the run: lines of manycpu itself, which wait for delivery.

    Args:
        now: Returns the time, in seconds since the epoch.
        wake: Called when there is a new note.
    """

    def __init__(self, now: Callable[[], float], wake: Callable[[], None]) -> None:
        self._now, self._wake = now, wake
        self._texts: list[str] = []
        self._reason, self._reason_due = "", now() + _FIRST_NOTE_DELAY_S
        self._away_due = 0.0

    def add(self, text: str) -> None:
        """Add a note."""
        self._texts.append(text)
        self._wake()

    def add_unreachable(self, text: str) -> None:
        """Add a note that the cluster cannot be reached, at most one note a minute."""
        if self._now() >= self._away_due:
            self._away_due = self._now() + _AWAY_NOTE_INTERVAL_S
            self.add(text)

    def add_new_reasons(self, reason: str) -> None:
        """Add a note for each new line in ``reason``, the reason of the job's status; at most every 10 s."""
        if reason == self._reason or self._now() < self._reason_due:
            return
        known_lines = self._reason.splitlines()
        self._reason, self._reason_due = reason, self._now() + _NOTE_INTERVAL_S
        for line in reason.splitlines():
            if line not in known_lines:
                self.add(line)

    def make_reasons_due(self) -> None:
        """Allow the next note on a reason in two seconds or less, even if the last note is recent."""
        self._reason_due = min(self._reason_due, self._now() + _PREEMPTION_NOTE_DELAY_S)

    def due(self, reason: str) -> float | None:
        """Return when a note on this reason is due, in seconds since the epoch; None: it needs no note."""
        return self._reason_due if reason != self._reason else None

    def take(self) -> list[RankLine]:
        """Return the notes that were not delivered yet, and remove them."""
        texts, self._texts = self._texts, []
        return [RankLine(rank=None, host=None, text=text) for text in texts]  # no rank: a line of manycpu


def selections(launch: str, labels: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return what to watch, kind -> selectors: jobs and pods with these labels, and all warnings."""
    selector = {"labelSelector": ",".join(f"{key}={value}" for key, value in labels.items())}
    return {JOB_KINDS[launch].kind: selector, "Pod": selector, "Event": {"fieldSelector": "type=Warning"}}


class Follower:
    """Follows one job: delivers its lines, records which were delivered, and derives its status."""

    def __init__(
        self, ctx: ClusterContext, handle: JobHandle, watch: ClusterWatch, recorder: AttemptRecorder
    ) -> None:
        self._ctx, self._handle, self._watch, self._recorder = ctx, handle, watch, recorder
        self._snapshot = JobSnapshot(handle, (claim_of(ctx),))
        self._log_batches: asyncio.Queue[LogBatch] = asyncio.Queue(_MAX_BATCHES)
        self._readers = LogReaders(watch, recorder.state.cursor, self._put)
        self._limit = RateLimiter(LINES_PER_SECOND)
        self._wake = asyncio.Event()
        self._turn = TurnTaking(self._snapshot, cluster_of(ctx), watch, self._wake.set)
        self._launcher = LauncherRelease(self._snapshot, cluster_of(ctx))
        self._queue = QueueWaiting(self._snapshot, cluster_of(ctx), watch, self._wake.set)
        self._notes = Notes(watch.now, self._wake.set)
        self._confirm_backoff = Backoff()
        self._unconfirmed_since = 0.0
        """Since when the API server has not confirmed an end, in seconds since the epoch; 0: no end waits."""
        self._saving: asyncio.Task[None] | None = None
        self._deliver: Deliver | None = None
        # Kind -> when its watch last reported, by this machine's monotonic clock.
        self._last_change = dict.fromkeys((self._snapshot.kind, "Pod"), time.monotonic())
        self._trouble = "no watch says anything"  # the last error of a watch
        self.status = Status(state=RunState.PENDING)
        """The present status of the job."""

    async def run(self, stream: AsyncIterator[list[Changes]], deliver: Deliver) -> Status:
        """Follow the job to its end, also through broken connections; a used-up time budget is an end, too.

        Args:
            stream: The changes of objects in the namespace.
            deliver: Receives the lines as they come, those of each rank in order.

        Returns:
            The final status.

        Raises:
            ClusterError: There was no news of the job for an hour. The job is left as it is.
        """
        self._deliver = deliver
        feeding = asyncio.create_task(self._feed(stream))
        self._recorder.watched_since = self._watch.now()
        try:
            while not self.status.state.terminal:
                await self._wait_until_due(feeding)
                await self._deliver_read_lines(deliver)
                self.status = await self._confirmed_status()
                self._check_silence()
            await self._drain(deliver)
            return await self._conclude(self.status)
        finally:
            feeding.cancel()
            self._turn.close()
            self._queue.close()
            self._launcher.close()
            await self._readers.aclose()
            with suppress(asyncio.CancelledError, *FAILURES):
                await feeding

    async def _feed(self, stream: AsyncIterator[list[Changes]]) -> None:
        """Apply all changes of the stream, which does not end by itself."""
        async for changes in stream:
            for change in changes:
                self._apply(change)

    def _apply(self, change: Changes) -> None:
        """Apply the changes of one kind; if they concern the job, start to read new logs, and wake the loop.

        If the watch of that kind has failed, ``change`` has the error instead: add a note about it.
        """
        if change.trouble:
            self._trouble = change.trouble
            self._notes.add_unreachable(
                f"nothing is known of {change.kind} objects at present: {change.trouble}"
            )
            if change.kind == "Pod":  # pods are not watched now: the watch begins again after the last error
                self._recorder.watched_since = self._watch.now()
            return
        self._last_change[change.kind] = time.monotonic()
        if self._snapshot.apply(change.kind, change.objects, change.deleted, complete=change.complete):
            self._readers.follow(self._snapshot)
            self._wake.set()

    def _check_silence(self) -> None:
        """Raise ClusterError after an hour without news: even a quiet watch lists again every few minutes."""
        if self.status.state.terminal:  # no more news is needed
            return
        # Of the job's kind and pods, the kind whose last news is older.
        kind = min((self._snapshot.kind, "Pod"), key=self._last_change.__getitem__)
        if time.monotonic() - self._last_change[kind] < _SILENCE_TIMEOUT_S:
            return
        raise ClusterError(
            f"nothing was heard of {kind} objects for {_SILENCE_TIMEOUT_S:g} s: {self._trouble}; "
            f"{self._snapshot.kind} {self._snapshot.name} is left as it is",
            field="target.connection",
            fix="See that the cluster can be reached, and run again: that attaches to the job",
        )

    async def _wait_until_due(self, feeding: "asyncio.Task[None]") -> None:
        """Wait until an object changes, lines are read, or a budget, a note or the next check is due.

        ``feeding`` is the task that applies the changes. If the task fails, its error is raised here.
        """
        now = self._watch.now()
        activity = self._recorder.activity
        due = [now + (_WAITING_TICK_S if self._turn.waits else _TICK_S)]
        due += [budget.due for budget in budgets(self._ctx.run, self._snapshot, activity)]
        if activity.finished:
            due.append(judgement.success_time(activity))
        if (note_due := self._notes.due(self.status.reason)) is not None:
            due.append(note_due)
        seconds = max(_MIN_TICK_S, min(due) - now)
        waking = asyncio.ensure_future(self._wake.wait())
        await asyncio.wait([waking, feeding], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        waking.cancel()  # it may still wait, after a timeout
        self._wake.clear()
        if feeding.done():
            feeding.result()  # raises the task's error, if it has one
            raise RuntimeError("the stream of changes ended, which none should")

    async def _deliver_read_lines(self, deliver: Deliver) -> None:
        """Deliver the notes and the lines that have been read; if due, start to save the recorder's state."""
        # Only the batches that wait now: a program that writes fast must not keep this loop running.
        batches_left = self._log_batches.qsize()
        while True:
            log_batches: list[LogBatch] = []
            while batches_left and sum(len(batch.lines) for batch in log_batches) < _MAX_LINES:
                log_batches.append(self._log_batches.get_nowait())
                batches_left -= 1
            notes = self._notes.take()  # these are few, so that the rate limit does not apply to them
            lines = [line.line for batch in log_batches for line in batch.lines]
            admitted = [*notes, *self._limit.admit(lines, self._watch.now())]
            if admitted or log_batches:  # of a batch without lines, the position must be recorded
                await _run_to_end(self._deliver_and_record(deliver, admitted, log_batches))
            if not batches_left:
                break
            await asyncio.sleep(0)  # let other followers in this event loop run
        if self._recorder.due and (self._saving is None or self._saving.done()):
            self._saving = asyncio.create_task(self._save())

    async def _deliver_and_record(
        self, deliver: Deliver, admitted: list[RankLine], log_batches: list[LogBatch]
    ) -> None:
        """Deliver lines, and only then record them: a resumed follower must not skip undelivered lines."""
        if admitted:
            await deliver(admitted)
        self._recorder.record_delivered(log_batches)

    async def _save(self) -> None:
        """Write the recorder's state to the ledger."""
        with suppress(*FAILURES):  # the next save tries again
            # Only the write is on another thread: fields() reads the state, which this thread changes.
            await asyncio.to_thread(self._recorder.write, self._recorder.fields())

    async def _confirmed_status(self) -> Status:
        """Derive the status; an end counts only after the API server has confirmed it."""
        status = self._derive_status()
        if not status.state.terminal:
            return status
        # The watch may be stale: read job and pods from the API server before the end counts.
        try:
            self._snapshot.replace(*await asyncio.to_thread(observe, self._ctx, self._handle))
        except FAILURES as error:
            return await self._unconfirmed_status(status, error)
        self._unconfirmed_since = 0.0
        self._readers.follow(self._snapshot)
        return self._derive_status()

    async def _unconfirmed_status(self, status: Status, error: BaseException) -> Status:
        """Return the status while the API server cannot confirm an end: the previous one, after a pause.

        After five minutes, return ``status`` if it is a used-up budget. After an hour, raise ``error``.
        """
        now = self._watch.now()
        # Pods may not be watched either: the ranks' silence in this time does not count.
        self._recorder.watched_since = now
        self._unconfirmed_since = self._unconfirmed_since or now
        if status.budget and now - self._unconfirmed_since > _UNCONFIRMED_S:
            return status
        if now - self._unconfirmed_since > _SILENCE_TIMEOUT_S:
            raise error
        self._notes.add_unreachable(f"whether it has ended cannot be asked at present: {error}")
        await asyncio.sleep(self._confirm_backoff.next())
        return self.status

    def _derive_status(self) -> Status:
        """Derive the status from job, pods and budgets, and record whether the run has its nodes.

        If the job has not ended, also suspend or resume it when its turn has come, and add a note on what it
        waits for.
        """
        if not {self._snapshot.kind, "Pod"} <= self._snapshot.listed_kinds:  # job or pods are still unknown
            return self.status
        now = self._watch.now()
        self._record_nodes(now)
        status = judgement.judge(self._ctx.run, self._snapshot, self._recorder.activity, now)
        if not status.state.terminal:
            # A job with a note in its annotation had nodes and gave them back.
            had_nodes = bool(self._recorder.state.began or self._snapshot.note)
            self._launcher.release_after_change(began=had_nodes)
            waits_for = self._turn.take_turn(met=self._recorder.activity.met, now=now)
            waits_for = waits_for or self._queue.waiting_reason(now)
            status = _with_reason(status, waits_for)
            self._notes.add_new_reasons(status.reason)
        elif status.budget:  # its time is used up: add what it waited for
            status = _with_reason(status, self._queue.waiting_reason(now))
        return status

    def _record_nodes(self, now: float) -> None:
        """Record whether the run has its nodes or is suspended: its time budgets depend on that."""
        state = self._recorder.state
        if self._snapshot.given_back and not self._recorder.activity.met:
            # The job could not start on its nodes: run_timeout begins when it gets the next ones, and
            # queue_timeout counts from the job's creation.
            state.began = 0.0
        elif self._snapshot.suspended:
            # Only queue_timeout counts now. After the job is resumed, acknowledge_timeout counts from here.
            self._recorder.last_placed_or_suspended = now
            if state.has_nodes:  # it had nodes until now: add a note soon that it was preempted, and why
                self._notes.make_reasons_due()
            state.pause(self._snapshot.suspended_since or now)
        elif placed_at := self._snapshot.placed_at(self._ctx.run.nodes.least):
            # run_timeout begins, or continues after a suspension. If pods are lost later, queue_timeout
            # counts from here.
            state.begin(placed_at, self._snapshot.last_transition, now)
            self._recorder.last_placed_or_suspended = now

    async def _put(self, log_batch: LogBatch) -> None:
        """Put lines into the queue for delivery; wait while it is full."""
        await self._log_batches.put(log_batch)
        self._wake.set()

    async def _drain(self, deliver: Deliver) -> None:
        """Deliver the last lines, until the logs of all ended containers are read.

        Stop earlier if logs that answer send no line for 5 s. Always stop after two minutes: a container may
        write for ever, and a kubelet may not answer.
        """
        drain_start = self._watch.now()
        deadline = drain_start + _DRAIN_S
        while self._readers.behind and self._watch.now() < deadline:
            self._wake.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _MIN_TICK_S)
            # A line came, or a log does not answer: wait longer.
            if not self._log_batches.empty() or self._readers.unanswered:
                deadline = min(self._watch.now() + _DRAIN_S, drain_start + _DRAIN_TIMEOUT_S)
            await self._deliver_read_lines(deliver)
        await self._deliver_read_lines(deliver)
        if dropped := self._limit.take_dropped():
            await deliver(dropped)

    async def _conclude(self, status: Status) -> Status:
        """Complete the final status, and record it in the ledger; delete a job that must not continue."""
        entry = await self._call_with_retries(self._ctx.ledger.read)
        if entry is not None:  # a cancellation or an earlier verdict in the ledger wins
            status = judgement.final_status(entry, self._handle, status)
        if self._recorder.state.paused:  # the suspension ended the ranks: ignore their failures
            self._recorder.state.observed.forget_failure(until=self._watch.now())
        status = await self._judge_by_exit_records(status)
        if status.state is RunState.FAILED:  # add what failed first, and its last lines
            await self._read_tail()
            status = judgement.with_first_failure(self._snapshot, self._recorder, status)
        state = self._recorder.state
        if status.state is not RunState.FAILED or status.by_itself:  # else the loss of pods may be the cause
            judgement.record_exit_codes(self._snapshot, state.observed)
        state.ended = judgement.end_time(self._snapshot) or self._watch.now()
        state.verdict = status
        if self._saving is not None:  # a periodic save must not overwrite the final one
            await self._saving
        await self._call_with_retries(self._recorder.write, self._recorder.fields())
        if judgement.must_be_deleted(self._ctx.run, self._snapshot, status):
            await self._call_with_retries(self._delete, failure="what still runs of it could not be deleted")
        return status

    async def _judge_by_exit_records(self, status: Status) -> Status:
        """Return the status, or a success that the ranks' exit records prove.

        The records are read only if cluster and logs do not show how all ranks ended. They are added to what
        was observed.
        """
        observed = self._recorder.state.observed
        records = list[dict[str, Any]]()
        if exit_records.are_needed(status, self._snapshot, observed):
            loop, attempt = asyncio.get_running_loop(), self._handle.attempt
            try:
                records = await loop.run_in_executor(_VOLUME_READERS, exit_records.read, self._ctx, attempt)
            except exit_records.UNREADABLE as error:
                return exit_records.with_unreadable_records(status, error)
        judged = exit_records.judge(status, self._snapshot, observed, records)
        if judged.state is not status.state:  # a failure became a success
            self._notes.add(f"it counts as a success: {judged.reason}")
            await self._deliver_notes()
        return judged

    async def _read_tail(self) -> None:
        """Read the last lines of the container that failed first into ``tails``, unless its pod has some."""
        failed_ends = endings(self._snapshot)
        if not failed_ends or failed_ends[0].pod in self._recorder.tails:
            return
        ending = failed_ends[0]
        with suppress(NoLogError, *FAILURES):
            async with asyncio.timeout(_DRAIN_S):
                part = LogPart(follow=False, previous=ending.previous, tail=TAIL)
                log = self._watch.log(ending.pod, ending.container, part)
                lines = [text async for block in log for text in block]
            texts = [line.text for line in map(parse, lines) if line is not None]
            # Leave out events, which decode() recognizes: the program did not write them.
            self._recorder.tails[ending.pod] = [text[:WIDTH] for text in texts if decode(text) is None]

    async def _call_with_retries(
        self,
        act: Callable[..., Result],
        *arguments: object,
        failure: str = "how it ended could not be recorded",
    ) -> Result | None:
        """Call a function on a thread, with retries for ten minutes; if all fail, add a note.

        Args:
            act: The function.
            arguments: Its arguments.
            failure: What could not be done, for the note.

        Returns:
            The function's result; None: all tries failed, or the run is cleaned up already.
        """

        async def report(state: RetryCallState) -> None:  # after each try that failed
            error = state.outcome.exception() if state.outcome else None
            self._notes.add_unreachable(f"{failure} so far: {error}")
            await self._deliver_notes()

        try:
            return await AsyncRetrying(
                retry=retry_if_exception(_is_worth_a_retry),
                stop=stop_after_delay(_RECORDING_TIMEOUT_S),
                wait=wait_random_exponential(multiplier=0.5, max=5.0),
                before_sleep=report,
                reraise=True,
            )(asyncio.to_thread, act, *arguments)
        except FileNotFoundError:  # the run is cleaned up, so that its ledger is gone
            return None
        except FAILURES as error:
            self._notes.add(f"{failure}: {error}")
            await self._deliver_notes()
            return None

    async def _deliver_notes(self) -> None:
        """Deliver the notes at once; this is for the time after the last line."""
        if (notes := self._notes.take()) and self._deliver is not None:
            await self._deliver(notes)

    def _delete(self) -> None:
        cluster_of(self._ctx).delete(self._snapshot.kind, self._handle.name, uid=self._handle.uid)


async def _run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for ``work``; if the wait is cancelled, let the work finish, so that it never stops halfway."""
    working = asyncio.create_task(work)
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await working
        raise


def _with_reason(status: Status, more: str) -> Status:
    """Return the status with the text ``more`` added to its reason; if that is empty, the status as it is."""
    return status.model_copy(update={"reason": f"{status.reason}\n{more}"}) if more else status


def _is_worth_a_retry(error: BaseException) -> bool:
    """Whether a retry may succeed: rights may come back, but an invalid call stays invalid."""
    return isinstance(error, FAILURES) and not isinstance(
        error, (FileNotFoundError, NotFoundError, InvalidError)
    )


async def batches(changes: AsyncGenerator[Changes]) -> AsyncGenerator[list[Changes]]:
    """Yield each change as a list of one, which :meth:`Follower.run` takes; close ``changes`` at the end."""
    async with aclosing(changes) as stream:
        async for change in stream:
            yield [change]
