"""What a worker and a triggerer share while they follow a training: listeners, task states, the deferral."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from airflow.sdk import Context

    from manycpu.pipeline.listeners import RankListener
    from manycpu.pipeline.spec.event_types import Event
    from manycpu.pipeline.spec.events import RankLine
    from manycpu.pipeline.spec.handle import Handle
    from manycpu.pipeline.spec.observed import Progress
    from manycpu.pipeline.targets.context import RunContext

__all__ = [
    "ENDED_BY_A_PERSON",
    "ENDED_FOR_GOOD",
    "PRESUMED_DEAD",
    "DeferralTimer",
    "listeners",
    "place_of",
    "state_of",
]

ENDED_FOR_GOOD: Final = frozenset({"failed", "success", "removed", "skipped"})
"""States that a person sets and after which no further try follows."""
ENDED_BY_A_PERSON: Final = ENDED_FOR_GOOD | {"restarting"}
PRESUMED_DEAD: Final = frozenset({"up_for_retry", "scheduled", "queued"})
"""States of a task whose process is alive, but which Airflow presumes dead."""

_STAY_IN_WORKER_S: Final = 15.0  # most mistakes show within that time
_LONG_REMAINING_S: Final = 30.0  # a training that still needs longer is deferred at once
_STATE_CHECK_INTERVAL_S: Final = 1.0


def listeners(
    log: Any, ctx: RunContext, handle: Handle, progress: Progress | None = None
) -> tuple[RankListener, ...]:
    """Make the listeners of an attempt in Airflow: the task's log, and the trackers that the run names.

    Args:
        log: The logger of the operator or of its trigger.
        ctx: The run, as the attempt was started.
        handle: The attempt.
        progress: How far the training is, if this process resumes after another one.
    """
    from manycpu.pipeline.listeners import ReadableLog
    from manycpu.pipeline.tracking.live import listeners as trackers

    say, warn = partial(log.info, "%s"), partial(log.warning, "%s")
    return ReadableLog(say), *trackers(ctx, handle, warn, progress, say)


class DeferralTimer:
    """A listener that decides when a worker defers: after 15 s, or once the training reports a long rest."""

    def __init__(self) -> None:
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
        from manycpu.pipeline.spec.event_types import ProgressEvent

        if isinstance(event, ProgressEvent) and (event.seconds_left or 0) > _LONG_REMAINING_S:
            self._defer_at = time.monotonic()


def place_of(context: Context) -> dict[str, Any]:
    """Return what identifies a task in Airflow, as JSON: its DAG, DAG run, id and map index."""
    instance = context["ti"]
    return {name: getattr(instance, name) for name in ("dag_id", "run_id", "task_id", "map_index")}


def state_of(place: dict[str, Any]) -> str | None:
    """Ask Airflow for a task's state; None where it has none, or where the supervisor does not answer.

    Args:
        place: The task, as :func:`place_of` names it.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    run_id, task_id = place["run_id"], place["task_id"]
    try:
        states = RuntimeTaskInstance.get_task_states(
            dag_id=place["dag_id"], map_index=place["map_index"], task_ids=[task_id], run_ids=[run_id]
        )
    except Exception:  # noqa: BLE001 - the supervisor is gone, which shows as any error
        return None
    return next(iter(states.get(run_id, {}).values()), None)
