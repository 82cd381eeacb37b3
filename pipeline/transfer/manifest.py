"""What a folder holds: every file with its size and sha256."""

import hashlib
import json
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec.output import MANIFEST

__all__ = ["DIGITS", "MANIFEST", "File", "Manifest", "Progress", "TransferError", "identity", "scan"]

DIGITS = 16
"""Of a digest in the name of a folder."""
Progress = Callable[[int, int], None]
"""Is called with bytes done and bytes in all."""


class TransferError(Exception):
    """The copy is not what the source is."""


class File(BaseModel):
    """One file of a manifest: path relative to its root, size in bytes, sha256 in hexadecimal."""

    model_config = ConfigDict(frozen=True)

    path: str
    size: int
    sha256: str


class Manifest(BaseModel):
    """What a folder holds."""

    model_config = ConfigDict(frozen=True)

    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """The sha256 of the paths and digests: equal exactly where the contents are."""
        lines = "".join(f"{file.sha256}  {file.path}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()


def scan(source: Location) -> Manifest:
    """Read every file of a folder and hash it."""
    items = source.items()
    return Manifest(files=tuple(File(path=i.path, size=i.size, sha256=source.sha256(i.path)) for i in items))


def identity(source: Location) -> str:
    """Tell a source's present content from any other, reading it only where it is on disk."""
    if source.local is not None:
        return scan(source).digest
    listing = json.dumps([[item.path, item.size, item.version] for item in source.items()])
    return hashlib.sha256(f"{source.url}\n{listing}".encode()).hexdigest()
