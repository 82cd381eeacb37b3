"""The note on a job that gave back what it held, because there was no room for all of its ranks.

Whoever follows any job of ours in the namespace reads it: it is all that they have in common.
"""

from typing import Final

from pydantic import BaseModel, Field, ValidationError

from manycpu.pipeline.spec.job_kinds import JobKind
from manycpu.pipeline.spec.kube_object import KubeObject

__all__ = ["Note", "has_given_back", "note_of", "patch"]

_NOTE: Final = "manycpu/given-back"
_FIRST, _LONGEST = 60.0, 600.0  # seconds until it tries again though nothing of ours has changed


class Note(BaseModel):
    """What was so when a job gave back what it held.

    Times are seconds since the epoch, by the cluster's clock.
    """

    at: float
    tries: int = 1
    """How often it has given back."""
    held: dict[str, int] = Field(default_factory=dict)
    """Run -> how many of its pods had a node."""
    short: tuple[str, ...] = ()
    """Of what there was too little, such as ``cpu``; empty where something else was in the way."""
    claim: str = ""
    """The claim that another run's pods had mounted."""
    resumed: float = 0.0
    """When it tried again; 0: it has not."""

    @property
    def due(self) -> float:
        """When it tries again whatever is seen: others may have made room, in other namespaces."""
        return self.at + min(_FIRST * 2.0 ** (self.tries - 1), _LONGEST)


def note_of(job: KubeObject | None) -> Note | None:
    """Read the note of a job; None where it has none."""
    text = ((job or {}).get("metadata", {}).get("annotations") or {}).get(_NOTE)
    try:
        return Note.model_validate_json(text) if text else None
    except ValidationError:  # another version's, or somebody's own
        return None


def has_given_back(kind: JobKind, job: KubeObject) -> bool:
    """Whether a job is suspended because it gave back what it held, and waits for its turn."""
    note = note_of(job)
    return kind.suspended(job) and note is not None and not note.resumed


def patch(kind: JobKind, note: Note, version: str) -> KubeObject:
    """Describe the change that suspends a job with a note, or lets it go on where it has resumed.

    Args:
        kind: The job's kind.
        note: The note.
        version: The resourceVersion that the decision was made on: of two who decide at once, one is refused.
    """
    return {
        "metadata": {"resourceVersion": version, "annotations": {_NOTE: note.model_dump_json()}},
        **kind.with_suspend(not note.resumed),
    }
