"""A copy on its way: what a broken one left is kept, the rest is written as it comes, all is read back."""

import errno
import hashlib
import json
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Final, Protocol

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.storage import Block, Item, Reading
from manycpu.pipeline.transfer.manifest import File, Manifest, Progress, TransferError

__all__ = ["Source", "Wanted", "copy"]

Wanted = tuple[Item, int]
"""A file, and the byte to read it from."""

_STRETCH: Final = 8 << 20  # bytes that may wait for the disk, and to be read back
_BLOCK: Final = 1 << 18  # bytes that are read back at once: what a core's cache holds
_JOURNAL: Final = ".journal"


class Source(Protocol):
    """What can be copied: a location, a folder that is hashed as it is read, or the other end of a stream."""

    def items(self) -> list[Item]:
        """List every file."""

    def read(self, wanted: Sequence[Wanted]) -> Iterator[Reading]:
        """Read each file from its byte on; each is read to its end before the next is asked for."""


def copy(source: Source, partial: Path, progress: Progress) -> Manifest:
    """Copy a source to a folder that may hold the beginning of it; the manifest is of what is on disk then.

    Raises:
        TransferError: A file reads back otherwise than the source tells, or has another size than was listed.
    """
    items = source.items()
    tally = _Tally(progress, sum(item.size for item in items))
    wanted = _take_up(partial, items)
    _see_room(partial, sum(item.size - kept for item, kept in wanted))
    places = _places(partial, items)
    files = [
        _copy_file(place, item, kept, reading, tally)
        for place, (item, kept), reading in zip(places, wanted, source.read(wanted), strict=True)
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


def _copy_file(path: str, item: Item, kept: int, reading: Reading, tally: _Tally) -> File:
    """Copy one file, of which the first ``kept`` bytes are there."""
    tally.add(kept)
    with FileIO(path, "r+" if kept else "w+") as file:
        copy = _Copy(file, kept)
        for block in reading.blocks:
            copy.write(block)
            tally.add(len(block))
        copied = File(path=item.path, size=copy.read_back(), sha256=copy.digest.hexdigest())
    if fault := _fault(item, copied, reading.sha256()):
        Path(path).unlink()
        raise TransferError(f"{item.path} {fault}")
    return copied


class _Copy:
    """A file that is written, and read back beside that: what counts is what is there, not what came."""

    def __init__(self, file: FileIO, kept: int) -> None:
        self.digest = hashlib.sha256()
        self._file, self._size, self._seen = file, kept, 0
        file.seek(kept)

    def write(self, block: Block) -> None:
        self._size += len(block)
        while (written := self._file.write(block)) < len(block):
            block = memoryview(block)[written:]
        if self._size - self._seen >= _STRETCH:
            disk.start_writing(self._file.fileno(), self._seen, self._size - self._seen)
            self.read_back()

    def read_back(self) -> int:
        """Hash what was not hashed yet, to the end of the file; how long it is."""
        self._file.seek(self._seen)
        buffer = memoryview(bytearray(min(_BLOCK, self._size - self._seen + 1)))
        while count := self._file.readinto(buffer):
            self.digest.update(buffer[:count])
            self._seen += count
        return self._seen


def _fault(item: Item, copied: File, told: str) -> str | None:
    if copied.size != item.size:
        return f"had {item.size} bytes when it was listed and {copied.size} when it was copied"
    if told not in ("", copied.sha256):
        return f"had sha256 {told} where it was read, and the copy has {copied.sha256}"
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
