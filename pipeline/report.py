"""What a run did: read from its log and its ledger, written beside the exported model."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, Field

from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.ledger import Entry, VerbRecord
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.state import RankFailure, RunState

__all__ = ["REPORT", "Observed", "Rank", "Report", "draft", "observe", "read", "write"]

REPORT = "report.json"
_LAST_LINES = 20


class Rank(BaseModel):
    """A rank as it introduced itself."""

    rank: int
    host: str
    cpus: float | None = None


class Observed(BaseModel):
    """What the lines of a training tell."""

    world_size: int | None = None
    ranks: list[Rank] = Field(default_factory=list)
    backend: str | None = None
    rounds: list[dict[str, Any]] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)
    failure: RankFailure | None = None

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
    """Digest of the image; for local targets, of the code's snapshot."""
    export: dict[str, Any] | None = None
    kept: list[str] = Field(default_factory=list)
    left_behind: list[str] = Field(default_factory=list)
    error: str | None = None


def observe(lines: Iterable[str]) -> Observed:
    """Read everything that the ranks said of themselves from a training's log."""
    observed = Observed()
    tails: dict[int, list[str]] = {}
    for line in lines:
        rank, host, text = events.split(line)
        event = events.decode(text)
        if event is not None:
            with suppress(KeyError, TypeError, ValueError):  # a script's own, in a shape of its own
                _EVENTS.get(event["event"], _ignore)(observed, event, tails)
        elif rank is not None and host is not None and text.strip():
            tails.setdefault(rank, []).append(text)
            del tails[rank][:-_LAST_LINES]
    return observed


def _proof(observed: Observed, event: dict[str, Any], _: dict[int, list[str]]) -> None:
    number = int(event.get("round", 0))
    if not observed.rounds or observed.rounds[-1]["round"] != number:
        observed.rounds.append({"round": number, "world_size": event["world_size"], "hosts": []})
        observed.ranks = []
    round_hosts = observed.rounds[-1]["hosts"]
    if event["host"] not in round_hosts:
        round_hosts.append(event["host"])
    observed.world_size = event["world_size"]
    observed.ranks.append(Rank(rank=event["rank"], host=event["host"], cpus=event.get("cpus")))
    observed.ranks.sort(key=lambda rank: rank.rank)


def _backend(observed: Observed, event: dict[str, Any], _: dict[int, list[str]]) -> None:
    observed.backend = event["observed"]


def _metrics(observed: Observed, event: dict[str, Any], _: dict[int, list[str]]) -> None:
    observed.metrics |= event["values"]


def _warning(observed: Observed, event: dict[str, Any], _: dict[int, list[str]]) -> None:
    if event["message"] not in observed.warnings:
        observed.warnings.append(event["message"])


def _exit(observed: Observed, event: dict[str, Any], tails: dict[int, list[str]]) -> None:
    # The first to fail is the one to look at: the launcher ends the others because of it.
    if event["code"] == 0 or observed.failure is not None:
        return
    rank = int(event["rank"])
    observed.failure = RankFailure(
        rank=rank, host=event["host"], exit_code=event["code"], last_lines=tuple(tails.get(rank, ()))
    )


def _ignore(*_: object) -> None:
    return


_EVENTS = {"proof": _proof, "backend": _backend, "metrics": _metrics, "warning": _warning, "exit": _exit}


def draft(entry: Entry, observed: Observed, state: RunState, error: str | None = None) -> Report:
    """Put together what is known before the run's folder is deleted."""
    return Report(
        key=entry.key,
        name=entry.name,
        state=state,
        attempts=entry.attempt,
        run=entry.run,
        target=entry.target,
        verbs=entry.verbs,
        image=entry.image or entry.digests.get("code"),
        export=entry.export,
        kept=[path for path in (entry.data, entry.model, entry.image or entry.code) if path],
        error=error,
        **observed.model_dump(exclude={"failure"}),
        hosts=observed.hosts,
    )


def write(output: Location, report: Report) -> str:
    """Write report.json into the run's output; returns its path or URL."""
    output.write_text(REPORT, report.model_dump_json(indent=1) + "\n")
    return f"{output.root if output.local else output.url}".rstrip("/") + f"/{REPORT}"


def read(output: Location) -> Report | None:
    """Read the report in an output; None where there is none, or it is not one of ours."""
    text = output.read_text(REPORT)
    try:
        return Report.model_validate_json(text) if text else None
    except ValueError:
        return None
