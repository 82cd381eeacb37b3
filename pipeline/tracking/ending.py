"""Send the end of a run to its trackers, with all points that they missed, and the champion to MLflow.

Each call of a tracker has a timeout. A tracker that fails or never answers is a warning, never an error.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final, Literal, NamedTuple

from manycpu.pipeline import run_report
from manycpu.pipeline.adapters.tracking_mlflow import name_champion
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.credentials import redacted
from manycpu.pipeline.spec.errors import ManycpuError
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.tracking import Ending, Place, Point, Tracked
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import as_started
from manycpu.pipeline.tracking.trackers import TRACKERS, open_tracker, tracked

_LOG = logging.getLogger(__name__)
_DRAFT_TIMEOUT_S: Final = 10.0  # for the end of an attempt, which the end of the run sends again
_END_TIMEOUT_S: Final = 30.0
_UPLOAD_TIMEOUT_S: Final = 3600.0  # for an end that uploads the files of a model
_CHAMPION_TIMEOUT_S: Final = 60.0
_STATES: Final[dict[RunState, Literal["succeeded", "cancelled"]]] = {
    RunState.SUCCEEDED: "succeeded",
    RunState.CANCELLED: "cancelled",
}


class Delivery(NamedTuple):
    """Which trackers received the end of a run."""

    places: dict[str, Place]
    """Name of a tracker -> where it has the run."""
    warnings: list[str]
    """One line for each tracker that did not receive everything, and why."""


def tell_end(ctx: RunContext, entry: Entry, report: Report, path: str) -> Delivery:
    """Send the end of a run to its trackers, with its report's path.

    A failure of a tracker is not raised: it is a warning of the result, and in the log.
    """
    if entry.attempt == 0:
        return Delivery(places={}, warnings=[])  # nothing was ever launched
    run = as_started(ctx, entry, entry.attempt).run
    ending = ending_of(report, time.time(), report_path=path, model=run.registered_model)
    places: dict[str, Place] = {}
    warnings = list(_deliver(ctx, run.tracking, tracked(entry, entry.attempt), ending, places))
    for warning in warnings:
        _LOG.warning("%s", warning)
    return Delivery(places.copy(), warnings)  # a call that timed out may still write to `places`


def tell_state(ctx: RunContext, handle: Handle, status: Status) -> None:
    """Send the end of an attempt to the trackers of its run, before the model is exported.

    A failure is not raised, only logged: the end of the run sends it again.
    """
    with suppress(ManycpuError):  # the ledger or the events cannot be read
        entry = ctx.ledger.read()
        trackers = as_started(ctx, entry, handle.attempt).run.tracking
        if not trackers or entry.attempt != handle.attempt:  # a later attempt has begun
            return
        observed = ctx.driver.observed_of(ctx, handle)
        report = run_report.draft(entry, observed, status.state, error=status.reason)
        ending = ending_of(report, time.time())
        places: dict[str, Place] = {}  # not needed: a draft is not reported
        for warning in _deliver(ctx, trackers, tracked(entry, handle.attempt), ending, places):
            _LOG.info("%s; the end of the run sends it again", warning)


def tell_champion(key: str, sha256: str) -> None:
    """Give MLflow's alias ``champion`` to the model that a run registered; a failure is a warning in the log.

    ``key`` is the run's, ``sha256`` the digest of the model that it exported.
    """

    def give_alias() -> None:
        if named := name_champion(key, sha256):  # None: the run has not registered that model
            _LOG.info("alias champion: %s", named)

    if why := _failure(give_alias, _CHAMPION_TIMEOUT_S):
        _LOG.warning("MLflow did not receive the champion: %s", redacted(why))


def ending_of(
    report: Report, time: float, report_path: str | None = None, model: str | None = None
) -> Ending:
    """Describe for a tracker how the last attempt of a run ended.

    Args:
        report: The run's report.
        time: When the attempt ended, in seconds since the epoch.
        report_path: Where the report is; None if the run continues and this is a draft.
        model: Name under which the exported model is to be registered.
    """
    export = report.export or {}
    model_path = export.get("path")
    tags = {name: getattr(report, name) for name in ("state", "world_size", "backend", "error")}
    tags |= {"report": report_path, "export": export.get("sha256")}
    return Ending(
        state=_STATES.get(report.state, "failed"),
        time=time,
        final=report_path is not None,
        points=[
            Point(name, int(step or 0), written_at, float(value))
            for name, curve in report.series.items()
            for step, written_at, value in zip(curve.steps, curve.times, curve.values, strict=True)
        ],
        tags={f"manycpu.{name}": str(value) for name, value in tags.items() if value is not None},
        model=model if model_path and report.state is RunState.SUCCEEDED else None,
        path=model_path,
    )


def _deliver(
    ctx: RunContext, trackers: Iterable[str], attempt: Tracked, ending: Ending, places: dict[str, Place]
) -> Iterator[str]:
    """Send an end to trackers; yield a warning for each that fails or does not answer in time.

    Adds to ``places`` where each tracker has the attempt.
    """
    for name in dict.fromkeys(trackers):  # each once, also if the run names it twice
        if name == "mlflow" and ending.model:  # only MLflow registers models
            timeout_s = _UPLOAD_TIMEOUT_S
        elif ending.final:
            timeout_s = _END_TIMEOUT_S
        else:
            timeout_s = _DRAFT_TIMEOUT_S
        if why := _failure(partial(_send, name, ctx, attempt, ending, places), timeout_s):
            yield f"{TRACKERS[name].label} did not receive all of the run: {redacted(why)}"


def _send(name: str, ctx: RunContext, attempt: Tracked, ending: Ending, places: dict[str, Place]) -> None:
    """Send an end to a tracker; note its place before the call, which may never return, and after it."""
    tracker = open_tracker(name, ctx)
    places[name] = tracker.place_of(attempt)
    try:
        tracker.end(attempt, ending)
    finally:
        places[name] = tracker.place_of(attempt)


def _failure(call: Callable[[], None], timeout_s: float) -> str | None:
    """Run a call in a thread; return why it failed or timed out, else None.

    A call that times out is not stopped: it continues in its thread.
    """
    failures: list[str] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - each tracker has errors of its own, and none fails a run
            failures.append(str(error) or type(error).__name__)

    thread = threading.Thread(target=run, name="send to a tracker", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        return f"it has not answered within {timeout_s:g} s"
    return failures[0] if failures else None
