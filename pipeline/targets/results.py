"""What the verbs hand on to each other: what was staged, and what was built."""

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

__all__ = ["Built", "Copied", "Staged"]


class Copied(NamedTuple):
    """One source on the volume: its path on every node, its manifest's digest, and whether it was there."""

    path: str
    digest: str
    reused: bool


class Staged(BaseModel):
    """What was staged: where it is on every node, and the digest of its manifest."""

    model_config = ConfigDict(frozen=True)

    data: str | None = None
    model: str | None = None
    digests: dict[str, str] = {}
    origin: str = ""
    """Tells from which fields it was staged; empty where an older version did."""


class Built(BaseModel):
    """The code that will run: its folder on every node, Python's arguments there, and its digest."""

    model_config = ConfigDict(frozen=True)

    code: str | None
    """None for what is installed with manycpu itself or in the environment."""
    program: tuple[str, ...]
    digest: str
    image: str | None = None
    """The image by digest, on targets that have images."""
    origin: str = ""
    """Tells from which fields it was built; empty where an older version did."""
