"""What a ledger holds."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from manycpu.pipeline.spec.handle import Handle

__all__ = ["Entry", "Result", "VerbRecord"]

Result = Literal["done", "reused", "skipped", "failed"]


class VerbRecord(BaseModel):
    """How one verb went."""

    seconds: float
    result: Result
    error: str | None = None


class Entry(BaseModel):
    """What the ledger holds."""

    key: str
    name: str
    created: float
    """Seconds since the epoch."""
    run: dict[str, Any]
    target: dict[str, Any]
    attempt: int = 0
    handle: Handle | None = None
    cancelled: dict[int, str] = Field(default_factory=dict)
    """Attempt -> who ended it."""
    data: str | None = None
    """Where the staged data is, and below, the staged base model and the snapshot of the code."""
    model: str | None = None
    code: str | None = None
    image: str | None = None
    """The image by digest, on targets that have images."""
    elsewhere: dict[str, str] = Field(default_factory=dict)
    """What the run made outside of its own namespace: namespace/kind/name -> why."""
    observed: dict[str, Any] | None = None
    """What the ranks of the present attempt said of themselves, where their lines do not stay."""
    digests: dict[str, str] = Field(default_factory=dict)
    """What was staged and built -> sha256 of its manifest."""
    export: dict[str, Any] | None = None
    verbs: dict[str, VerbRecord] = Field(default_factory=dict)

    @property
    def cancelled_by(self) -> str | None:
        """Who ended the present attempt; None when nobody did."""
        return self.cancelled.get(self.attempt)
