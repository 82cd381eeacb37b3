"""The lease of a run: the run lives while somebody renews it, whatever its step.

On Kubernetes it is annotations of the ledger, which a list of ledgers tells of all.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from manycpu.pipeline.adapters import process
from manycpu.pipeline.spec.handle import ProcessHandle

__all__ = ["LENGTH", "REMOVED", "RENEW_EVERY", "Lease", "from_annotations", "to_annotations"]

LENGTH: Final = 86_400.0  # seconds: longer than a retry, a worker or a triggerer is away
RENEW_EVERY: Final = 600.0  # seconds, give or take half: 1,000 waiting runs write twice a second
_UNTIL, _ENDED, _KEPT, _HOLDER = (f"manycpu/{name}" for name in ("kept-until", "ended", "kept", "holder"))
REMOVED: Final = "manycpu/removed"
"""Somebody removes the run, because its time is over."""


class Lease(BaseModel):
    """Until when a run is left alone, and who holds it."""

    until: float | None = None
    """Seconds since the epoch; None: for ever, as far as others are concerned."""
    ended: bool = False
    """Nobody works on the run any more."""
    kept: bool = False
    """The run was cleaned up, and what it made is kept until then."""
    holder: ProcessHandle | None = None
    """The process that does all of the run, whose death frees the lease; None: many work on it in turn."""

    def held(self, now: float) -> bool:
        """Whether somebody works on the run, or is about to; ``now`` in seconds since the epoch."""
        if self.ended or self.until is None or self.until <= now:
            return False
        return self.holder is None or process.is_alive(self.holder) is not False

    def held_by_another(self, now: float) -> bool | None:
        """Whether another process runs all verbs of the run; None: whether it lives is unknown here."""
        if self.holder is None or not self.held(now) or process.is_this_process(self.holder):
            return False
        return process.is_alive(self.holder)

    def over(self, now: float) -> bool:
        """Whether the lease has ended, so that others may remove the run."""
        return self.until is not None and self.until <= now


def from_annotations(meta: Mapping[str, Any]) -> Lease:
    """Read the lease from a ledger's metadata; what nobody of ours wrote is ignored."""
    annotations = meta.get("annotations") or {}
    try:
        holder = annotations.get(_HOLDER)
        return Lease(
            until=annotations.get(_UNTIL),
            ended=_ENDED in annotations,
            kept=_KEPT in annotations,
            holder=ProcessHandle.model_validate_json(holder) if holder else None,
        )
    except ValueError:
        return Lease()


def to_annotations(**fields: Any) -> dict[str, str | None]:
    """Write fields of a lease as annotations; None takes one away."""
    lease = Lease(**fields)
    annotations = {
        "until": (_UNTIL, None if lease.until is None else f"{lease.until:.0f}"),
        "ended": (_ENDED, "true" if lease.ended else None),
        "kept": (_KEPT, "true" if lease.kept else None),
        "holder": (_HOLDER, lease.holder.model_dump_json() if lease.holder else None),
    }
    return dict(annotations[name] for name in fields)
