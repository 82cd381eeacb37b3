"""The door to MLflow's model registry."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Final

__all__ = ["ALIAS", "name_champion"]

ALIAS: Final = "champion"
_DIGEST: Final = "manycpu.sha256"


def name_champion(sha256: str) -> str | None:
    """Give the alias ``champion`` to the registered version of a model, in MLflow.

    Args:
        sha256: Digest of the exported model, which its version has as tag ``manycpu.sha256``.

    Returns:
        Name and version; None where nothing is tracked, or that model is not registered.

    Raises:
        mlflow.exceptions.MlflowException: The server refuses the call, or does not answer.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI") or find_spec("mlflow") is None:
        return None
    from mlflow import MlflowClient

    client = MlflowClient()
    versions = client.search_model_versions(f"tags.`{_DIGEST}` = '{sha256}'")
    for version in versions:
        client.set_registered_model_alias(version.name, ALIAS, version.version)
    return ", ".join(f"{version.name} {version.version}" for version in versions) or None
