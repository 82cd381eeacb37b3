"""Derive a run's state from a supervised process: the same for every launch kind of machines."""

from collections.abc import Mapping
from typing import Any

from manycpu.pipeline.spec.state import RunState, Status, describe_exit

__all__ = ["state"]

_STARTING = Status(state=RunState.PENDING, reason="starting")


def state(observed: Mapping[str, Any]) -> Status:
    """Derive the state from what was observed of a supervised process.

    Args:
        observed: ``alive`` (the supervisor lives), ``met`` (all ranks have), ``exit`` (the supervisor's exit
            record, or None) and ``cancelled``.
    """
    record = observed["exit"]
    if record is None:
        if not observed["alive"]:
            gone = "its supervisor is gone without an exit record: killed, or the machine restarted"
            return Status(state=RunState.FAILED, reason=gone)
        return Status(state=RunState.RUNNING) if observed["met"] else _STARTING
    if observed["cancelled"] or record["reason"] == "cancelled":
        return Status(state=RunState.CANCELLED, reason=record["reason"])
    if record["reason"]:
        return Status(state=RunState.FAILED, reason=record["reason"])
    if record["code"] != 0:
        return Status(
            state=RunState.FAILED, reason=f"the launcher ended with {describe_exit(record['code'])}"
        )
    return Status(state=RunState.SUCCEEDED)
