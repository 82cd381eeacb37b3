"""What a ledger holds."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field

from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState

__all__ = ["Attempt", "End", "Entry", "Result", "VerbRecord"]

Result = Literal["done", "reused", "skipped", "failed"]


def _with_backend(run: dict[str, Any]) -> dict[str, Any]:
    """Name the backend of a run recorded when gloo was the default, which was left out."""
    return {"backend": "gloo"} | run


RunFields = Annotated[dict[str, Any], AfterValidator(_with_backend)]
"""A run as ledgers keep it."""


class VerbRecord(BaseModel):
    """The result of one verb, and how long it took."""

    seconds: float
    result: Result
    error: str | None = None


class Attempt(BaseModel):
    """What an attempt was started with: the fields of a task may be edited before its next try."""

    run: RunFields
    target: dict[str, Any]
    data: str | None = None
    """Where the staged data is, and below, the staged base model and the snapshot of the code."""
    model: str | None = None
    code: str | None = None
    image: str | None = None
    """The image by digest, on targets that have images."""
    digests: dict[str, str] = Field(default_factory=dict)
    """What was staged and built -> sha256 of its manifest."""
    hosts: tuple[str, ...] = ()
    """Of a hostfile, those that it runs on: what it wrote is there, whatever the file says later."""
    fruitless: bool = False
    """Whether it succeeded and wrote no model, though one was asked for: the next try trains again."""


class End(BaseModel):
    """How an attempt ended."""

    state: RunState
    reason: str = ""
    seconds: float | None = None


class Entry(BaseModel):
    """What the ledger holds."""

    key: str
    name: str
    created: float
    """Seconds since the epoch."""
    run: RunFields
    """As the run was described before its first attempt; each attempt has a description of its own."""
    target: dict[str, Any]
    tasks: dict[str, str] = Field(default_factory=dict)
    """What is done for the run (prepare, train) -> the task that did it first."""
    dag: dict[str, str] = Field(default_factory=dict)
    """``dag_id`` and ``run_id`` of the DAG run that it is of; empty elsewhere."""
    attempts: dict[int, Attempt] = Field(default_factory=dict)
    """Attempt -> what it was started with; older versions did not note it."""
    ends: dict[int, End] = Field(default_factory=dict)
    """Attempt -> how it ended, where somebody saw it."""
    attempt: int = 0
    handle: Handle | None = None
    cancelled: dict[int, str] = Field(default_factory=dict)
    """Attempt -> who ended it."""
    data: str | None = None
    """What was staged last, and below, what was built: the next attempt is started with it."""
    model: str | None = None
    code: str | None = None
    image: str | None = None
    elsewhere: dict[str, str] = Field(default_factory=dict)
    """What the run made outside of its own namespace: namespace/kind/name -> why."""
    observed: dict[str, Any] | None = None
    """What the ranks of the present attempt said of themselves, where their lines do not stay."""
    digests: dict[str, str] = Field(default_factory=dict)
    export: dict[str, Any] | None = None
    verbs: dict[str, VerbRecord] = Field(default_factory=dict)

    @property
    def cancelled_by(self) -> str | None:
        """Who cancelled the present attempt; None when nobody did."""
        return self.cancelled.get(self.attempt)

    def described(self, attempt: int | None = None) -> Attempt:
        """Return what an attempt was started with; before the first one, the run's latest description.

        Args:
            attempt: The attempt; None: the present one.
        """
        recorded = self.attempts.get(self.attempt if attempt is None else attempt)
        return recorded or Attempt.model_validate(self.model_dump(include=set(Attempt.model_fields)))
