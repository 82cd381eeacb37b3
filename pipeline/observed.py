"""Reduce the events of an attempt's ranks to what the ledger and the report keep."""

import bisect
import json
from collections.abc import Iterable, Mapping
from functools import singledispatchmethod
from operator import attrgetter
from typing import Any, Final

from manycpu.pipeline.spec.event_types import (
    BackendEvent,
    ErrorEvent,
    Event,
    ExitEvent,
    FinishedEvent,
    MetricsEvent,
    PaceEvent,
    ProgressEvent,
    ProofEvent,
    ResultEvent,
    ReturnedEvent,
    StartEvent,
    WarningEvent,
    decode,
)
from manycpu.pipeline.spec.events import JSON_LIMIT, RankLine, is_shallow, split
from manycpu.pipeline.spec.observed import FIRST_METRICS, Observed, Pace, Progress, Rank, Series, values_of
from manycpu.pipeline.spec.state import RankFailure

_TAIL_LINES: Final = 20
_LINE_CHARACTERS: Final = 2000
_MAX_WARNINGS: Final = 200
_MAX_METRICS: Final = 1000
_MAX_CURVES: Final = 100
_ALWAYS_CURVES: Final = (*FIRST_METRICS, "step_seconds")  # also beyond the largest number of curves
_PROGRESS_METRICS: Final = ("epoch", "loss", "grad_norm", "learning_rate", "samples_per_second")


def observe(lines: Iterable[str]) -> Observed:
    """Read a whole log of a training, and return what its ranks reported."""
    observer = Observer()
    for line in lines:
        observer.add_line(split(line))
    return observer.observed


def add_exit_records(observed: Observed, records: Iterable[Mapping[str, Any]]) -> None:
    """Add the lines that ranks recorded when they ended (``spec/exit_records.py``), as if from their logs."""
    observer = Observer(observed)
    for record in records:
        for text in record["lines"]:
            observer.add_line(RankLine(record["rank"], record["host"], text), time=record["time"])


