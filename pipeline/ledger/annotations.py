"""The lease of a run on Kubernetes, stored in annotations of its ledger."""

from collections.abc import Mapping
from typing import Any, Final

from manycpu.pipeline.ledger.lease import Lease
from manycpu.pipeline.spec.handle import ProcessHandle

__all__ = ["REMOVED", "read", "written"]

_UNTIL, _ENDED, _HOLDER = "manycpu/kept-until", "manycpu/ended", "manycpu/holder"
REMOVED: Final = "manycpu/removed"
"""Somebody removes the run, because its time is over."""


def read(meta: Mapping[str, Any]) -> Lease:
    """Parse the lease from a ledger's metadata; an invalid one counts as none."""
    annotations = meta.get("annotations") or {}
    try:
        holder = annotations.get(_HOLDER)
        return Lease(
            until=annotations.get(_UNTIL),
            ended=_ENDED in annotations,
            holder=ProcessHandle.model_validate_json(holder) if holder else None,
        )
    except ValueError:
        return Lease()


def written(**fields: Any) -> dict[str, str | None]:
    """Serialise fields of a lease as annotations; None removes one."""
    lease = Lease(**fields)
    values = {
        "until": (_UNTIL, None if lease.until is None else f"{lease.until:.0f}"),
        "ended": (_ENDED, "true" if lease.ended else None),
        "holder": (_HOLDER, lease.holder.model_dump_json() if lease.holder else None),
    }
    return dict(values[name] for name in fields)
