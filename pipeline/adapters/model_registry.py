"""The door to MLflow's model registry, for those who have it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Final

__all__ = ["ALIAS", "name_champion"]

ALIAS: Final = "champion"
_KEY: Final = "manycpu.key"
"""Tag of a run of MLflow's with the key of the run that it tracks."""


def name_champion(key: str) -> list[str]:
    """Give the alias ``champion`` to what a run has registered in MLflow's model registry.

    Args:
        key: The run's.

    Returns:
        Name and version of each; none where nothing is tracked, or the run has registered no model.

    Raises:
        mlflow.exceptions.MlflowException: The server refuses the call, or does not answer.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI") or find_spec("mlflow") is None:
        return []
    from mlflow import MlflowClient

    client = MlflowClient()
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    named = []
    for run in client.search_runs(experiments, f"tags.`{_KEY}` = '{key}'"):
        for version in client.search_model_versions(f"run_id = '{run.info.run_id}'"):
            client.set_registered_model_alias(version.name, ALIAS, version.version)
            named.append(f"{version.name} {version.version}")
    return named
