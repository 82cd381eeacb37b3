"""What a worker and a triggerer share while they follow a training: listeners, task states, page."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from manycpu.operators.airflow_versions import AirflowException, calling_airflow, conf
from manycpu.pipeline.spec.credentials import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from airflow.sdk import Context

    from manycpu.pipeline.ledger import Entry
    from manycpu.pipeline.listeners import RankListener
    from manycpu.pipeline.run_report import Report
    from manycpu.pipeline.spec.event_types import Event
    from manycpu.pipeline.spec.events import RankLine
    from manycpu.pipeline.spec.handle import Handle
    from manycpu.pipeline.spec.observed import Observed, Progress
    from manycpu.pipeline.spec.state import Status
    from manycpu.pipeline.targets.context import RunContext

ENDED_FOR_GOOD: Final = frozenset({"failed", "success", "removed", "skipped"})
"""States that a person sets and after which no further try follows."""
ENDED_BY_A_PERSON: Final = ENDED_FOR_GOOD | {"restarting"}
NOTHING_FOLLOWS: Final = frozenset({"removed", "skipped"})
"""States after which Airflow may run no other task of the DAG run, such as at its ``dagrun_timeout``."""
PRESUMED_DEAD: Final = frozenset({"up_for_retry", "scheduled", "queued"})
"""States of a task whose process is alive, but which Airflow presumes dead."""

_STAY_IN_WORKER_S: Final = 15.0  # before a worker defers: most mistakes show within that time
_LONG_REMAINING_S: Final = 30.0  # a training that still needs longer is deferred at once
_STATE_CHECK_INTERVAL_S: Final = 1.0

_LIVE: Final = "manycpu_live"  # key of the XCom with the status of a task's training while it runs
_DEFAULT_LIVE_S: Final = 15.0  # between two writes of that XCom
_MAX_INTERVAL_FACTOR: Final = 1.2  # intervals vary, so that runs that began together spread their writes
_MAX_ERROR_CHARACTERS: Final = 10_000


def place_of(context: Context) -> dict[str, Any]:
    """Return what identifies a task in Airflow, as JSON: its DAG, DAG run, id and map index."""
    instance = context["ti"]
    return {name: getattr(instance, name) for name in ("dag_id", "run_id", "task_id", "map_index")}


def state_of(place: Mapping[str, Any]) -> str | None:
    """Ask Airflow for the state of the task at ``place``; None: it has none, such as after it was cleared.

    The state is ``removed`` if the task no longer exists, such as after its DAG run was deleted.

    Raises:
        AirflowException: Airflow does not answer.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    run_id, task_id = place["run_id"], place["task_id"]
    try:
        with calling_airflow():
            states = RuntimeTaskInstance.get_task_states(
                dag_id=place["dag_id"], map_index=place["map_index"], task_ids=[task_id], run_ids=[run_id]
            )
    except Exception as error:  # Airflow's supervisor process is gone, which shows as any error
        raise AirflowException(f"Airflow does not tell the state of task {task_id}: {error}") from error
    # The answer holds this one task, or nothing.
    return next(iter(states.get(run_id, {}).values()), "removed")


def listeners(
    log: Any, ctx: RunContext, handle: Handle, progress: Progress | None = None
) -> tuple[RankListener, ...]:
    """Make the listeners of an attempt in Airflow: the task's log, and the trackers that the run names.

    ``progress`` is what the ranks had last reported when another process stopped following; None: nothing.
    """
    from manycpu.pipeline.listeners import ReadableLog
    from manycpu.pipeline.tracking.live import listeners as trackers

    log_info, log_warning = partial(log.info, "%s"), partial(log.warning, "%s")
    return ReadableLog(log_info), *trackers(ctx, handle, warn=log_warning, progress=progress, say=log_info)


class DeferralTimer:
    """A listener that decides when a worker defers: after 15 s, or once ranks report more than 30 s left.

    In a later try, it is always after 15 s. A person may have cleared the earlier try, whose trigger then
    ends the training unless it finds the task deferred: the task must not be deferred again by then.
    """

    def __init__(self, try_number: int) -> None:
        self._is_first = try_number == 1
        self._defer_at = time.monotonic() + _STAY_IN_WORKER_S
        self._check_at = time.monotonic() + _STATE_CHECK_INTERVAL_S

    @property
    def has_expired(self) -> bool:
        return time.monotonic() >= self._defer_at

    def is_check_due(self) -> bool:
        """Whether to ask Airflow for the task's state now; true at most once per interval."""
        if time.monotonic() < self._check_at:
            return False
        self._check_at = time.monotonic() + _STATE_CHECK_INTERVAL_S
        return True

    def line(self, line: RankLine) -> None: ...
    def flush(self) -> None: ...

    def event(self, event: Event, line: RankLine) -> None:  # noqa: ARG002 - the signature of RankListener
        """Expire at once if the ranks report more than 30 s left; in the first try only, see the class."""
        from manycpu.pipeline.spec.event_types import ProgressEvent

        is_long = isinstance(event, ProgressEvent) and (event.seconds_left or 0) > _LONG_REMAINING_S
        if is_long and self._is_first:
            self._defer_at = time.monotonic()


