"""The models of a ledger's content: the entry of a run, its attempts and its verbs."""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, Field

from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.state import RunState

__all__ = ["CLEANUP", "Attempt", "End", "Entry", "Result", "VerbRecord"]

CLEANUP: Final = "cleanup"
"""Name of the verb, in ``verbs`` and, where it ended an attempt, in ``cancelled``."""

Result = Literal["done", "reused", "skipped", "failed"]


def _with_backend(run: dict[str, Any]) -> dict[str, Any]:
    """Add the backend of a run that was recorded when gloo was the default and not written."""
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
    """Path of the staged data; the next two are those of the base model and the code snapshot."""
    model: str | None = None
    code: str | None = None
    image: str | None = None
    """The image by digest, on targets that have images."""
    digests: dict[str, str] = Field(default_factory=dict)
    """Kind of what was staged or built -> sha256 of its manifest."""
    hosts: tuple[str, ...] = ()
    """The hosts of the hostfile that it runs on: its files are there, even if the hostfile changes."""
    fruitless: bool = False
    """Whether it succeeded without writing the requested model: the next try trains again."""


class End(BaseModel):
    """How an attempt ended."""

    state: RunState
    reason: str = ""
    seconds: float | None = None


class Entry(BaseModel):
    """The entry of a run."""

    key: str
    name: str
    created: float
    """Seconds since the epoch."""
    run: RunFields
    """As the run was described before its first attempt; each attempt has a description of its own."""
    target: dict[str, Any]
    tasks: dict[str, str] = Field(default_factory=dict)
    """Step of the run (prepare, train) -> the task that did it first."""
    dag: dict[str, str] = Field(default_factory=dict)
    """``dag_id`` and ``run_id`` of its DAG run; empty outside of Airflow."""
    attempts: dict[int, Attempt] = Field(default_factory=dict)
    """Attempt -> what it was started with; older versions did not record it."""
    ends: dict[int, End] = Field(default_factory=dict)
    """Attempt -> how it ended, if that was observed."""
    attempt: int = 0
    handle: Handle | None = None
    cancelled: dict[int, str] = Field(default_factory=dict)
    """Attempt -> who ended it."""
    data: str | None = None
    """What was staged last, and in the next fields built: the next attempt starts with it."""
    model: str | None = None
    code: str | None = None
    image: str | None = None
    elsewhere: dict[str, str] = Field(default_factory=dict)
    """Objects that the run made outside of its own namespace: namespace/kind/name -> why."""
    observed: dict[str, Any] | None = None
    """Reports of the present attempt's ranks, on targets whose logs are not kept."""
    digests: dict[str, str] = Field(default_factory=dict)
    export: dict[str, Any] | None = None
    verbs: dict[str, VerbRecord] = Field(default_factory=dict)

    @property
    def cancelled_by(self) -> str | None:
        """Who cancelled the present attempt; None: it was not cancelled."""
        return self.cancelled.get(self.attempt)

    def cancelled_by_person(self, attempt: int) -> bool:
        """Whether a person or a task cancelled an attempt, not the clean-up, which ends what still runs."""
        return self.cancelled.get(attempt, CLEANUP) != CLEANUP

    def described(self, attempt: int | None = None) -> Attempt:
        """Return what an attempt was started with; before the first one, the run's latest description.

        Args:
            attempt: The attempt; None: the present one.
        """
        recorded = self.attempts.get(self.attempt if attempt is None else attempt)
        return recorded or Attempt.model_validate(self.model_dump(include=set(Attempt.model_fields)))
