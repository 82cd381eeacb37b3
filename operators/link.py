"""The button on every task of a run that leads to the run's tab, as soon as the task has begun."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

__all__ = ["TrainingLink", "tab_of", "url_of"]

_PLAIN = ":+"  # stay as they are: Airflow marks the tab that is open by comparing addresses


class TrainingLink(BaseOperatorLink):
    """A link to the tab `Training` of the DAG run, with this task's training chosen there."""

    name = "Training"

    @property
    def xcom_key(self) -> str:
        """Name of the XCom that holds the link; the tab finds our tasks by it."""
        return "manycpu_link"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the tab's address.

        Args:
            operator: The task.
            ti_key: Of which DAG run; a task instance will do.
        """
        training = getattr(operator, "training", None) or operator.task_id
        return tab_of(ti_key.dag_id, ti_key.run_id, training, ti_key.map_index)


def tab_of(dag: str, run: str, training: str, map_index: int | None) -> str:
    """Return the address of a DAG run's tab; no slash leads it, as it starts where the Airflow does.

    Args:
        dag: The DAG.
        run: The DAG run.
        training: Name of the training that is chosen.
        map_index: The one of its tasks; None or -1: they are not expanded.

    >>> tab_of("weekly", "manual__2026-01-01T00:00:00+00:00", "training", -1)
    'dags/weekly/runs/manual__2026-01-01T00:00:00+00:00/plugin/training?training=training'
    >>> tab_of("weekly", "a", "fit", 2)
    'dags/weekly/runs/a/plugin/training?training=fit%5B2%5D'
    """
    name = training if map_index in (None, -1) else f"{training}[{map_index}]"
    page = f"dags/{quote(dag, safe=_PLAIN)}/runs/{quote(run, safe=_PLAIN)}/plugin/training"
    return f"{page}?{urlencode({'training': name})}"


def url_of(below: str) -> str:
    """Return the whole address of one of Airflow's pages, for those who are not on one.

    Args:
        below: As :func:`tab_of` returns it.
    """
    from airflow.sdk.configuration import conf

    base = (conf.get("api", "base_url", fallback="") or "").rstrip("/")
    return f"{base}/{below}"
