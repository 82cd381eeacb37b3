"""An object of Kubernetes, as its API reads and writes it."""

from typing import Any

__all__ = ["KubeObject"]

KubeObject = dict[str, Any]
