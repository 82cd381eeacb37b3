"""An object of Kubernetes, as its API reads and writes it."""

from datetime import datetime
from typing import Any

KubeObject = dict[str, Any]


def is_being_deleted(item: KubeObject) -> bool:
    """Whether an object's deletion has begun: it exists until its finalizers, or its pods, have ended."""
    return "deletionTimestamp" in item["metadata"]


def condition(item: KubeObject | None, kind: str) -> KubeObject | None:
    """Return an object's condition of the type ``kind`` if it is true; None: it is not, or there is none."""
    conditions = ((item or {}).get("status") or {}).get("conditions") or ()
    return next((entry for entry in conditions if entry["type"] == kind and entry["status"] == "True"), None)


def epoch(text: str | None) -> float:
    """Parse a time of the API into seconds since the epoch; 0: ``text`` is None or empty."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0
