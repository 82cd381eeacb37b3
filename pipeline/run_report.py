"""Build report.json from a run's ledger and from what its ranks reported."""

import json
import time
from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import Any, Final

from pydantic import BaseModel, Field

from manycpu.pipeline.ledger import Entry, Verbs
from manycpu.pipeline.ledger.base import UnixTime
from manycpu.pipeline.spec.credentials import redacted_description, redacted_fields, without_secrets
from manycpu.pipeline.spec.observed import FIRST_METRICS, SERIES_LIMIT, Observed, Progress, Rank, Series
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.tracking import Place

COMPACT: Final = 64_000
"""Largest size of a compact report, in bytes of JSON."""
_NOT_REPORTED: Final = {
    *("failure", "failed_at", "introduced", "finished_meeting"),
    *("parts", "result", "events", "start", "warnings"),
}
_FIELDS_SHARE: Final = 0.75  # of a compact report; the curves take the rest
_FIELD_LIMITS: Final = ((COMPACT, COMPACT), (2000, 64), (500, 32), (100, 16), (40, 6))
"""Bytes of a text and items of a list, tried in this order."""
_CURVE_MIN_POINTS: Final = 4
_CURVE_SHRINK: Final = 0.9  # factor for the number of points that is tried next
_SERIES_KEY_BYTES: Final = 16  # of the key "series" and what separates it from the other fields


class Report(BaseModel):
    """The content of report.json."""

    schema_version: int = 1
    key: str
    name: str
    state: RunState
    reason: str | None = None
    """While the run continues: what it waits for."""
    began: float | None = None
    """When the run began, in seconds since the epoch; identifies its attempts in trackers."""
    checkpoints_since: UnixTime | None = None
    """Part of the name of the run's folder below ``run.checkpoints``, as the ledger had it."""
    attempts: int
    history: list[dict[str, Any]] = Field(default_factory=list)
    """The attempts that have ended: ``attempt``, ``state``, ``reason``, ``seconds``."""
    dag: dict[str, str] = Field(default_factory=dict)
    """``dag_id``, ``run_id`` and perhaps ``partition_key`` of the DAG run, and the ``instance`` of Airflow;
    empty outside of Airflow."""
    run: dict[str, Any]
    target: dict[str, Any]
    world_size: int | None = None
    hosts: list[str] = Field(default_factory=list)
    ranks: list[Rank] = Field(default_factory=list)
    backend: str | None = None
    backend_reason: str | None = None
    """Why the ranks chose the backend; None if the run names it."""
    rounds: list[dict[str, Any]] = Field(default_factory=list)
    progress: Progress | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    series: dict[str, Series] = Field(default_factory=dict)
    """Name of a metric -> its curve, of the last attempt."""
    trackers: dict[str, Place] = Field(default_factory=dict)
    """Name of a tracker -> where it has the last attempt, such as its ``address`` and a ``link``."""
    warnings: list[str] = Field(default_factory=list)
    returned: Any = None
    """What rank 0 returned, if the program was the function of a task."""
    has_returned: bool | None = None
    """Whether it returned: None is a return value too. None: an older version wrote the report."""
    verbs: Verbs = Field(default_factory=dict)
    image: str | None = None
    """Digest of the attempt's image; for local targets, of the code's snapshot."""
    digests: dict[str, str] = Field(default_factory=dict)
    """``data``, ``model``, ``code`` -> sha256 of the manifest of what was staged and built."""
    export: dict[str, Any] | None = None
    kept: list[str] = Field(default_factory=list)
    advice: str | None = None
    """If output or checkpoints are kept: until when, how the run continues, and what deletes them."""
    left_behind: list[str] = Field(default_factory=list)
    error: str | None = None
    time: float | None = None
    """When this was written, in seconds since the epoch."""

    def _repr_html_(self) -> str:
        """Show the report in a notebook as its page."""
        from manycpu.pipeline.page import as_frame

        return as_frame(self.model_dump(mode="json"))


def draft(entry: Entry, observed: Observed, state: RunState, error: str | None = None) -> Report:
    """Build the report from the ledger and the ranks' events, before the run's folder is deleted.

    Its ``run`` and ``target`` are those that the last attempt was started with. Their secrets are hidden, in
    all messages too.
    """
    ran = entry.described()  # the entry's own fields may have changed since
    # A message may quote a line of the training, which may show a secret of the run.
    hide = partial(without_secrets, value=[ran.run, ran.target])
    verbs = {
        name: record.model_copy(update={"error": record.error and hide(record.error)})
        for name, record in entry.verbs.items()
    }
    # Paths of the attempt, then of the entry: what was staged after the attempt's start is kept as well.
    staged_and_built = [
        path
        for origin in (ran, entry)
        for path in (origin.data, origin.model, origin.image or origin.code)
        if path
    ]
    return Report(
        key=entry.key,
        name=entry.name,
        state=state,
        began=entry.created,
        checkpoints_since=entry.checkpoints_since,
        attempts=entry.attempt,
        dag=entry.dag,
        run=redacted_description(ran.run),
        target=redacted_description(ran.target),
        verbs=verbs,
        history=[
            {"attempt": number, **end.model_dump(mode="json"), "reason": hide(end.reason)}
            for number, end in entry.ends.items()
        ],
        digests=ran.digests,
        time=round(time.time(), 3),
        image=ran.image or ran.digests.get("code"),
        export=redacted_fields(entry.export),
        kept=list(dict.fromkeys(staged_and_built)),
        error=error and hide(error),
        warnings=[hide(warning) for warning in observed.warnings],
        **observed.model_dump(exclude=_NOT_REPORTED),
        hosts=observed.hosts,  # a property, which model_dump leaves out
    )