class Observer:
    """Reduces the ranks' lines, one by one, to an ``Observed`` and the last lines of each rank.

    Args:
        observed: The result of earlier lines, which is changed; None: there are none.
        tails: Rank -> its last lines among the earlier ones.
    """

    def __init__(self, observed: Observed | None = None, tails: dict[int, list[str]] | None = None) -> None:
        self.observed = observed or Observed()
        self.tails = tails or {}

    def add_line(self, line: RankLine, time: float = 0.0) -> bool:
        """Read a line; return whether the caller should save ``observed`` at once.

        Args:
            line: The line.
            time: When it was written, in seconds since the epoch; 0: unknown. It is needed if lines may
                arrive out of order.
        """
        event = decode(line.text)
        if event is not None:
            self.observed.events += 1
            save_now = self._reduce(event, line.rank, time)
            _add_curve_points(self.observed, event, line.rank, time)
            return save_now
        if line.rank is not None and line.text.strip():
            _append_to_tail(self.tails, line.rank, line.text)
        return False

    @singledispatchmethod
    def _reduce(self, event: Event, *_: object) -> bool:  # noqa: ARG002 - dispatches on it
        """Record an event of a rank; return whether the caller should save ``observed`` at once.

        The arguments are the event, the rank's number, and the time. There is a method below for each type of
        event that is recorded.
        """
        return False

    @_reduce.register
    def _on_proof(self, event: ProofEvent, _: int | None, time: float) -> bool:
        """Add a rank to the meeting that it has joined; the first rank begins the meeting.

        If a restarted rank has reported that all ranks of this meeting succeeded, they get exit code 0.
        """
        rank = Rank(
            rank=event.rank,
            host=event.host,
            cpus=event.cpus,
            threads=event.threads,
            hostname=event.hostname,
            devices=event.devices,
            met=time,
        )
        existing = _find_meeting(self.observed, event, time)
        if existing is not None and rank.rank in existing["ranks"]:  # the log is being read a second time
            return True
        self.observed.backend_reason = event.backend_reason or self.observed.backend_reason
        meeting = existing or _new_meeting(self.observed, event, time)
        meeting["ranks"].append(rank.rank)
        if rank.host not in meeting["hosts"]:
            meeting["hosts"].append(rank.host)
        if meeting is self.observed.rounds[-1]:  # `ranks` are those of the last meeting
            bisect.insort(self.observed.ranks, rank, key=attrgetter("rank"))
            _apply_finished_meeting(self.observed)
        return True

    @_reduce.register
    def _on_start(self, event: StartEvent, *_: object) -> bool:
        self.observed.start = event.message
        return False

    @_reduce.register
    def _on_backend(self, event: BackendEvent, *_: object) -> bool:
        self.observed.backend = event.observed
        return True

    @_reduce.register
    def _on_progress(self, event: ProgressEvent, _: int | None, time: float) -> bool:
        """Replace the progress, and add its values to the metrics."""
        self.observed.start = None  # the program has begun: its start waits for nothing any more
        fields = {name: getattr(event, name) for name in Progress.model_fields}
        self.observed.progress = Progress.model_validate(fields | {"time": _time_of(event, time)})
        values = {name: getattr(event, name) for name in _PROGRESS_METRICS}
        _add_metrics(self.observed, {name: value for name, value in values.items() if value is not None})
        return False  # the next progress comes soon

    @_reduce.register
    def _on_pace(self, event: PaceEvent, rank: int | None, time: float) -> bool:
        """Record the pace of a rank; that of a rank which has not joined the last meeting is ignored."""
        known_rank = _rank_of_last_meeting(self.observed, rank)
        if known_rank is not None:
            fields = event.model_dump(include=set(Pace.model_fields))
            known_rank.pace = Pace.model_validate(fields | {"time": _time_of(event, time)})
        return False

    @_reduce.register
    def _on_metrics(self, event: MetricsEvent, *_: object) -> bool:
        """Add the values to the metrics."""
        self.observed.start = None  # the program has begun
        _add_metrics(self.observed, event.values)
        # Saved at once, but for a point of a curve: the next one follows soon.
        return event.step is None

    @_reduce.register
    def _on_returned(self, event: ReturnedEvent, rank: int | None, _: float) -> bool:
        """Collect the parts of the value that rank 0 returned; the last part completes the value.

        A part is ignored if another rank sent it, if a part before it is missing, or if the value becomes
        longer than ``JSON_LIMIT``.
        """
        parts_before = self.observed.parts if event.part > 1 else []
        parts = [*parts_before, event.text]
        is_next = len(parts) == event.part  # else a part is missing, or this one is read again
        if rank != 0 or not is_next or sum(map(len, parts)) > JSON_LIMIT:
            return False
        if event.part != event.parts:
            self.observed.parts = parts
            return False
        self.observed.parts = []
        self.observed.returned = _parse_returned("".join(parts))
        self.observed.has_returned = True
        return True

    @_reduce.register
    def _on_result(self, event: ResultEvent, rank: int | None, _: float) -> bool:
        """Keep the result of rank 0; other ranks' results are ignored."""
        if rank != 0:
            return False
        self.observed.result = event
        return True

    @_reduce.register
    def _on_warning(self, event: WarningEvent, *_: object) -> bool:
        _add_warning(self.observed, event.message)
        return True

    @_reduce.register
    def _on_error(self, event: ErrorEvent, rank: int | None, _: float) -> bool:
        """Add an error to the last lines of its rank, unless it is there already."""
        rank = rank if event.rank is None else event.rank
        # A script's traceback is among its lines already; why a rank refuses to run the script is not.
        if rank is not None and not any(event.message in text for text in self.tails.get(rank, ())):
            _append_to_tail(self.tails, rank, event.message)
        return True

    @_reduce.register
    def _on_finished(self, event: FinishedEvent, *_: object) -> bool:
        """Note that all ranks of a meeting have succeeded; those of the last meeting get exit code 0."""
        self.observed.finished_meeting = event.meeting
        _apply_finished_meeting(self.observed)
        return True

    @_reduce.register
    def _on_exit(self, event: ExitEvent, rank: int | None, time: float) -> bool:
        """Record the exit code of a rank, and the first failure with the rank's last lines."""
        rank = rank if event.rank is None else event.rank
        if rank is None:
            return True
        known_rank = _rank_of_last_meeting(self.observed, rank)
        if _is_of_earlier_meeting(self.observed, event, known_rank, time):
            return True  # the ranks have met again since, so this is not how the training ended
        # A line of a log does not name the meeting: compare the host.
        if known_rank is not None and (event.meeting is not None or _is_same_host(known_rank, event)):
            known_rank.exit_code = event.code
        # The first failure is the cause: the launcher ends the other ranks because of it.
        is_first = self.observed.failure is None or self.observed.failed_at > time
        if event.code != 0 and is_first:
            lines = tuple(self.tails.get(rank, ()))
            self.observed.failure = RankFailure(
                rank=rank, host=event.host, exit_code=event.code, last_lines=lines
            )
            self.observed.failed_at = time
        return True


