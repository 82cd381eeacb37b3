"""The link from each task of a run to the tab ``Training`` of its DAG run."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlencode

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

__all__ = ["TrainingLink", "tab_of", "url_of"]

_UNQUOTED = ":+"  # Airflow leaves them unquoted, and marks the open tab by comparing addresses


class TrainingLink(BaseOperatorLink):
    """A link to the tab `Training` of the DAG run, with this task's training chosen there."""

    name = "Training"

    @property
    def xcom_key(self) -> str:
        """Name of the XCom that holds the link; the tab finds the tasks of manycpu by it."""
        return "manycpu_link"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        """Return the tab's address.

        Args:
            operator: The task.
            ti_key: The task instance, or its key.
        """
        training = getattr(operator, "training", None) or operator.task_id
        return tab_of(ti_key.dag_id, ti_key.run_id, training, ti_key.map_index)


def tab_of(dag: str, run: str, training: str, map_index: int | None) -> str:
    """Return the address of a DAG run's tab, relative to the base URL of Airflow, without a leading slash.

    Args:
        dag: The DAG.
        run: The DAG run.
        training: Name of the training that the tab shows.
        map_index: Map index of the training's tasks; None or -1: they are not expanded.

    >>> tab_of("weekly", "manual__2026-01-01T00:00:00+00:00", "training", -1)
    'dags/weekly/runs/manual__2026-01-01T00:00:00+00:00/plugin/training?training=training'
    >>> tab_of("weekly", "a", "fit", 2)
    'dags/weekly/runs/a/plugin/training?training=fit%5B2%5D'
    """
    name = training if map_index in (None, -1) else f"{training}[{map_index}]"
    page = f"dags/{quote(dag, safe=_UNQUOTED)}/runs/{quote(run, safe=_UNQUOTED)}/plugin/training"
    return f"{page}?{urlencode({'training': name})}"


def url_of(relative: str) -> str:
    """Return the absolute address of a page of Airflow.

    Args:
        relative: The relative address, as :func:`tab_of` returns it.
    """
    from airflow.sdk.configuration import conf

    base = (conf.get("api", "base_url", fallback="") or "").rstrip("/")
    return f"{base}/{relative}"
