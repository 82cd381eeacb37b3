"""Read the logs of a job's containers: each line exactly once, even if connections break."""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NamedTuple

from manycpu.pipeline.adapters.cluster_watch import FAILURES, Backoff, ClusterWatch, LogPart, NoLogError
from manycpu.pipeline.spec.event_types import Event, ProgressEvent, decode
from manycpu.pipeline.spec.events import RankLine, split
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import Line, LogBatch
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot, role
from manycpu.pipeline.targets.kubernetes.pod_status import Container, containers

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")
_NANO = 1_000_000_000  # nanoseconds in a second
_EMPTY_STATE = ((), 0, 0, 0)  # the state of a LogCursor that has read no line
_REREAD_S = 1  # a request begins this many whole seconds before the last line, and so repeats lines


class Stamped(NamedTuple):
    """A line of a container's log, with its time."""

    time: int
    """Nanoseconds since the epoch, by the node's clock."""
    text: str


def parse(line: bytes) -> Stamped | None:
    """Parse a log line that begins with its time; None: it has no time, such as a message of the kubelet."""
    stamp, _, text = line.partition(b" ")
    try:
        match = _STAMP.fullmatch(stamp.decode("ascii"))
        if match is None:
            return None
        fraction = (match[2] or "").ljust(9, "0")
        time = _epoch_seconds(match[1] + match[3]) * _NANO + int(fraction)
    except ValueError:  # bytes that are no ASCII, or no such date
        return None
    return Stamped(time, text.decode(errors="replace").rstrip("\r"))


def with_container_name(line: RankLine, container: str) -> RankLine:
    """Put the container's name before a line that no rank wrote; leave ranks' lines and events unchanged."""
    if line.rank is not None or decode(line.text) is not None:
        return line
    return RankLine(rank=None, host=None, text=f"[{container}] {line.text}")


@lru_cache(64)  # most lines have the same second as the line before
def _epoch_seconds(text: str) -> int:
    """Convert an ISO time without a fraction to seconds since the epoch."""
    return int(datetime.fromisoformat(text).timestamp())


class _SecondOfLog(NamedTuple):
    """The lines of one whole second that were read; the API server returns a log from a whole second on."""

    second: int
    """Seconds since the epoch."""
    lines: int
    """Number of lines of this second that were read."""
    first: int
    """Time of this second's first line in the log, in nanoseconds since the epoch."""


