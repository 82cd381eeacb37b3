"""Build report.json from a run's ledger and from what its ranks reported."""

import json
import time
from typing import Any, Final

from pydantic import BaseModel, Field

from manycpu.pipeline.ledger import Entry, VerbRecord
from manycpu.pipeline.spec.credentials import redacted, redacted_fields
from manycpu.pipeline.spec.observed import Observed, Progress, Rank
from manycpu.pipeline.spec.output import REPORT
from manycpu.pipeline.spec.series import Series
from manycpu.pipeline.spec.state import RunState

__all__ = ["COMPACT", "REPORT", "Report", "as_json", "compact", "draft", "parse"]

COMPACT: Final = 64_000
"""Bytes of JSON that a compact report takes at most."""
_NOT_REPORTED: Final = {"failure", "failed_at", "has_returned", "introduced", "parts", "events"}
_POINTS: Final = (300, 150, 75, 40, 20, 4)  # of a curve, as few as it takes
_LONG: Final = ("warnings", "kept", "left_behind", "hosts", "ranks", "rounds", "history")
_ITEMS: Final = 64  # of each of those, where all are too many
_TEXT: Final = 1000  # characters of a value, the same


class Report(BaseModel):
    """The content of report.json."""

    schema_version: int = 1
    key: str
    name: str
    state: RunState
    reason: str | None = None
    """While it goes on: what it waits for."""
    attempts: int
    history: list[dict[str, Any]] = Field(default_factory=list)
    """The attempts that have ended: ``attempt``, ``state``, ``reason``, ``seconds``."""
    run: dict[str, Any]
    target: dict[str, Any]
    world_size: int | None = None
    hosts: list[str] = Field(default_factory=list)
    ranks: list[Rank] = Field(default_factory=list)
    backend: str | None = None
    backend_reason: str | None = None
    """Why the ranks chose it; None where the run names its backend."""
    rounds: list[dict[str, Any]] = Field(default_factory=list)
    progress: Progress | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    series: dict[str, Series] = Field(default_factory=dict)
    """Name of a metric -> its curve, of the last attempt."""
    warnings: list[str] = Field(default_factory=list)
    returned: Any = None
    """What rank 0 returned, where the program was the function of a task."""
    verbs: dict[str, VerbRecord] = Field(default_factory=dict)
    image: str | None = None
    """Digest of the image that the attempt ran with; for local targets, of the code's snapshot."""
    digests: dict[str, str] = Field(default_factory=dict)
    """``data``, ``model``, ``code`` -> sha256 of the manifest of what was staged and built."""
    export: dict[str, Any] | None = None
    kept: list[str] = Field(default_factory=list)
    left_behind: list[str] = Field(default_factory=list)
    error: str | None = None
    time: float | None = None
    """When this was written, in seconds since the epoch."""

    def _repr_html_(self) -> str:
        """Show it in a notebook as its page does."""
        from manycpu.pipeline.page import as_frame

        return as_frame(self.model_dump(mode="json"))


def draft(entry: Entry, observed: Observed, state: RunState, error: str | None = None) -> Report:
    """Build the report from what is known before the run's folder is deleted."""
    ran = entry.described()
    used = [path for by in (ran, entry) for path in (by.data, by.model, by.image or by.code) if path]
    return Report(
        key=entry.key,
        name=entry.name,
        state=state,
        attempts=entry.attempt,
        run=redacted_fields(ran.run),
        target=redacted_fields(ran.target),
        verbs=entry.verbs,
        history=[{"attempt": number, **end.model_dump(mode="json")} for number, end in entry.ends.items()],
        digests=ran.digests,
        time=round(time.time(), 3),
        image=ran.image or ran.digests.get("code"),
        export=redacted_fields(entry.export),
        kept=list(dict.fromkeys(used)),
        error=error and redacted(error),
        **observed.model_dump(exclude=_NOT_REPORTED),
        hosts=observed.hosts,
    )


def compact(report: Report, limit: int = COMPACT) -> dict[str, Any]:
    """Make a report small enough for a database: curves of fewer points, then shorter lists and texts.

    Args:
        report: The report.
        limit: Bytes of JSON.
    """
    for points in _POINTS:
        thin = {name: series.thinned(points) for name, series in report.series.items()}
        fields = report.model_copy(update={"series": thin}).model_dump(mode="json", exclude_defaults=True)
        fields |= {"schema_version": report.schema_version}
        if _size(fields) <= limit:
            return fields
    fields = {name: _shortened(name, value) for name, value in fields.items()}
    for name in ("returned", "series", "rounds", "ranks", "metrics", "run", "warnings", "error"):
        if _size(fields) <= limit:
            break
        fields.pop(name, None)
    return fields


def _size(fields: dict[str, Any]) -> int:
    return len(json.dumps(fields))


def _shortened(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return value[:_TEXT]
    if name in _LONG:
        return [each[:_TEXT] if isinstance(each, str) else each for each in value[:_ITEMS]]
    if name in ("run", "target", "metrics"):
        return {key: each for key, each in value.items() if _size({key: each}) <= _TEXT}
    return value


def as_json(report: Report) -> str:
    """Format a report as the content of report.json."""
    return report.model_dump_json(indent=1) + "\n"


def parse(text: str | None) -> Report | None:
    """Parse a report.json; None where there is none, or it is not one of ours."""
    try:
        return Report.model_validate_json(text) if text else None
    except ValueError:
        return None
