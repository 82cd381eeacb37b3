"""An object of Kubernetes, as its API reads and writes it."""

from datetime import datetime
from typing import Any

KubeObject = dict[str, Any]


def is_being_deleted(item: KubeObject) -> bool:
    """Whether an object's deletion has begun: it exists until its finalizers, or its pods, have ended."""
    return "deletionTimestamp" in item["metadata"]


def condition(item: KubeObject | None, kind: str) -> KubeObject | None:
    """Find a condition of an object whose status is "True"; None: there is none."""
    conditions = ((item or {}).get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == kind and c["status"] == "True"), None)


def epoch(text: str | None) -> float:
    """Parse a time as the API writes it, to seconds since the epoch; 0: there is none."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0
