"""What the page of a training shows, kept as XComs: how it goes, and the report of what it did."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING, Any, Final

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
_SECONDS: Final = 15.0  # between two documents, where the configuration says nothing
_WORDS: Final = 10_000  # characters of a refusal
_LATE: Final = 1.2  # times that at most: runs that began together do not stay together


class Live:
    """Keeps an XCom of a task up to date while its training goes on; on threads, for it may wait.

    Args:
        ctx: The run, as the attempt was started.
        place: The task, as :func:`place_of` names it; None: there is nobody to show it to.
        log: The task's logger.
        wait: Whether the first document waits for its turn: another process has just written one.
    """

    def __init__(
        self, ctx: RunContext, place: Mapping[str, Any] | None, log: Any, *, wait: bool = False
    ) -> None:
        self._ctx, self._place, self._log = ctx, place, log
        self._seconds = live_seconds() if place else 0.0
        self._next = time.monotonic() + self._seconds / 3 * wait * random.random()  # noqa: S311 - no secret
        self._entry: Entry | None = None
        self._shown: tuple[object, ...] = ()
        self._lock, self._closed = threading.Lock(), False

    def is_due(self, status: Status, observed: Observed) -> bool:
        """Whether something is new, and it is time to write it."""
        return (
            bool(self._seconds) and time.monotonic() >= self._next and _news(status, observed) != self._shown
        )

    def show(self, status: Status, observed: Observed) -> None:
        """Write how it goes, where that is due."""
        if not self.is_due(status, observed):
            return
        with self._lock:
            if self._closed:
                return
            self._shown = _news(status, observed)
            self._next = time.monotonic() + self._seconds * random.uniform(1, _LATE)  # noqa: S311 - no secret
            self._write(status, lambda: observed)

    def end(self, status: Status, observed: Callable[[], Observed]) -> None:
        """Write how it ended.

        Args:
            status: Its last status.
            observed: Reads what its ranks have reported.
        """
        if self._seconds:
            self._write(status, observed)

    def close(self) -> None:
        """Write nothing any more: another process goes on."""
        with self._lock:
            self._closed = True

    def _write(self, status: Status, observed: Callable[[], Observed]) -> None:
        from manycpu.pipeline.run_report import compact, draft

        try:
            self._entry = self._entry or self._ctx.ledger.read()
            seen = observed()
            report = draft(self._entry, seen, status.state)
            report.reason = seen.start or status.in_short or None
            _set(self._place or {}, LIVE, compact(report))
        except Exception as error:  # noqa: BLE001 - a page that is not shown ends no training
            self._log.info("the training's page is not up to date: %s", error)


def _news(status: Status, observed: Observed) -> tuple[object, ...]:
    return status.state, status.reason, observed.events


def live_seconds() -> float:
    """Read how often a document is written at most, in seconds; 0: never."""
    from airflow.sdk.configuration import conf

    try:
        return max(0.0, float(conf.get("manycpu", "live_seconds", fallback=_SECONDS) or 0))
    except ValueError:
        return _SECONDS


def keep_report(report: Report, place: Mapping[str, Any], log: Any) -> None:
    """Keep a report, made compact, for the page and for the history of its DAG."""
    from manycpu.pipeline.run_report import compact

    try:
        _set(place, REPORT, compact(report))
    except Exception as error:  # noqa: BLE001 - report.json says it all
        log.warning("the training's page has no report: %s", error)


def keep_refusal(error: BaseException, place: Mapping[str, Any], log: Any) -> None:
    """Keep why a run was refused, for its page: there is no report of what never began."""
    try:
        _set(place, LIVE, {"schema_version": 1, "state": "failed", "error": str(error)[:_WORDS]})
    except Exception as unshown:  # noqa: BLE001 - the task's log says it
        log.info("the training's page does not say so: %s", unshown)


def _set(place: Mapping[str, Any], key: str, document: dict[str, Any]) -> None:
    from airflow.sdk.execution_time.xcom import XCom

    run: dict[str, Any] = document.get("run", {})
    if "env" in run:  # Airflow masks what a variable or connection gave; an XCom is shown as it is
        document = {**document, "run": {**run, "env": dict.fromkeys(run["env"], HIDDEN)}}
    XCom.set(key, document, **place)
