"""Results that one verb passes to the next: what was staged, and what was built."""

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict


class Copied(NamedTuple):
    """A staged source: its path on every node, the digest of its manifest, and whether the copy existed."""

    path: str
    digest: str
    reused: bool


class Staged(BaseModel):
    """What was staged: paths of data and model on every node, and the digests of their manifests."""

    model_config = ConfigDict(frozen=True)

    data: str | None = None
    model: str | None = None
    digests: dict[str, str] = {}
    origin: str = ""
    """Hash of the fields that it was staged from; empty: an older version staged it."""


class Built(BaseModel):
    """What was built: the code's folder on every node, the arguments of Python, and the code's digest."""

    model_config = ConfigDict(frozen=True)

    code: str | None
    """None: the code is part of manycpu, or installed in the environment or image."""
    program: tuple[str, ...]
    digest: str
    image: str | None = None
    """The image by digest, on targets that have images."""
    origin: str = ""
    """Hash of the fields that it was built from; empty: an older version built it."""
