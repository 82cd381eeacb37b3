"""Derive a run's state from a supervised process: the same for every launch kind of machines."""

from collections.abc import Mapping
from typing import Any

from manycpu.pipeline.spec.state import RunState, Status, describe_exit

__all__ = ["state"]

_STARTING = Status(state=RunState.PENDING, reason="starting")


def state(observed: Mapping[str, Any]) -> Status:
    """Derive the state from what was observed of a supervised process.

    Args:
        observed: ``alive`` (whether the supervisor lives; None: unknown), ``unseen`` (why that is unknown),
            ``met`` (all ranks have), ``exit`` (the supervisor's exit record, or None) and ``cancelled``.
    """
    record = observed["exit"]
    if record is None:
        return _without_record(observed)
    if observed["cancelled"] or record["reason"] == "cancelled":
        return Status(state=RunState.CANCELLED, reason=record["reason"])
    if record["reason"]:
        return Status(state=RunState.FAILED, reason=record["reason"], by_itself=True)
    if record["code"] != 0:
        reason = f"the launcher ended with {describe_exit(record['code'])}"
        return Status(state=RunState.FAILED, reason=reason, by_itself=True)
    return Status(state=RunState.SUCCEEDED)


def _without_record(observed: Mapping[str, Any]) -> Status:
    if observed["alive"] is None:
        return Status(state=RunState.UNKNOWN, reason=observed["unseen"])
    if not observed["alive"]:
        gone = "its supervisor is gone without an exit record: killed, or the machine restarted"
        return Status(state=RunState.FAILED, reason=gone)
    return Status(state=RunState.RUNNING) if observed["met"] else _STARTING
