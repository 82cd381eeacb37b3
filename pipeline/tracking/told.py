"""What trackers are told: computed from events, the ledger and the report, with nobody asked."""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.credentials import redacted_description
from manycpu.pipeline.spec.event_types import Event
from manycpu.pipeline.spec.observed import Series, is_finite, values_of
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.tracking import Ending, Point, Tracked

__all__ = ["ending_of", "points_of", "tracked"]

_UNTOLD: Final = frozenset({"env", "tracking", "registered_model"})
_STATES: Final = {RunState.SUCCEEDED: "succeeded", RunState.CANCELLED: "cancelled"}
_REPORTED: Final = ("state", "world_size", "backend", "error")


def points_of(event: Event, rank: int | None, step: float | None, now: float) -> list[Point]:
    """Read the points of an event, as the curves of the report have them; none of one that has no numbers.

    Args:
        event: What a rank has reported.
        rank: The rank.
        step: The step that the training has come to: that of a pace.
        now: Its time where it has none, in seconds since the epoch.
    """
    of_step, values = values_of(event, rank, step)
    time = float(now if event.time is None else event.time)
    return [
        Point(name, int(of_step or 0), time, float(value))
        for name, value in values.items()
        if is_finite(value)
    ]


def tracked(entry: Entry, attempt: int) -> Tracked:
    """Describe an attempt: whose it is, and what it was started with.

    Args:
        entry: The run's ledger.
        attempt: The attempt.
    """
    started = entry.described(attempt)
    tags = {
        "manycpu.key": entry.key,
        "manycpu.name": entry.name,
        "manycpu.dag_id": entry.dag.get("dag_id"),
        "manycpu.dag_run_id": entry.dag.get("run_id"),
        "manycpu.task": entry.tasks.get("train"),
        "manycpu.image": started.image,
        **{f"manycpu.{name}": digest for name, digest in started.digests.items()},
    }
    return Tracked(
        key=entry.key,
        name=entry.name,
        began=entry.created,
        attempt=attempt,
        started=_started(entry, attempt),
        group=entry.dag.get("dag_id") or started.run.get("job_name") or _stem(started.run["program"]),
        params=_params(started.run, started.target),
        tags={name: value for name, value in tags.items() if value},
    )


def ending_of(report: Report, time: float, path: str | None = None, model: str | None = None) -> Ending:
    """Say how the last attempt of a run ended.

    Args:
        report: Its report.
        time: When it ended, in seconds since the epoch.
        path: Where the report is; None: the run goes on, and this is a draft.
        model: Name under which the exported model is to be registered.
    """
    said = {name: getattr(report, name) for name in _REPORTED} | {"report": path}
    export = report.export or {}
    said["export"] = export.get("sha256")
    exported = export.get("path")
    return Ending(
        state=_STATES.get(report.state, "failed"),  # type: ignore[arg-type]
        time=time,
        final=path is not None,
        points=list(_points(report.series)),
        tags={f"manycpu.{name}": str(value) for name, value in said.items() if value is not None},
        model=model if exported and report.state is RunState.SUCCEEDED else None,
        path=exported,
    )


def _points(curves: Mapping[str, Series]) -> Iterator[Point]:
    for name, curve in curves.items():
        for step, time, value in zip(curve.steps, curve.times, curve.values, strict=True):
            yield Point(name, int(step or 0), time, float(value))


def _started(entry: Entry, attempt: int) -> float:
    handle = entry.handle
    if handle is None or handle.attempt != attempt:
        return entry.created
    return handle.began


def _stem(program: str) -> str:
    return program.rsplit("/", 1)[-1].removesuffix(".py").removeprefix("-m").strip()


def _params(run: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, str]:
    """Flatten what was set, with no value of the environment and no credentials."""
    shown = redacted_description(run)
    told = {name: value for name, value in shown.items() if name not in _UNTOLD}
    told |= {"env": sorted(run.get("env") or {})}
    told |= {f"target.{name}": target[name] for name in ("kind", "launch") if name in target}
    told |= {f"args.{name}": value for name, value in _options(shown.get("args") or ())}
    return {name: text for name, text in _flat(told) if text}


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
