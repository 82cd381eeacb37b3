"""Tell trackers how a run ended, and all that they have missed."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from manycpu.pipeline import run_report
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.credentials import redacted
from manycpu.pipeline.spec.errors import ManycpuError
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.spec.tracking import Ending, Place, Tracked
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import as_started
from manycpu.pipeline.tracking.patience import failure
from manycpu.pipeline.tracking.told import ending_of, tracked
from manycpu.pipeline.tracking.trackers import TRACKERS, open_tracker

__all__ = ["Told", "tell_end", "tell_state"]

_LOG = logging.getLogger(__name__)
_PATIENCE: Final = 30.0  # seconds for the whole of it
_FOR_NOW: Final = 10.0  # seconds, where it is told again later
_UPLOAD: Final = 3600.0  # seconds, where the files of a model are part of it


class Told(NamedTuple):
    """What the end of a run has come to."""

    places: dict[str, Place]
    """Name of a tracker -> where it has the run."""
    warnings: list[str]
    """What could not be told, and why, one line for each tracker."""


def tell_end(ctx: RunContext, entry: Entry, report: Report, path: str) -> Told:
    """Tell the trackers of a run how it ended; nothing that they do is an error.

    Args:
        ctx: The run.
        entry: What its ledger held.
        report: The run's report.
        path: Where that is.
    """
    if entry.attempt == 0:
        return Told({}, [])  # nothing ever trained
    run = as_started(ctx, entry, entry.attempt).run
    ending = ending_of(report, time.time(), path, run.registered_model)
    places: dict[str, Place] = {}
    lines = list(_untold(ctx, run.tracking, tracked(entry, entry.attempt), ending, places))
    for line in lines:
        _LOG.warning("%s", line)
    return Told(places.copy(), lines)  # a thread that took too long may go on


def tell_state(ctx: RunContext, handle: Handle, status: Status) -> None:
    """Tell the trackers of a run how an attempt ended, before its model is exported.

    Whoever is away hears it at the end of the run.
    """
    with suppress(ManycpuError):  # of the ledger, or of what the ranks said: the end says it again
        entry = ctx.ledger.read()
        trackers = as_started(ctx, entry, handle.attempt).run.tracking
        if not trackers or entry.attempt != handle.attempt:
            return
        observed = ctx.driver.observed_of(ctx, handle)
        report = run_report.draft(entry, observed, status.state, status.reason)
        ending = ending_of(report, time.time())
        for line in _untold(ctx, trackers, tracked(entry, handle.attempt), ending, {}):
            _LOG.info("%s; it is told again when the run has ended", line)


def _untold(
    ctx: RunContext, trackers: Iterable[str], attempt: Tracked, ending: Ending, places: dict[str, Place]
) -> Iterator[str]:
    """Tell trackers, and note where each has the attempt; name those that could not be told, and say why."""
    for name in dict.fromkeys(trackers):
        patience = _PATIENCE if ending.final else _FOR_NOW
        patience = _UPLOAD if name == "mlflow" and ending.model else patience
        if why := failure(partial(_tell, name, ctx, attempt, ending, places), patience):
            yield f"{TRACKERS[name].label} was not told all of the run: {redacted(why)}"


def _tell(name: str, ctx: RunContext, attempt: Tracked, ending: Ending, places: dict[str, Place]) -> None:
    tracker = open_tracker(name, ctx)
    places[name] = tracker.place_of(attempt)  # who never answers has an address all the same
    try:
        tracker.end(attempt, ending)
    finally:
        places[name] = tracker.place_of(attempt)
