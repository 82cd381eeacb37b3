"""What the ranks of an attempt report: the events in their lines, reduced to what is worth keeping."""

import bisect
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, Field

from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.state import RankFailure

__all__ = ["Observed", "Observer", "Rank", "observe"]

_LAST_LINES = 20
_LINE = 2000  # characters of each
_WARNINGS, _METRICS = 200, 1000  # different ones that are kept


class Rank(BaseModel):
    """A rank as it introduced itself."""

    rank: int
    host: str
    """The machine: on Kubernetes the node."""
    cpus: float | None = None
    hostname: str | None = None
    """What it calls itself: on Kubernetes the pod."""
    exit_code: int | None = None
    """How it ended; None where nobody told."""


class Observed(BaseModel):
    """What the lines of a training tell."""

    world_size: int | None = None
    ranks: list[Rank] = Field(default_factory=list)
    backend: str | None = None
    backend_reason: str | None = None
    rounds: list[dict[str, Any]] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)
    failure: RankFailure | None = None
    introduced: list[str] = Field(default_factory=list)
    """``rank@time`` of every introduction at a meeting without a name: a log may be read again."""
    failed_at: float = 0.0
    """Seconds since the epoch; 0 where lines have no times."""

    @property
    def hosts(self) -> list[str]:
        """Distinct hosts, in the order of their first rank."""
        return list(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def met(self) -> bool:
        """Whether all ranks of a meeting have introduced themselves."""
        return any(len(found["ranks"]) == found["world_size"] for found in self.rounds)


def observe(lines: Iterable[str]) -> Observed:
    """Read everything that the ranks said of themselves from a training's log."""
    observer = Observer()
    for line in lines:
        observer.hear(events.split(line))
    return observer.observed


class Observer:
    """Reads what the ranks say of themselves, line by line.

    Args:
        observed: What they have said before.
        tails: Rank -> the last lines that it wrote before.
    """

    def __init__(self, observed: Observed | None = None, tails: dict[int, list[str]] | None = None) -> None:
        self.observed = observed or Observed()
        self.tails = tails or {}

    def hear(self, line: RankLine, time: float = 0.0) -> bool:
        """Take note of a line; whether it tells anything that the report is made of.

        Args:
            line: The line.
            time: When it was written, in seconds since the epoch, where the lines come in no order.
        """
        event = events.decode(line.text)
        if event is None:
            if line.rank is not None and line.text.strip():
                _append(self.tails, line.rank, line.text)
            return False
        note = _EVENTS.get(event["event"])
        if note is None:
            return False
        with suppress(KeyError, TypeError, ValueError):  # a script's own, in a shape of its own
            note(self.observed, {"rank": line.rank, **event, "time": time}, self.tails)
        return True


def _proof(observed: Observed, event: dict[str, Any], _: dict[int, list[str]]) -> None:
    rank = Rank(
        rank=event["rank"], host=event["host"], cpus=event.get("cpus"), hostname=event.get("hostname")
    )
    known = _known_meeting(observed, event)
    if known is not None and rank.rank in known["ranks"]:
        return  # a log that is read again
    observed.backend_reason = event.get("backend_reason") or observed.backend_reason
    found = known or _new_meeting(observed, event)
    found["ranks"].append(rank.rank)
    if rank.host not in found["hosts"]:
        found["hosts"].append(rank.host)
    if found is observed.rounds[-1]:
        bisect.insort(observed.ranks, rank, key=_number)


def _known_meeting(observed: Observed, event: dict[str, Any]) -> dict[str, Any] | None:
    """Find where a rank introduces itself; None where it is the first to be heard of."""
    if "meeting" in event:
        named = (one for one in observed.rounds if one.get("meeting") == event["meeting"])
        return next(named, None)
    # Of an image with an older manycpu: a restart has a number, a meeting has no name.
    number, world, rank = int(event.get("round", 0)), event["world_size"], event["rank"]
    if event["time"]:
        if (introduction := f"{rank}@{event['time']}") in observed.introduced:
            return {"ranks": [rank]}
        observed.introduced.append(introduction)
    return next((one for one in observed.rounds if _misses(one, number, world, rank)), None)


def _misses(found: dict[str, Any], number: int, world: int, rank: int) -> bool:
    """Whether a rank is yet to come to this meeting; lines of several pods come in no particular order."""
    return found["round"] == number and found["world_size"] == world and rank not in found["ranks"]


def _new_meeting(observed: Observed, event: dict[str, Any]) -> dict[str, Any]:
    """Add a meeting where its time puts it; the last one counts."""
    found: dict[str, Any] = {"round": int(event.get("round", 0)), "world_size": event["world_size"]}
    found |= {"began": event["time"], "hosts": [], "ranks": []}
    found |= {"meeting": event["meeting"]} if "meeting" in event else {}
    observed.rounds.append(found)
    observed.rounds.sort(key=_began)
    if found is observed.rounds[-1]:
        observed.ranks, observed.world_size = [], event["world_size"]
    return found


def _began(found: dict[str, Any]) -> float:
    """Tell when a meeting was first heard of; 0 where lines have no times, and come in order."""
    return float(found.get("began", 0.0))


def _number(rank: Rank) -> int:
    return rank.rank


def _backend(observed: Observed, event: dict[str, Any], _: dict[int, list[str]]) -> None:
    observed.backend = event["observed"]


def _metrics(observed: Observed, event: dict[str, Any], _: dict[int, list[str]]) -> None:
    room = _METRICS - len(observed.metrics)
    new = [name for name in event["values"] if name not in observed.metrics]
    left_out = {*new[max(0, room) :]}
    observed.metrics |= {name: value for name, value in event["values"].items() if name not in left_out}
    if left_out:
        _warn(observed, f"of the metrics, the first {_METRICS} names are kept")


def _warning(observed: Observed, event: dict[str, Any], _: dict[int, list[str]]) -> None:
    _warn(observed, event["message"])


def _warn(observed: Observed, message: str) -> None:
    if message not in observed.warnings and len(observed.warnings) < _WARNINGS:
        observed.warnings.append(message)


def _error(_: Observed, event: dict[str, Any], tails: dict[int, list[str]]) -> None:
    # What ended a script is among its lines already; why a rank of ours refuses to run it is not.
    if not any(event["message"] in text for text in tails.get(event["rank"], ())):
        _append(tails, event["rank"], event["message"])


def _exit(observed: Observed, event: dict[str, Any], tails: dict[int, list[str]]) -> None:
    _note_end(observed, event)
    # The first to fail is the one to look at: the launcher ends the others because of it.
    known = observed.failure is not None and observed.failed_at <= event["time"]
    if event["code"] == 0 or known:
        return
    rank = int(event["rank"])
    observed.failure = RankFailure(
        rank=rank, host=event["host"], exit_code=event["code"], last_lines=tuple(tails.get(rank, ()))
    )
    observed.failed_at = event["time"]


def _note_end(observed: Observed, event: dict[str, Any]) -> None:
    """Note how a rank of the last meeting ended: not one of the same number that ended before it."""
    place = bisect.bisect_left(observed.ranks, int(event["rank"]), key=_number)
    for rank in observed.ranks[place : place + 1]:
        same = rank.rank == event["rank"] and rank.host == event["host"]
        same = same and event.get("hostname") in (None, rank.hostname)
        if same and event["time"] >= _began(observed.rounds[-1]):
            rank.exit_code = event["code"]


def _append(tails: dict[int, list[str]], rank: int, text: str) -> None:
    tail = tails.setdefault(rank, [])
    tail.append(text[:_LINE])
    del tail[:-_LAST_LINES]


_EVENTS = {
    "proof": _proof,
    "backend": _backend,
    "metrics": _metrics,
    "warning": _warning,
    "error": _error,
    "exit": _exit,
}
