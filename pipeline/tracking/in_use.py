"""Tell the model registry which model is in use."""

import logging
from functools import partial
from typing import Final

from manycpu.pipeline.adapters.tracking_mlflow import name_champion
from manycpu.pipeline.spec.credentials import redacted
from manycpu.pipeline.tracking.patience import failure

__all__ = ["tell_champion"]

_LOG = logging.getLogger(__name__)
_PATIENCE: Final = 60.0  # seconds for the whole of it


def tell_champion(key: str, sha256: str) -> None:
    """Give the alias ``champion`` to what a run has registered; a failure is one warning in the log.

    Args:
        key: The run's.
        sha256: Of the model that it exported.
    """
    if why := failure(partial(_tell, key, sha256), _PATIENCE):
        _LOG.warning("MLflow was not told of the champion: %s", redacted(why))


def _tell(key: str, sha256: str) -> None:
    if named := name_champion(key, sha256):
        _LOG.info("alias champion: %s", named)