class LogCursor:
    """The position up to which a container's log was read; tells new lines from delivered ones.

    A request repeats some delivered lines. In the same log, the cursor skips as many lines as it has counted.
    In another file (the kubelet rotates a log's files), it skips lines by their time. Times are nanoseconds
    since the epoch.

    Args:
        state: The ``state`` of another cursor of this log, to resume from; empty: start at the beginning.
        before: The ``state`` of the cursor of the container's previous start. A request for that log at the
            moment of the restart may have returned this log instead.
    """

    def __init__(self, state: Iterable[Any] = (), before: Iterable[Any] = ()) -> None:
        self._before = (*before,)
        self._restore(state)

    def _restore(self, state: Iterable[Any]) -> None:
        """Read a ``state``: seconds, the last line's time, how many lines have it, the first line's time."""
        seconds, self._last, self._lines_at_last, self._first = (*state,) or _EMPTY_STATE
        self._seconds = [_SecondOfLog(*second) for second in seconds]
        self._skip = 0
        """Number of delivered lines still to skip: all by count; by time, only those with the last time."""
        self._by_count: bool | None = None
        """True: skip delivered lines by count. False: by time. None: the first line of a request decides."""

    @property
    def state(self) -> list[Any]:
        """The position as JSON values, from which another cursor can resume."""
        return [[list(second) for second in self._seconds], self._last, self._lines_at_last, self._first]

    @property
    def since(self) -> int | None:
        """The second since the epoch from which to resume; None: read from the beginning."""
        return min((second.second for second in self._seconds), default=None)

    def reopen(self) -> None:
        """Prepare to :meth:`take` the lines of a new request, which begin at ``since``."""
        self._skip, self._by_count = sum(second.lines for second in self._seconds), None

    def may_be_another_log(self, time: int) -> bool:
        """Whether a line with this ``time``, as the first of a request, shows that this may be another log.

        In the same log, each request begins again with the first line of the first counted second. False for
        every later line of a request, and if no line of this log was delivered yet.
        """
        is_first_line = self._by_count is None
        return is_first_line and bool(self._seconds) and time != self._seconds[0].first

    def take(self, time: int) -> bool:
        """Advance by one line with this ``time``. True: the line is new. False: it was delivered before."""
        if self._by_count is None:  # the first line of a request
            self._choose_how_to_skip(time)
        if self._by_count and self._skip:  # skip by count: each request repeats the counted lines
            self._skip -= 1
            return False
        self._count_line(time)  # in another file, count also the lines that are skipped
        if not self._by_count:  # skip by time, up to the last delivered line
            if time < self._last:
                return False
            if time == self._last and self._skip:
                self._skip -= 1
                return False
            if time > self._last:  # all delivered lines were skipped: every line from here on is new
                self._by_count, self._skip = True, 0
        # The line is new.
        self._first = self._first or time  # of the whole log
        if time > self._last:
            self._last, self._lines_at_last = time, 1
        elif time == self._last:
            self._lines_at_last += 1
        return True

    def _choose_how_to_skip(self, time: int) -> None:
        """Decide by the time of a request's first line: skip by count in the same log, by time in another."""
        # True if lines of this log were already delivered as lines of the previous start. The last item of
        # `before` is the time of the first line that was delivered for that start.
        is_log_of_previous_start = not self._seconds and self._before and self._before[-1] == time
        if is_log_of_previous_start:
            self._restore(self._before)
        self._by_count = not is_log_of_previous_start and not self.may_be_another_log(time)
        if not self._by_count:
            # Another file: count its lines from the beginning. Skip lines before the last delivered time, and
            # of the lines with that time as many as were delivered.
            self._skip, self._seconds = self._lines_at_last, []

    def _count_line(self, time: int) -> None:
        """Count a line in its second; drop the seconds that are too old to be requested again."""
        second = time // _NANO
        newest = max((entry.second for entry in self._seconds), default=second)
        for index, entry in enumerate(self._seconds):
            if entry.second == second:
                self._seconds[index] = entry._replace(lines=entry.lines + 1)
                return
        if second < newest - _REREAD_S:
            return  # out of order, and too old to be requested again
        recent = [entry for entry in self._seconds if entry.second >= second - _REREAD_S]
        self._seconds = [*recent, _SecondOfLog(second, lines=1, first=time)]


class RateLimiter:
    """Drops ordinary lines and progress events above a rate, and reports how many were dropped.

    Args:
        per_second: Maximum number in each second, for ordinary lines and for progress events separately.
    """

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._second, self._dropped = 0, 0
        self._received: Counter[type[Event] | None] = Counter()
        """Type of event, or None for ordinary lines -> how many were received in this second."""

    def admit(self, lines: Iterable[RankLine], now: float) -> list[RankLine]:
        """Return the lines to deliver, up to the rate; events other than progress are always delivered."""
        admitted = list[RankLine]()
        if int(now) != self._second:
            self._second = int(now)
            self._received.clear()
            admitted += self.take_dropped()
        for line in lines:
            event = decode(line.text)
            event_type = None if event is None else type(event)
            self._received[event_type] += 1
            if event_type not in (None, ProgressEvent) or self._received[event_type] <= self._per_second:
                admitted.append(line)
            else:
                self._dropped += 1
        return admitted

    def take_dropped(self) -> list[RankLine]:
        """Return a line that says how many lines were dropped since the last report; empty: none were."""
        dropped, self._dropped = self._dropped, 0
        if not dropped:
            return []
        text = f"{dropped} lines were dropped here: at most {self._per_second} a second are shown"
        return [RankLine(rank=None, host=None, text=text)]


Put = Callable[[LogBatch], Awaitable[None]]
"""Receives lines to deliver; waits while the queue is full."""