class Live:
    """Writes the XCom from which a training's page shows the current status of a task.

    The methods may block: in an event loop, call them on threads.

    Args:
        ctx: The run, as the attempt was started.
        place: The task, as :func:`place_of` names it; None: nothing is written.
        log: The task's logger.
        delay_first: Whether to delay the first document, because another process has just written one.
    """

    def __init__(
        self, ctx: RunContext, place: Mapping[str, Any] | None, log: Any, *, delay_first: bool = False
    ) -> None:
        self._ctx, self._place, self._log = ctx, place, log
        try:
            interval_s = float(conf.get("manycpu", "live_seconds", fallback=_DEFAULT_LIVE_S) or 0)
        except ValueError:  # the setting is no number
            interval_s = _DEFAULT_LIVE_S
        self._interval_s = max(0.0, interval_s) if place else 0.0  # 0: nothing is written
        # A random delay: triggers that start together must not all write at the same time.
        delay_s = random.uniform(0, self._interval_s / 3) if delay_first else 0.0  # noqa: S311 - no secret
        self._next_write_at = time.monotonic() + delay_s
        self._entry: Entry | None = None
        self._shown: tuple[object, ...] = ()  # state, reason and events in the last write
        self._lock, self._closed = threading.Lock(), False

    def is_due(self, status: Status, observed: Observed) -> bool:
        """Whether the interval since the last write is over, and status or events have changed since then."""
        interval_is_over = bool(self._interval_s) and time.monotonic() >= self._next_write_at
        return interval_is_over and (status.state, status.reason, observed.events) != self._shown

    def show(self, status: Status, observed: Observed) -> None:
        """Write the status if a write is due; after :meth:`close`, do nothing."""
        if not self.is_due(status, observed):
            return
        with self._lock:  # so `close` returns only when no write is in progress
            if self._closed:
                return
            self._shown = status.state, status.reason, observed.events
            factor = random.uniform(1, _MAX_INTERVAL_FACTOR)  # noqa: S311 - no secret
            self._next_write_at = time.monotonic() + self._interval_s * factor
            self._write(status, observed=lambda: observed)

    def end(self, status: Status, observed: Callable[[], Observed]) -> None:
        """Write the last status of an attempt, even if no write is due.

        ``observed`` is a function that reads what the ranks reported. If it raises, the error is only logged.
        """
        if self._interval_s:
            self._write(status, observed)

    def close(self) -> None:
        """Write nothing from now on, because another process continues; wait for a write in progress."""
        with self._lock:
            self._closed = True

    def _write(self, status: Status, observed: Callable[[], Observed]) -> None:
        """Write the XCom: a draft of the run's report; a failure is only logged."""
        from manycpu.pipeline.run_report import compact, draft

        try:
            # The ledger is read once: what the page needs of it does not change while an attempt runs.
            self._entry = self._entry or self._ctx.ledger.read()
            reported = observed()
            report = draft(self._entry, reported, status.state)
            # `start`: what the training waits for before it begins.
            report.reason = reported.start or status.in_short or None
            _set_xcom(self._place or {}, _LIVE, compact(report))
        except Exception as error:  # noqa: BLE001 - a page that is not shown ends no training
            self._log.info("the training's page is not up to date: %s", error)


def keep_report(report: Report, place: Mapping[str, Any], log: Any) -> None:
    """Store a short form of a report as an XCom, for the page and the DAG's history; a failure is logged."""
    from manycpu.pipeline.run_report import compact

    try:
        _set_xcom(place, "manycpu_report", compact(report))
    except Exception as error:  # noqa: BLE001 - report.json has all of it
        log.warning("the training's page has no report: %s", error)


def keep_refusal(error: BaseException, place: Mapping[str, Any], log: Any) -> None:
    """Store why a run was refused, for its page: the run has no report. A failure to store is only logged."""
    refusal = {"schema_version": 1, "state": "failed", "error": str(error)[:_MAX_ERROR_CHARACTERS]}
    try:
        _set_xcom(place, _LIVE, refusal)
    except Exception as unshown:  # noqa: BLE001 - the task's log has the error
        log.info("the training's page does not show the error: %s", unshown)


def _set_xcom(place: Mapping[str, Any], key: str, document: dict[str, Any]) -> None:
    """Store a document as an XCom of the task at ``place``; values of environment variables are hidden."""
    from airflow.sdk.execution_time.xcom import XCom

    run: dict[str, Any] = document.get("run", {})
    if "env" in run:
        document = {**document, "run": {**run, "env": dict.fromkeys(run["env"], HIDDEN)}}
    with calling_airflow():
        XCom.set(key, _masked(document), **place)


def _masked(value: Any) -> Any:
    """Mask what Airflow masks in logs, such as passwords of connections: it stores XComs as they are."""
    from airflow.sdk.log import redact  # type: ignore[attr-defined] # it has no list of names

    if isinstance(value, dict):
        return {name: _masked(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(one) for one in value]
    return redact(value) if isinstance(value, str) else value
