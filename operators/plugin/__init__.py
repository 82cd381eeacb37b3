"""A training's page in Airflow: a tab of each DAG run, and one of each DAG with the history.

Every process of Airflow imports this module, also those of tasks, so other imports are deferred.
"""

from functools import cached_property
from typing import Any

from manycpu.operators.airflow_versions import AirflowPlugin

__all__ = ["ManycpuPlugin"]

_PREFIX = "manycpu"


def _tab(name: str, route: str, destination: str) -> dict[str, str]:
    """Describe a tab for Airflow; its URLs are relative to Airflow's base URL, without a leading slash.

    ``destination`` is the kind of page that gets the tab: ``dag`` or ``dag_run``.
    """
    return {
        "name": name,  # the tab's title, and the global variable that the bundle sets
        "url_route": route,
        "destination": destination,
        "bundle_url": f"{_PREFIX}/static/airflow.js",
        "icon": f"{_PREFIX}/static/icon.svg",
        "icon_dark_mode": f"{_PREFIX}/static/icon-dark.svg",
    }


class ManycpuPlugin(AirflowPlugin):
    """Two tabs and their static files; their data comes from Airflow's REST API."""

    name = "manycpu"
    react_apps = [  # noqa: RUF012 - as Airflow declares it
        _tab("Training", "training", "dag_run"),
        _tab("Trainings", "trainings", "dag"),
    ]

    @cached_property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The app of static files; made only in the process that serves it."""
        from manycpu.operators.plugin.files import files_app

        return [{"app": files_app(), "url_prefix": f"/{_PREFIX}", "name": "manycpu's static files"}]