_RESTART_REPORT_S: Final = 3.0  # the kubelet surely reports a restart of a container within this time
_NO_LOG_TRIES: Final = 5  # after so many tries without a log, an ended container has none
_BATCH_LINES: Final = 200  # small, as a line that waits for delivery takes several times its bytes
_DONE: Final = "done"  # last item of a log's entry in the cursor: the log was read to its end
_STATE_ITEMS: Final = 4  # number of items before that mark: the state of a LogCursor


class LogReaders:
    """Reads the logs of all containers of a job that print the ranks' lines.

    It reads each log from its position in ``cursor`` on, and calls ``put`` with the new lines.
    """

    def __init__(self, watch: ClusterWatch, cursor: Mapping[str, list[Any]], put: Put) -> None:
        self._watch, self._cursor, self._put = watch, cursor, put
        self._readers: dict[tuple[str, str], tuple[LogReader, asyncio.Task[None]]] = {}
        """Uid of a pod and name of its container -> the reader, and the task in which it reads."""

    @property
    def behind(self) -> bool:
        """Whether a container has ended and its log was not read to the end yet."""
        return any(reader.behind for reader, _ in self._readers.values())

    @property
    def unanswered(self) -> bool:
        """Whether a log that is still to be read sends nothing now: its request waits or has failed."""
        return any(reader.behind and not reader.answered for reader, _ in self._readers.values())

    def follow(self, snapshot: JobSnapshot) -> None:
        """Start readers for new containers; update readers of changed ones; mark readers of deleted pods."""
        if snapshot.given_back:  # its pods found no room: their logs say nothing about the run
            for reader, task in self._readers.values():
                reader.mark_gone()
                task.cancel()
            return
        if snapshot.kind not in snapshot.listed_kinds:
            return  # only the job shows which pods print the ranks' lines
        for pod in snapshot.take_changed():
            if role(pod) != snapshot.speaker:  # its log has no lines of ranks
                continue
            for container in containers(pod):
                self._update_reader(container)
        present = {pod["metadata"]["uid"] for pod in snapshot.pods}
        for (uid, _), (reader, _) in self._readers.items():
            if uid not in present:
                reader.mark_gone()

    async def aclose(self) -> None:
        """Stop all readers, and wait until they have stopped."""
        tasks = [task for _, task in self._readers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _update_reader(self, container: Container) -> None:
        """Update a container's reader; create one if the container has started and nothing reads it."""
        started = container.restarts or container.state("running") or container.state("terminated")
        if container.init or container.is_sidecar or not started:
            return
        key = (container.pod["metadata"]["uid"], container.name)
        # The task of a reader, [1], ends only when its pod is presumed gone. If the pod is seen again, the
        # snapshot was stale: read on.
        if key not in self._readers or self._readers[key][1].done():
            reader = LogReader(self._watch, self._cursor, self._put)
            self._readers[key] = (reader, asyncio.create_task(reader.read(container)))
        self._readers[key][0].update(container)


class LogReader:
    """Reads the log of one container of a pod.

    Each restart of the container begins another log. ``start`` is the number of a start, from 0. The present
    start has the number of restarts that the kubelet counts.
    """

    def __init__(self, watch: ClusterWatch, cursor: Mapping[str, list[Any]], put: Put) -> None:
        self._watch, self._cursor, self._put = watch, cursor, put
        self._container: Container | None = None
        self._gone = False
        self._read_to_end = -1
        """Number of the last start whose log was read to its end."""
        self.answered = False
        """Whether the present request has returned a part of the log."""
        self._changed = asyncio.Event()

    @property
    def behind(self) -> bool:
        """Whether the container has ended and its log was not read to the end yet."""
        restarts = self._present.restarts
        return self._has_ended(restarts) and self._read_to_end < restarts and not self._gone

    def update(self, container: Container) -> None:
        """Set the container's present state, even if its pod was presumed gone."""
        self._container, self._gone = container, False
        self._changed.set()

    def mark_gone(self) -> None:
        """Record that the pod is gone."""
        self._gone = True
        self._changed.set()

    async def read(self, container: Container) -> None:
        """Read the logs of all starts of the container, one after another, until its pod is gone."""
        self.update(container)
        start = max(0, self._present.restarts - 1)  # the kubelet keeps the logs of the last two starts
        while True:
            await self._read_start(start)
            self._read_to_end = start
            while self._present.restarts <= start:  # wait for the container's next start
                if self._gone:
                    return
                await self._wait_for_change()
            start = max(start + 1, self._present.restarts - 1)  # skip starts whose logs are deleted

    async def _read_start(self, start: int) -> None:
        """Read the log of one start of the container to its end, and mark it as done in the cursor.

        Return without the mark if the pod is gone.
        """
        key = self._key(start)
        if _DONE in self._cursor.get(key, ()):
            return
        previous_state = self._cursor.get(self._key(start - 1), ())[:_STATE_ITEMS]  # without the mark
        position = LogCursor(self._cursor.get(key, ()), before=previous_state)
        backoff, tries_without_log = Backoff(), 0
        while True:
            if self._gone:
                return  # no mark: the snapshot may be stale
            if self._present.restarts > start + 1:
                break  # the kubelet has deleted this log
            ended = self._has_ended(start)  # read before the request: if true, the answer has the whole log
            try:
                if await self._request(start, position, follow=not ended) and ended:
                    break
                backoff.worked()  # the request ended without an error: the next pause may be short
            except NoLogError:
                if ended:  # a single such answer proves nothing: the kubelet may have just started
                    tries_without_log += 1
                    if tries_without_log == _NO_LOG_TRIES:
                        break
            except FAILURES:
                pass  # retry for as long as the pod exists
            self.answered = False
            await self._wait_for_change(backoff.next())
        await self._put(LogBatch(key, [], [*position.state, _DONE]))

    async def _request(self, start: int, position: LogCursor, *, follow: bool) -> bool:
        """Read a log from a position on with one request, and put its new lines.

        Args:
            start: The start of the container.
            position: The position in the log, which advances.
            follow: Whether to wait for further lines, because the container still runs.

        Returns:
            True: the answer was read to its end. False: it may be the log of another start; ask again.
        """
        position.reopen()
        # The kubelet has the logs of two starts: the present one and the previous one.
        previous = self._present.restarts > start
        pod, name = self._present.pod["metadata"]["name"], self._present.name
        log = self._watch.log(pod, name, LogPart(follow=follow, previous=previous, since=position.since))
        async with aclosing(log) as blocks:
            async for block in blocks:
                self.answered = True
                for first in range(0, len(block), _BATCH_LINES):
                    parsed = map(parse, block[first : first + _BATCH_LINES])
                    stamped = [line for line in parsed if line is not None]  # without messages of the kubelet
                    if stamped and position.may_be_another_log(stamped[0].time):
                        # It may be the log of another start: wait until the kubelet has reported a restart.
                        restarts = self._present.restarts
                        await asyncio.sleep(_RESTART_REPORT_S)
                        has_this_log = restarts in (start, start + 1)  # as the present or the previous one
                        if self._present.restarts != restarts or not has_this_log:
                            return False
                    lines = [
                        Line(with_container_name(split(line.text), f"{pod}/{name}"), line.time / _NANO, pod)
                        for line in stamped
                        if position.take(line.time)
                    ]
                    if lines:
                        await self._put(LogBatch(self._key(start), lines, position.state))
        return True

    def _has_ended(self, start: int) -> bool:
        """Whether this start has ended or the pod is gone, so that the log of the start is complete."""
        return self._gone or self._present.restarts > start or self._present.state("terminated") is not None

    async def _wait_for_change(self, seconds: float | None = None) -> None:
        """Wait until the container changes or its pod is gone, at most for some seconds (None: no limit)."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return

    def _key(self, start: int) -> str:
        """Return the key that the log of one start has in the cursor."""
        return f"{self._present.pod['metadata']['uid']}/{self._present.name}/{start}"

    @property
    def _present(self) -> Container:
        """The container as of its last update."""
        if self._container is None:
            raise RuntimeError("read() comes first")
        return self._container
