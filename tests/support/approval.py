"""A task that asks a person for approval, in a real Airflow."""

from typing import Any

from support.standalone_airflow import Airflow
from support.waiting import until

_SETTLED = "TaskInstance Finished: dag_id={}, task_id={}, run_id={},"


def asked(airflow: Airflow, run: str, task: str = "approve", timeout: float = 600) -> dict[str, Any]:
    """Wait until the task awaits a person's answer; return the details that Airflow shows to that person."""
    until(lambda: airflow.task(run, task)["state"] == "awaiting_input", timeout)
    found = airflow.task(run, task)
    # If the answer comes before the scheduler has logged that the worker finished, the task fails.
    settled = _SETTLED.format(found["dag_id"], task, found["dag_run_id"])
    until(lambda: settled in (airflow.home / "standalone.log").read_text(errors="replace"))
    return dict(airflow.api("GET", f"{run}/taskInstances/{task}/-1/hitlDetails"))