def _is_of_earlier_meeting(observed: Observed, event: ExitEvent, rank: Rank | None, time: float) -> bool:
    """Whether the end of a rank belongs to an earlier meeting than the last one: the ranks restarted since.

    ``rank``: the rank as it joined the last meeting; None: it has not joined. ``time``: when it ended.
    """
    if not observed.rounds:
        return False
    last_meeting = observed.rounds[-1]
    if event.meeting is not None:
        return bool(event.meeting != last_meeting.get("meeting"))
    if not _has_restarted(observed):
        return False  # an earlier time only shows that the clocks of two nodes differ
    # Better than when the meeting began: a rank's own times are of one clock.
    return time < (rank.met if rank else _begin_of(last_meeting))


def _has_restarted(observed: Observed) -> bool:
    """Whether the last meeting came after a restart; the ranks may not have met before it."""
    return len(observed.rounds) > 1 or observed.rounds[-1]["round"] > 0


def _is_same_host(rank: Rank, event: ExitEvent) -> bool:
    """Whether the rank that ended is on the host on which it introduced itself."""
    return rank.host == event.host and event.hostname in (None, rank.hostname)


def _apply_finished_meeting(observed: Observed) -> None:
    """Record exit code 0 for all ranks of the last meeting, if a restarted rank found that they succeeded."""
    # `or ""`: None would be equal to the name of a meeting that has none.
    if observed.rounds and observed.rounds[-1].get("meeting") == (observed.finished_meeting or ""):
        for rank in observed.ranks:
            rank.exit_code = 0


def _find_meeting(observed: Observed, event: ProofEvent, time: float) -> dict[str, Any] | None:
    """Find the meeting that a rank has joined; None: the rank is the first to report it.

    A meeting is one start of all ranks together; each restart of the ranks is another meeting. If meetings
    have no names, ``observed.introduced`` notes which lines were read. For such a line, a stand-in with only
    ``ranks`` is returned.
    """
    if event.meeting is not None:
        named = (meeting for meeting in observed.rounds if meeting.get("meeting") == event.meeting)
        return next(named, None)
    # The image has an older manycpu: meetings have no name, but a restart has a number.
    number, world, rank = event.round or 0, event.world_size, event.rank
    if time:  # 0: unknown
        introduction = f"{rank}@{time}"
        if introduction in observed.introduced:  # the line is read again
            return {"ranks": [rank]}  # stands for the meeting that the rank has joined
        observed.introduced.append(introduction)
    # The first that still misses the rank: the lines of several pods arrive in no particular order.
    for meeting in observed.rounds:
        if meeting["round"] == number and meeting["world_size"] == world and rank not in meeting["ranks"]:
            return meeting
    return None


