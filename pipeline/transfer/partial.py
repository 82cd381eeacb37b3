"""A copy on its way: what a broken one left is hashed and kept, the rest is read and hashed as it comes."""

import errno
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.storage import Block, Item, blocks
from manycpu.pipeline.transfer.manifest import File, Manifest, Progress, TransferError

__all__ = ["Source", "Wanted", "copy"]

Wanted = tuple[Item, int]
"""A file, and the byte to read it from."""


_WRITE_BEHIND = 32 << 20  # bytes that may wait for the disk


class Source(Protocol):
    """What can be copied: a location, or the other end of a stream."""

    def items(self) -> list[Item]:
        """List every file."""

    def read(self, wanted: Sequence[Wanted]) -> Iterator[Iterator[Block]]:
        """Read each file from its byte on; each is read to its end before the next is asked for."""


def copy(source: Source, partial: Path, progress: Progress) -> Manifest:
    """Copy a source to a folder that may hold the beginning of it.

    Raises:
        TransferError: A file is not what was listed.
    """
    items = source.items()
    tally = _Tally(progress, sum(item.size for item in items))
    with _Journal(partial) as journal:
        wanted = journal.take_up(items)
        _see_room(partial, sum(item.size - kept for item, kept in wanted))
        files = [
            _copy_file(journal.begin(item), item, kept, rest, tally)
            for (item, kept), rest in zip(wanted, source.read(wanted), strict=True)
        ]
    return Manifest(files=tuple(files))


def _see_room(folder: Path, needed: int) -> None:
    """Refuse in time what cannot fit."""
    free = disk.free(folder)
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed} bytes are needed, {free} are free", str(folder))


class _Tally:
    """Bytes done, told as they come."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)


def _copy_file(path: Path, item: Item, kept: int, rest: Iterator[Block], tally: _Tally) -> File:
    """Copy one file; the first ``kept`` bytes are there, and are hashed like the others."""
    digest, size = hashlib.sha256(), 0
    with path.open("r+b" if kept else "wb") as file:
        for there in blocks(file) if kept else ():
            digest.update(there)
            size += len(there)
            tally.add(len(there))
        begun = size
        for block in rest:
            digest.update(block)
            file.write(block)
            size += len(block)
            tally.add(len(block))
            if size - begun >= _WRITE_BEHIND:
                disk.start_writing(file, begun, size - begun)
                begun = size
    copied = File(path=item.path, size=size, sha256=digest.hexdigest())
    if fault := _fault(item, copied):
        path.unlink()
        raise TransferError(f"{item.path} {fault}")
    return copied


def _fault(item: Item, copied: File) -> str | None:
    if copied.size != item.size:
        return f"had {item.size} bytes when it was listed and {copied.size} when it was copied"
    if item.sha256 not in (None, copied.sha256):
        return f"had sha256 {item.sha256} when it was listed and {copied.sha256} when it was copied"
    return None


class _Journal:
    """Which version of each file a partial copy holds, written before the file's first byte."""

    def __init__(self, partial: Path) -> None:
        partial.mkdir(parents=True, exist_ok=True)
        self._folder, self._path = partial, partial / ".journal"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._known = set(lines)
        self._made = {partial}

    def __enter__(self) -> Self:
        self._file = self._path.open("a", buffering=1)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None:
            self._path.unlink()

    def take_up(self, items: Sequence[Item]) -> list[Wanted]:
        """Find how much of each file is there; what is not of these versions is deleted."""
        there = {path: path.stat().st_size for path in self._folder.rglob("*") if path.is_file()}
        wanted = []
        for item in items:
            kept = there.get(self._folder / item.path, 0)
            if self._line(item) in self._known and kept <= item.size:
                there.pop(self._folder / item.path, None)
                wanted.append((item, kept))
            else:
                wanted.append((item, 0))
        for path in there:
            if path != self._path:
                path.unlink()
        return wanted

    def begin(self, item: Item) -> Path:
        """Note that a file's bytes are about to come; where they go."""
        line = self._line(item)
        if line not in self._known:
            self._file.write(line + "\n")
        path = self._folder / item.path
        if path.parent not in self._made:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._made.add(path.parent)
        return path

    @staticmethod
    def _line(item: Item) -> str:
        return json.dumps([item.path, item.size, item.version])
