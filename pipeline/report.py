"""What a run did: read from its log and its ledger, written beside the exported model."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, Field

from manycpu.pipeline.ledger import Entry, VerbRecord
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.state import RankFailure, RunState

__all__ = ["REPORT", "Observed", "Observer", "Rank", "Report", "as_json", "draft", "observe", "parse"]

REPORT = "report.json"
_LAST_LINES = 20


class Rank(BaseModel):
    """A rank as it introduced itself."""

    rank: int
    host: str
    """The machine: on Kubernetes the node."""
    cpus: float | None = None
    hostname: str | None = None
    """What it calls itself: on Kubernetes the pod."""


class Observed(BaseModel):
    """What the lines of a training tell."""

    world_size: int | None = None
    ranks: list[Rank] = Field(default_factory=list)
    backend: str | None = None
    rounds: list[dict[str, Any]] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)
    failure: RankFailure | None = None
    introduced: list[str] = Field(default_factory=list)
    """``rank@time`` of every introduction: a log that is read again tells nothing new."""
    failed_at: float = 0.0
    """Seconds since the epoch; 0 where lines have no times."""

    @property
    def hosts(self) -> list[str]:
        """Distinct hosts, in the order of their first rank."""
        return list(dict.fromkeys(rank.host for rank in self.ranks))


class Report(BaseModel):
    """The content of report.json."""

    schema_version: int = 1
    key: str
    name: str
    state: RunState
    attempts: int
    run: dict[str, Any]
    target: dict[str, Any]
    world_size: int | None = None
    hosts: list[str] = Field(default_factory=list)
    ranks: list[Rank] = Field(default_factory=list)
    backend: str | None = None
    rounds: list[dict[str, Any]] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)
    verbs: dict[str, VerbRecord] = Field(default_factory=dict)
    image: str | None = None
    """Digest of the image that the attempt ran with; for local targets, of the code's snapshot."""
    export: dict[str, Any] | None = None
    kept: list[str] = Field(default_factory=list)
    left_behind: list[str] = Field(default_factory=list)
    error: str | None = None


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
    """

    def __init__(self, observed: Observed | None = None) -> None:
        self.observed = observed or Observed()
        self._tails: dict[int, list[str]] = {}

    def hear(self, line: RankLine, time: float = 0.0) -> bool:
        """Take note of a line; whether it tells anything that the report is made of.

        Args:
            line: The line.
            time: When it was written, in seconds since the epoch, where the lines come in no order.
        """
        event = events.decode(line.text)
        if event is None:
            if line.rank is not None and line.text.strip():
                _append(self._tails, line.rank, line.text)
            return False
        note = _EVENTS.get(event["event"])
        if note is None:
            return False
        with suppress(KeyError, TypeError, ValueError):  # a script's own, in a shape of its own
            note(self.observed, {"rank": line.rank, **event, "time": time}, self._tails)
        return True


def _proof(observed: Observed, event: dict[str, Any], _: dict[int, list[str]]) -> None:
    rank = Rank(
        rank=event["rank"], host=event["host"], cpus=event.get("cpus"), hostname=event.get("hostname")
    )
    number, world = int(event.get("round", 0)), event["world_size"]
    if event["time"]:
        if (known := f"{rank.rank}@{event['time']}") in observed.introduced:
            return
        observed.introduced.append(known)
    found = next((one for one in observed.rounds if _misses(one, number, world, rank.rank)), None)
    if found is None:
        found = {"round": number, "world_size": world, "hosts": [], "ranks": []}
        observed.rounds.append(found)
        observed.ranks, observed.world_size = [], world
    found["ranks"].append(rank.rank)
    if rank.host not in found["hosts"]:
        found["hosts"].append(rank.host)
    if found is observed.rounds[-1]:
        observed.ranks.append(rank)
        observed.ranks.sort(key=lambda rank: rank.rank)


def _misses(found: dict[str, Any], number: int, world: int, rank: int) -> bool:
    """Whether a rank is yet to come to this meeting; lines of several pods come in no particular order."""
    return found["round"] == number and found["world_size"] == world and rank not in found["ranks"]


def _backend(observed: Observed, event: dict[str, Any], _: dict[int, list[str]]) -> None:
    observed.backend = event["observed"]


def _metrics(observed: Observed, event: dict[str, Any], _: dict[int, list[str]]) -> None:
    observed.metrics |= event["values"]


def _warning(observed: Observed, event: dict[str, Any], _: dict[int, list[str]]) -> None:
    if event["message"] not in observed.warnings:
        observed.warnings.append(event["message"])


def _error(_: Observed, event: dict[str, Any], tails: dict[int, list[str]]) -> None:
    # What ended a script is among its lines already; why a rank of ours refuses to run it is not.
    if not any(event["message"] in text for text in tails.get(event["rank"], ())):
        _append(tails, event["rank"], event["message"])


def _exit(observed: Observed, event: dict[str, Any], tails: dict[int, list[str]]) -> None:
    # The first to fail is the one to look at: the launcher ends the others because of it.
    known = observed.failure is not None and observed.failed_at <= event["time"]
    if event["code"] == 0 or known:
        return
    rank, observed.failed_at = int(event["rank"]), event["time"]
    observed.failure = RankFailure(
        rank=rank, host=event["host"], exit_code=event["code"], last_lines=tuple(tails.get(rank, ()))
    )


def _append(tails: dict[int, list[str]], rank: int, text: str) -> None:
    tail = tails.setdefault(rank, [])
    tail.append(text)
    del tail[:-_LAST_LINES]


_EVENTS = {
    "proof": _proof,
    "backend": _backend,
    "metrics": _metrics,
    "warning": _warning,
    "error": _error,
    "exit": _exit,
}


def draft(entry: Entry, observed: Observed, state: RunState, error: str | None = None) -> Report:
    """Put together what is known before the run's folder is deleted."""
    ran = entry.described()
    used = [path for one in (ran, entry) for path in (one.data, one.model, one.image or one.code) if path]
    return Report(
        key=entry.key,
        name=entry.name,
        state=state,
        attempts=entry.attempt,
        run=ran.run,
        target=ran.target,
        verbs=entry.verbs,
        image=ran.image or ran.digests.get("code"),
        export=entry.export,
        kept=list(dict.fromkeys(used)),
        error=error,
        **observed.model_dump(exclude={"failure", "failed_at", "introduced"}),
        hosts=observed.hosts,
    )


def as_json(report: Report) -> str:
    """Give the content of report.json."""
    return report.model_dump_json(indent=1) + "\n"


def parse(text: str | None) -> Report | None:
    """Understand a report.json; None where there is none, or it is not one of ours."""
    try:
        return Report.model_validate_json(text) if text else None
    except ValueError:
        return None
