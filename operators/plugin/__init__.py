"""A training's page in Airflow: a tab of each DAG run, and one of each DAG with the history.

Every process of Airflow imports this, those of tasks too: what else it needs is imported where it is used.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from airflow.sdk.plugins_manager import AirflowPlugin

__all__ = ["ManycpuPlugin"]

_PREFIX = "manycpu"


def _tab(name: str, route: str, destination: str) -> dict[str, str]:
    """Describe a tab; no slash leads its addresses, which start where the Airflow does."""
    return {
        "name": name,  # what the tab says, and the global that the bundle sets
        "url_route": route,
        "destination": destination,
        "bundle_url": f"{_PREFIX}/static/airflow.js",
        "icon": f"{_PREFIX}/static/icon.svg",
        "icon_dark_mode": f"{_PREFIX}/static/icon-dark.svg",
    }


class ManycpuPlugin(AirflowPlugin):
    """Two tabs, and the files that they are made of; all they show comes from Airflow's REST API."""

    name = "manycpu"
    react_apps = [  # noqa: RUF012 - as Airflow declares it
        _tab("Training", "training", "dag_run"),
        _tab("Trainings", "trainings", "dag"),
    ]

    @cached_property
    def fastapi_apps(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The app of static files; made where Airflow serves it."""
        from manycpu.operators.plugin.files import files_app

        return [{"app": files_app(), "url_prefix": f"/{_PREFIX}", "name": "manycpu's static files"}]
