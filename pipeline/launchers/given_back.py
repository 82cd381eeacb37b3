"""The note on a job that gave back its pods, because there was no room for all of its ranks.

The followers of all jobs of manycpu in the namespace read it; it is all the state that they share.
"""

from typing import Final

from pydantic import BaseModel, Field, ValidationError

from manycpu.pipeline.spec.job_kinds import JobKind
from manycpu.pipeline.spec.kube_object import KubeObject

__all__ = ["Note", "has_given_back", "note_of", "patch"]

_NOTE: Final = "manycpu/given-back"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 600.0  # before the next try, even if no change is seen


class Note(BaseModel):
    """The circumstances when a job gave back its pods.

    Times are seconds since the epoch, by the cluster's clock.
    """

    at: float
    tries: int = 1
    """How often the job has given back."""
    held: dict[str, int] = Field(default_factory=dict)
    """Run -> how many of its pods had a node."""
    short: tuple[str, ...] = ()
    """Resources that were short, such as ``cpu``; empty: there was another obstacle."""
    claim: str = ""
    """The claim that another run's pods had mounted."""
    resumed: float = 0.0
    """When the job tried again; 0: it has not."""

    @property
    def due(self) -> float:
        """When the job tries again in any case: there may be new room from other namespaces."""
        return self.at + min(_FIRST_PAUSE_S * 2.0 ** (self.tries - 1), _LONGEST_PAUSE_S)


def note_of(job: KubeObject | None) -> Note | None:
    """Read the note of a job; None: it has none."""
    text = ((job or {}).get("metadata", {}).get("annotations") or {}).get(_NOTE)
    try:
        return Note.model_validate_json(text) if text else None
    except ValidationError:  # written by another version, or by a person
        return None


def has_given_back(kind: JobKind, job: KubeObject) -> bool:
    """Whether a job is suspended because it gave back its pods, and waits for its turn."""
    note = note_of(job)
    return kind.suspended(job) and note is not None and not note.resumed


def patch(kind: JobKind, note: Note, version: str) -> KubeObject:
    """Build the patch that suspends a job with a note, or resumes it if the note says so.

    Args:
        kind: The job's kind.
        note: The note.
        version: The resourceVersion of the decision: of two concurrent patches, one is refused.
    """
    return {
        "metadata": {"resourceVersion": version, "annotations": {_NOTE: note.model_dump_json()}},
        **kind.with_suspend(not note.resumed),
    }