def compact(report: Report, limit: int = COMPACT) -> dict[str, Any]:
    """Shrink a report to about ``limit`` bytes of JSON, for a database: shorter curves, lists and texts.

    If the returned value is too large, it is left out, not cut. Metrics that are lists or mappings are left
    out only if nothing else is enough. ``counts`` has the length of each list before it was cut.
    """
    # Through JSON text: it turns NaN and infinite numbers, which Airflow refuses, into null.
    everything: dict[str, Any] = json.loads(report.model_dump_json(exclude_defaults=True, exclude={"series"}))
    reported = everything.get("metrics", {})
    important = {name: reported[name] for name in FIRST_METRICS if name in reported}
    # Important metrics come first, because the last ones are cut first.
    everything |= {"schema_version": report.schema_version, "metrics": important | reported}
    everything["counts"] = {name: len(value) for name, value in everything.items() if isinstance(value, list)}
    for text_bytes, items in _FIELD_LIMITS:
        # Before the cut, which would keep the ranks with the lowest numbers.
        everything["ranks"] = _choose_ranks(everything.get("ranks", []), items)
        fields = {name: _cut(value, text_bytes, items) for name, value in everything.items()}
        if _size(fields) <= limit * _FIELDS_SHARE:
            break
        everything.pop("returned", None)  # too large with it, and the next limits would cut it
    else:  # even the smallest limits are not enough: drop nested metrics, such as a confusion matrix
        metrics = fields["metrics"].items()
        fields["metrics"] = {name: value for name, value in metrics if not isinstance(value, dict | list)}
    room = limit - _size(fields) - _SERIES_KEY_BYTES
    return fields | {"series": _fitting_curves(report.series, room)}


def _fitting_curves(series: Mapping[str, Series], room: int) -> dict[str, Any]:
    """Thin curves until they fit into ``room`` bytes of JSON.

    If the thinnest curves do not fit, drop the less important half, and thin again; empty: none fits.
    """
    important = [name for name in FIRST_METRICS if name in series]
    names = [*important, *(name for name in series if name not in important)]
    points = SERIES_LIMIT
    while names:
        curves = {name: series[name].thinned(points).model_dump(mode="json") for name in names}
        if (size := _size(curves)) <= room:
            return curves
        if points == _CURVE_MIN_POINTS:
            names = names[: len(names) // 2]
        # Fewer points in proportion to the excess, and by a tenth at least, so that the loop ends.
        points = max(_CURVE_MIN_POINTS, int(points * min(_CURVE_SHRINK, room / size)))
    return {}


def _choose_ranks(ranks: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Choose at most ``count`` ranks; return them in the order of their numbers.

    Ranks that failed are chosen first, then ranks with a pace, and last those without one. If a group is too
    large, ranks are chosen evenly between the fastest and the slowest, by the seconds that they compute in a
    step.
    """

    def computing_seconds(rank: dict[str, Any]) -> float | None:
        """Return the seconds of a step in which a rank computes, and does not wait; None: it has no pace."""
        pace = rank.get("pace") or {}
        step = pace.get("step_seconds")
        return None if step is None else float(step - (pace.get("wait_seconds") or 0))

    failed: list[dict[str, Any]] = []
    timed: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for rank in sorted(ranks, key=lambda rank: computing_seconds(rank) or 0):
        if rank.get("exit_code"):
            failed.append(rank)
        elif computing_seconds(rank) is not None:
            timed.append(rank)
        else:
            others.append(rank)
    chosen: list[dict[str, Any]] = []
    for group in (failed, timed, others):
        room = min(count - len(chosen), len(group))
        last, gaps = len(group) - 1, max(1, room - 1)
        chosen += [group[at * last // gaps] for at in range(room)]  # the first, the last, and evenly between
    return sorted(chosen, key=itemgetter("rank"))


def _cut(value: Any, text_bytes: int, items: int) -> Any:
    """Cut texts to ``text_bytes`` bytes of JSON, lists to ``items`` items, mappings to four times ``items``.

    A mapping also loses the members whose names are longer than ``text_bytes``.
    """
    if isinstance(value, str):
        while _size(value) > text_bytes + 2:  # with the quotes
            # Characters differ in their bytes: cut by the mean, by one at least, and look again.
            value = value[: max(1, len(value) * text_bytes // _size(value)) - 1]
        return value
    if isinstance(value, dict):
        kept = [(name, item) for name, item in value.items() if len(name) <= text_bytes][: items * 4]
        return {name: _cut(item, text_bytes, items) for name, item in kept}
    if isinstance(value, list):
        return [_cut(item, text_bytes, items) for item in value[:items]]
    return value


def _size(value: Any) -> int:
    return len(json.dumps(value))


def as_json(report: Report) -> str:
    """Format a report as the content of report.json."""
    return report.model_dump_json(indent=1) + "\n"


def parse(text: str | None) -> Report | None:
    """Parse a report.json; None if there is no text, or it is no report of manycpu."""
    try:
        return Report.model_validate_json(text) if text else None
    except ValueError:
        return None
