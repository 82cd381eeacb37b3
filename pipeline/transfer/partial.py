"""A copy on its way: what a broken one left is hashed and kept, the rest is read and hashed as it comes."""

import errno
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.storage import Block, Item, blocks
from manycpu.pipeline.transfer.manifest import File, Manifest, Progress, TransferError

__all__ = ["Source", "Wanted", "copy"]

Wanted = tuple[Item, int]
"""A file, and the byte to read it from."""

_WRITE_BEHIND = 32 << 20  # bytes that may wait for the disk
_JOURNAL = ".journal"


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
    wanted = _take_up(partial, items)
    _see_room(partial, sum(item.size - kept for item, kept in wanted))
    places = _places(partial, items)
    files = [
        _copy_file(place, item, kept, rest, tally)
        for place, (item, kept), rest in zip(places, wanted, source.read(wanted), strict=True)
    ]
    (partial / _JOURNAL).unlink()
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


def _copy_file(path: str, item: Item, kept: int, rest: Iterator[Block], tally: _Tally) -> File:
    """Copy one file; the first ``kept`` bytes are there, and are hashed like the others."""
    digest, size = hashlib.sha256(), 0
    with open(path, "r+b" if kept else "wb") as file:  # noqa: PTH123 - one of very many
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
        Path(path).unlink()
        raise TransferError(f"{item.path} {fault}")
    return copied


def _fault(item: Item, copied: File) -> str | None:
    if copied.size != item.size:
        return f"had {item.size} bytes when it was listed and {copied.size} when it was copied"
    if item.sha256 not in (None, copied.sha256):
        return f"had sha256 {item.sha256} when it was listed and {copied.sha256} when it was copied"
    return None


def _take_up(folder: Path, items: Sequence[Item]) -> list[Wanted]:
    """Find how much of each file is there; what is not of these versions is deleted.

    The journal says of which version each file is, or will be, before the first byte of it is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / _JOURNAL
    known = set(journal.read_text().splitlines()) if journal.exists() else set()
    there = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    lines = [json.dumps([item.path, item.size, item.version]) for item in items]
    wanted = []
    for item, line in zip(items, lines, strict=True):
        found = there.get(item.path) if line in known else None
        kept = found.stat().st_size if found else 0
        if found and kept <= item.size:
            del there[item.path]
        wanted.append((item, kept if kept <= item.size else 0))
    there.pop(_JOURNAL, None)
    for path in there.values():
        path.unlink()
    anew = folder / f"{_JOURNAL}.new"
    anew.write_text("".join(f"{line}\n" for line in lines))
    anew.replace(journal)
    return wanted


def _places(folder: Path, items: Sequence[Item]) -> list[str]:
    """Say where each file goes, and make the folders."""
    places = [f"{folder}/{item.path}" for item in items]
    for parent in {place.rpartition("/")[0] for place in places}:
        Path(parent).mkdir(parents=True, exist_ok=True)
    return places