def _new_meeting(observed: Observed, event: ProofEvent, time: float) -> dict[str, Any]:
    """Add a meeting in the order of time; if it is the last one, forget what earlier meetings showed.

    Only the last meeting counts, and facts of an earlier one prove nothing about it.
    """
    meeting: dict[str, Any] = {"round": event.round or 0, "world_size": event.world_size}
    meeting |= {"began": time, "hosts": [], "ranks": []}
    if event.meeting is not None:
        meeting["meeting"] = event.meeting
    observed.rounds.append(meeting)
    observed.rounds.sort(key=_begin_of)
    if meeting is observed.rounds[-1]:
        observed.ranks = []
        observed.world_size = event.world_size
        observed.backend = None
        observed.returned, observed.has_returned, observed.parts = None, False, []
        observed.result = None
        if _has_restarted(observed):  # that failure did not end the training: it was restarted
            observed.forget_failure(until=time)
    return meeting


def _begin_of(meeting: dict[str, Any]) -> float:
    """Return when a meeting began, in seconds since the epoch; 0: its lines have no times."""
    return float(meeting.get("began", 0.0))


def _add_metrics(observed: Observed, values: Mapping[str, Any]) -> None:
    """Keep the last value of each metric; leave out names beyond the largest number, and warn."""
    room = max(0, _MAX_METRICS - len(observed.metrics))
    new_names = [name for name in values if name not in observed.metrics]
    left_out = set(new_names[room:])
    observed.metrics |= {name: value for name, value in values.items() if name not in left_out}
    if left_out:
        _add_warning(observed, f"of the metrics, the first {_MAX_METRICS} names are kept")


def _time_of(event: Event, time: float) -> float:
    """Return when an event was written, in seconds since the epoch: its own time, else that of its line."""
    return float(event.time or time)


def _add_curve_points(observed: Observed, event: Event, rank: int | None, time: float) -> None:
    """Add an event's values to the curves of its metrics; add no more than the allowed curves, but warn."""
    progress = observed.progress
    step, values = values_of(event, rank, last_reported_step=progress.step if progress else None)
    is_exact = not isinstance(event, PaceEvent)  # a pace gets the step of the progress before it
    for name, value in values.items():
        series = observed.series.get(name) or Series()
        series.add(step, _time_of(event, time), value, step_is_exact=is_exact)
        if name in observed.series or not series.values:  # no values: `add` ignores what is no finite number
            continue
        if len(observed.series) < _MAX_CURVES or name in _ALWAYS_CURVES:
            observed.series[name] = series
        else:
            _add_warning(observed, f"of the metrics, the first {_MAX_CURVES} names have curves")


def _parse_returned(text: str) -> Any:
    """Parse a returned value; None if it is no JSON, or nested too deeply."""
    try:
        value = json.loads(text)
        # Refuse NaN and broken Unicode, which Python parses, but other readers of JSON do not.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if is_shallow(value) else None


def _add_warning(observed: Observed, message: str) -> None:
    """Record a warning once, up to the largest number of warnings."""
    if message not in observed.warnings and len(observed.warnings) < _MAX_WARNINGS:
        observed.warnings.append(message)


def _rank_of_last_meeting(observed: Observed, number: int | None) -> Rank | None:
    """Return the rank with this number, as it joined the last meeting; None: it did not join it."""
    if number is None:
        return None
    index = bisect.bisect_left(observed.ranks, number, key=attrgetter("rank"))
    if index < len(observed.ranks) and observed.ranks[index].rank == number:
        return observed.ranks[index]
    return None


def _append_to_tail(tails: dict[int, list[str]], rank: int, text: str) -> None:
    """Append a line to the last lines of a rank, and drop the oldest ones."""
    tail = tails.setdefault(rank, [])
    tail.append(text[:_LINE_CHARACTERS])
    del tail[:-_TAIL_LINES]
