"""Build report.json from a run's ledger and from what its ranks reported."""

from typing import Any

from pydantic import BaseModel, Field

from manycpu.pipeline.ledger import Entry, VerbRecord
from manycpu.pipeline.observed import Observed, Rank
from manycpu.pipeline.spec.credentials import redacted, redacted_fields
from manycpu.pipeline.spec.output import REPORT
from manycpu.pipeline.spec.state import RunState

__all__ = ["REPORT", "Report", "as_json", "draft", "parse"]


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
    backend_reason: str | None = None
    """Why the ranks chose it; None where the run names its backend."""
    rounds: list[dict[str, Any]] = Field(default_factory=list)
    metrics: dict[str, Any] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)
    returned: Any = None
    """What rank 0 returned, where the program was the function of a task."""
    verbs: dict[str, VerbRecord] = Field(default_factory=dict)
    image: str | None = None
    """Digest of the image that the attempt ran with; for local targets, of the code's snapshot."""
    export: dict[str, Any] | None = None
    kept: list[str] = Field(default_factory=list)
    left_behind: list[str] = Field(default_factory=list)
    error: str | None = None

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
        image=ran.image or ran.digests.get("code"),
        export=redacted_fields(entry.export),
        kept=list(dict.fromkeys(used)),
        error=error and redacted(error),
        **observed.model_dump(exclude={"failure", "failed_at", "has_returned", "introduced", "parts"}),
        hosts=observed.hosts,
    )


def as_json(report: Report) -> str:
    """Format a report as the content of report.json."""
    return report.model_dump_json(indent=1) + "\n"


def parse(text: str | None) -> Report | None:
    """Parse a report.json; None where there is none, or it is not one of ours."""
    try:
        return Report.model_validate_json(text) if text else None
    except ValueError:
        return None
