"""Ask Airflow what has become of a task, from its worker or from the triggerer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from airflow.sdk import Context

__all__ = ["ENDED_BY_A_PERSON", "ENDED_FOR_GOOD", "TAKEN_OVER", "place_of", "state_of"]

ENDED_FOR_GOOD: Final = frozenset({"failed", "success", "removed", "skipped"})
"""States that a person gives to a task: there is no next try."""
ENDED_BY_A_PERSON: Final = ENDED_FOR_GOOD | {"restarting"}
TAKEN_OVER: Final = frozenset({"up_for_retry", "scheduled", "queued"})
"""States that a task has while its process lives: Airflow took that one for dead."""


def place_of(context: Context) -> dict[str, Any]:
    """Name a task as :func:`state_of` wants it, in what JSON can hold."""
    instance = context["ti"]
    names = ("dag_id", "run_id", "task_id", "map_index")
    return {name: getattr(instance, name) for name in names}


def state_of(place: dict[str, Any]) -> str | None:
    """Ask for a task's state; None where it has none, or where nobody answers any more."""
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    run_id, task_id = place["run_id"], place["task_id"]
    try:
        states = RuntimeTaskInstance.get_task_states(
            dag_id=place["dag_id"], map_index=place["map_index"], task_ids=[task_id], run_ids=[run_id]
        )
    except Exception:  # noqa: BLE001 - the supervisor is gone, whatever that looks like from here
        return None
    return next(iter(states.get(run_id, {}).values()), None)
