"""What the page of a training shows, stored as XComs: its status while it runs, and the report of the run."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from airflow.sdk.configuration import conf

from manycpu.pipeline.spec.credentials import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from manycpu.pipeline.ledger import Entry
    from manycpu.pipeline.run_report import Report
    from manycpu.pipeline.spec.observed import Observed
    from manycpu.pipeline.spec.state import Status
    from manycpu.pipeline.targets.context import RunContext

__all__ = ["LIVE", "REPORT", "Live", "keep_refusal", "keep_report"]

LIVE: Final = "manycpu_live"
REPORT: Final = "manycpu_report"
_DEFAULT_INTERVAL_S: Final = 15.0  # between two documents
_MAX_INTERVAL_FACTOR: Final = 1.2  # intervals vary, so that runs that began together spread their writes
_MAX_ERROR_CHARACTERS: Final = 10_000


class Live:
    """Keeps the XCom with a task's live status up to date; its methods may block, so call them on threads.

    Args:
        ctx: The run, as the attempt was started.
        place: The task, as :func:`place_of` names it; None: nothing is written.
        log: The task's logger.
        wait: Whether to delay the first document, because another process has just written one.
    """

    def __init__(
        self, ctx: RunContext, place: Mapping[str, Any] | None, log: Any, *, wait: bool = False
    ) -> None:
        self._ctx, self._place, self._log = ctx, place, log
        self._interval_s = _configured_interval() if place else 0.0
        self._next = time.monotonic() + self._interval_s / 3 * wait * random.random()  # noqa: S311 - no secret
        self._entry: Entry | None = None
        self._shown: tuple[object, ...] = ()
        self._lock, self._closed = threading.Lock(), False

    def is_due(self, status: Status, observed: Observed) -> bool:
        """Whether the interval has passed and something has changed since the last document."""
        due = bool(self._interval_s) and time.monotonic() >= self._next
        return due and _version(status, observed) != self._shown

    def show(self, status: Status, observed: Observed) -> None:
        """Write the status if that is due."""
        if not self.is_due(status, observed):
            return
        with self._lock:
            if self._closed:
                return
            self._shown = _version(status, observed)
            factor = random.uniform(1, _MAX_INTERVAL_FACTOR)  # noqa: S311 - no secret
            self._next = time.monotonic() + self._interval_s * factor
            self._write(status, lambda: observed)

    def end(self, status: Status, observed: Callable[[], Observed]) -> None:
        """Write the final status.

        Args:
            status: The last status of the attempt.
            observed: Reads what its ranks have reported.
        """
        if self._interval_s:
            self._write(status, observed)

    def close(self) -> None:
        """Write nothing from now on: another process continues."""
        with self._lock:
            self._closed = True

    def _write(self, status: Status, observed: Callable[[], Observed]) -> None:
        from manycpu.pipeline.run_report import compact, draft

        try:
            self._entry = self._entry or self._ctx.ledger.read()
            seen = observed()
            report = draft(self._entry, seen, status.state)
            report.reason = seen.start or status.in_short or None
            _set_xcom(self._place or {}, LIVE, compact(report))
        except Exception as error:  # noqa: BLE001 - a page that is not shown ends no training
            self._log.info("the training's page is not up to date: %s", error)


def keep_report(report: Report, place: Mapping[str, Any], log: Any) -> None:
    """Store a report, made compact, as an XCom, for the training's page and the history of its DAG."""
    from manycpu.pipeline.run_report import compact

    try:
        _set_xcom(place, REPORT, compact(report))
    except Exception as error:  # noqa: BLE001 - report.json has all of it
        log.warning("the training's page has no report: %s", error)


def keep_refusal(error: BaseException, place: Mapping[str, Any], log: Any) -> None:
    """Store why a run was refused, for its page: a run that never began has no report."""
    try:
        _set_xcom(
            place, LIVE, {"schema_version": 1, "state": "failed", "error": str(error)[:_MAX_ERROR_CHARACTERS]}
        )
    except Exception as unshown:  # noqa: BLE001 - the task's log has the error
        log.info("the training's page does not show the error: %s", unshown)


def _configured_interval() -> float:
    """Read the seconds between two documents; 0: none is written."""
    try:
        return max(0.0, float(conf.get("manycpu", "live_seconds", fallback=_DEFAULT_INTERVAL_S) or 0))
    except ValueError:
        return _DEFAULT_INTERVAL_S


def _version(status: Status, observed: Observed) -> tuple[object, ...]:
    """Return a value that differs whenever the page would."""
    return status.state, status.reason, observed.events


def _set_xcom(place: Mapping[str, Any], key: str, document: dict[str, Any]) -> None:
    from airflow.sdk.execution_time.xcom import XCom

    run: dict[str, Any] = document.get("run", {})
    if "env" in run:  # Airflow masks values of variables and connections in logs, but not in XComs
        document = {**document, "run": {**run, "env": dict.fromkeys(run["env"], HIDDEN)}}
    XCom.set(key, document, **place)
