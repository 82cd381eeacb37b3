"""Compute what trackers receive from events, the ledger and the report."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.credentials import redacted_description
from manycpu.pipeline.spec.event_types import Event
from manycpu.pipeline.spec.observed import is_finite, values_of
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.tracking import Ending, Point, Tracked

__all__ = ["ending_of", "points_of", "tracked"]

_NOT_PARAMETERS: Final = frozenset({"env", "tracking", "registered_model"})
_STATES: Final = {RunState.SUCCEEDED: "succeeded", RunState.CANCELLED: "cancelled"}
_REPORT_TAGS: Final = ("state", "world_size", "backend", "error")


def points_of(event: Event, rank: int | None, step: float | None, now: float) -> list[Point]:
    """Return the points of an event, as the curves of the report have them; none if it has no numbers.

    Args:
        event: An event of a rank.
        rank: The rank.
        step: The training's last step, for events of pace.
        now: Time of an event that has none, in seconds since the epoch.
    """
    of_step, values = values_of(event, rank, step)
    time = float(now if event.time is None else event.time)
    return [
        Point(name, int(of_step or 0), time, float(value))
        for name, value in values.items()
        if is_finite(value)
    ]


def tracked(entry: Entry, attempt: int) -> Tracked:
    """Describe an attempt for a tracker: its run, its group, its parameters and tags.

    Args:
        entry: The run's ledger.
        attempt: The attempt's number.
    """
    ran = entry.described(attempt)
    handle, started = entry.handle, entry.created
    if handle is not None and handle.attempt == attempt:
        started = handle.began
    script = ran.run["program"].rsplit("/", 1)[-1].removesuffix(".py").removeprefix("-m").strip()
    tags = {
        "manycpu.key": entry.key,
        "manycpu.name": entry.name,
        "manycpu.dag_id": entry.dag.get("dag_id"),
        "manycpu.dag_run_id": entry.dag.get("run_id"),
        "manycpu.task": entry.tasks.get("train"),
        "manycpu.image": ran.image,
        **{f"manycpu.{name}": digest for name, digest in ran.digests.items()},
    }
    return Tracked(
        key=entry.key,
        name=entry.name,
        began=entry.created,
        attempt=attempt,
        started=started,
        group=entry.dag.get("dag_id") or ran.run.get("job_name") or script,
        params=_params(ran.run, ran.target),
        tags={name: value for name, value in tags.items() if value},
    )


def ending_of(report: Report, time: float, path: str | None = None, model: str | None = None) -> Ending:
    """Describe for a tracker how the last attempt of a run ended.

    Args:
        report: The run's report.
        time: When the attempt ended, in seconds since the epoch.
        path: Where the report is; None if the run continues and this is a draft.
        model: Name under which the exported model is to be registered.
    """
    export = report.export or {}
    exported = export.get("path")
    tags = {name: getattr(report, name) for name in _REPORT_TAGS}
    tags |= {"report": path, "export": export.get("sha256")}
    return Ending(
        state=_STATES.get(report.state, "failed"),  # type: ignore[arg-type]
        time=time,
        final=path is not None,
        points=[
            Point(name, int(step or 0), at, float(value))
            for name, curve in report.series.items()
            for step, at, value in zip(curve.steps, curve.times, curve.values, strict=True)
        ],
        tags={f"manycpu.{name}": str(value) for name, value in tags.items() if value is not None},
        model=model if exported and report.state is RunState.SUCCEEDED else None,
        path=exported,
    )


def _params(run: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, str]:
    """Flatten the fields that were set; of the environment only the names, and no credentials."""
    shown = redacted_description(run)
    params = {name: value for name, value in shown.items() if name not in _NOT_PARAMETERS}
    params |= {"env": sorted(run.get("env") or {})}
    params |= {f"target.{name}": target[name] for name in ("kind", "launch") if name in target}
    params |= {f"args.{name}": value for name, value in _options(shown.get("args") or ())}
    return {name: text for name, text in _flat(params) if text}


def _options(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Read ``--name value``, ``--name=value`` and ``--name``, which is true, of a program's arguments."""
    for word, following in pairwise([*words, "--"]):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name.strip("-"):
            given = "true" if following.startswith("--") else following
            yield name.lstrip("-"), value if equals else given


def _flat(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", text) for inner, text in _flat(value))
        elif isinstance(value, (list, tuple)):
            yield name, shlex.join(map(str, value))
        elif value is not None:
            yield name, str(value)
