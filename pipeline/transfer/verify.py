"""Verify that a folder on disk still matches its manifest."""

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from manycpu.pipeline.adapters.listing import Item, below
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.transfer.manifest import File, Manifest, Tick

__all__ = ["Verdict", "verify"]


class Verdict(NamedTuple):
    """The result of a verification."""

    fault: str | None
    """The first file that is missing or changed; None where all is well."""
    read: int
    """How many files had to be read for that."""


def verify(
    folder: Path, manifest: Manifest, written: "array[int] | None", tick: Tick, *, keep: bool = False
) -> Verdict:
    """Compare a folder with its manifest by size and modification time, and where these differ by content.

    What the manifest does not name is deleted, links among it: it is none of what was copied.

    Args:
        folder: Where; nothing in it is a link.
        manifest: What should be there.
        written: When each file was written to, in nanoseconds; None: not known, all is read.
        tick: Is called while it goes on.
        keep: Whether what the manifest does not name is a fault, and not deleted.
    """
    walk, read = _Walk(folder, keep=keep), 0
    for number, file in enumerate(manifest.files):
        tick()
        item = walk.up_to(file.path)
        if item is None:
            return Verdict(f"{file.path!r} is missing", read)
        if item.size != file.size:
            return Verdict(f"{file.path!r} has {item.size} bytes, and had {file.size}", read)
        if item.is_folder or (written is not None and item.version == str(written[number])):
            continue
        read += 1
        if not _same_content(folder, item, file, tick):
            return Verdict(f"{file.path!r} has other content", read)
    walk.up_to(None)
    return Verdict(f"{walk.unlisted[0]!r} is none of it" if walk.unlisted else None, read)


def _same_content(folder: Path, item: Item, file: File, tick: Tick) -> bool:
    return Location.of(f"file://{folder}", "run.data").sha256(item, tick) == file.sha256


class _Walk:
    """Walks the files of a folder by path; files that are passed over are deleted, or listed."""

    def __init__(self, folder: Path, *, keep: bool) -> None:
        self._folder, self._keep = folder, keep
        self.unlisted: list[str] = []
        self._rest: Iterator[Item] = below(str(folder), lambda path, _: self._delete(path), follow=False)
        self._next = next(self._rest, None)

    def up_to(self, path: str | None) -> Item | None:
        """Advance to a path, or to the end; None where there is no such file."""
        while self._next is not None and (path is None or self._next.path < path):
            self._delete(self._next.path)
            self._next = next(self._rest, None)
        item = self._next
        if item is None or item.path != path:
            return None
        self._next = next(self._rest, None)
        return item

    def _delete(self, path: str) -> None:
        if self._keep:
            self.unlisted.append(path)
            return
        full_path = f"{self._folder}/{path}"
        os.rmdir(full_path) if path.endswith("/") else os.unlink(full_path)  # noqa: PTH106, PTH108 - as listed
