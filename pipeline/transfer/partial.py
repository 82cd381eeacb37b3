"""Copy into a partial folder: resume what a broken copy left, and read back what is written."""

import errno
import hashlib
import json
import os
import re
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.listing import Item, Rows
from manycpu.pipeline.adapters.storage import Block, Location, Reading, open_file
from manycpu.pipeline.transfer.manifest import DIGITS, File, Manifest, Progress, Tick, TransferError, verify

__all__ = ["Copied", "Journal", "Source", "TakenOverError", "copy", "drop"]

_STRETCH: Final = 8 << 20  # bytes that may wait for the disk, and to be read back
_BLOCK: Final = 1 << 18  # bytes that are read back at once: what a core's cache holds
_LARGE: Final = 1 << 20  # bytes from which on a file is worth trying to be cloned
_TOKEN: Final = 8  # digits
_PLAIN, _EXECUTABLE = 0o666, 0o777  # less the umask
_JOURNAL: Final = "~manycpu.journal"  # after most names: what is no part of a copy is deleted in their order


class TakenOverError(TransferError):
    """Another process has taken over this copy, whose owner had given no sign of life for a while."""


class _DamagedError(Exception):
    """What a broken copy had left is not what it should be."""


class Copied(NamedTuple):
    """A complete copy that is still to be renamed."""

    partial: Path
    manifest: Manifest


class Source(Protocol):
    """What can be copied: a location, a folder that is hashed as it is read, or the other end of a stream."""

    @property
    def tells_sha256(self) -> bool:
        """Whether its readings tell what a file should be, also of a part that is there already."""

    def items(self) -> Rows[Item]:
        """List every file."""

    def read(self, items: Rows[Item], starts: Sequence[int]) -> Iterator[Reading]:
        """Read each file from its byte on; each is read to its end before the next is asked for."""


class Journal:
    """A line for each stretch of a file that was copied, in a file beside them that goes where they go.

    After a crash a file may have its length, and holes: it is gone on with after what still is what was
    copied. So nothing has to be on the disk before its line is.

    Args:
        folder: The partial folder.
        items: The files that are copied.
    """

    def __init__(self, folder: Path, items: Iterable[Item]) -> None:
        self._copy = Location.of(f"file://{folder}", "run.data")
        self._path = folder / _journal_name(items)
        self._copied = _read_journal(self._path)
        self._file = self._path.open("a", buffering=1)

    def __enter__(self) -> Self:
        self._file.write("\n")  # the last line may be half of one
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self._file.close()
        if failed is None:
            self._path.unlink(missing_ok=True)

    def note(self, path: str, size: int, sha256: str) -> None:
        """Write down the sha256 of a file's first bytes, or of all of them."""
        self._file.write(json.dumps([path, size, sha256]) + "\n")

    def start(self, item: Item, tick: Tick) -> int:
        """Return how many bytes of a file that is there are what was copied: they are read."""
        size, sha256 = self._copied.get(item.path, (0, ""))
        return size if size and self._copy.hashed(item, size, tick) == (size, sha256) else 0


def _journal_name(items: Iterable[Item]) -> str:
    """Find a name that none of the files has, and no folder of theirs."""
    taken = {top for item in items if (top := item.path.split("/", 1)[0]).endswith(_JOURNAL)}
    name = _JOURNAL
    while name in taken:
        name = f"~{name}"
    return name


def _read_journal(path: Path) -> dict[str, tuple[int, str]]:
    if not path.exists():
        return {}
    copied: dict[str, tuple[int, str]] = {}
    with path.open(errors="replace") as lines:
        for line in lines:
            with suppress(ValueError, TypeError):  # half a line, or what a crash left in its place
                name, size, sha256 = json.loads(line)
                copied[name] = int(size), sha256
    return copied


def copy(source: Source, stem: Path, progress: Progress, tick: Tick) -> Copied:
    """Copy a source to a partial folder of this call's own; the manifest is of what is on disk then.

    The folder is called ``<stem>.<digest of the list of files>.<token>.partial``. What a broken copy of the
    same files left becomes this one's by a rename, which succeeds for only one. Whoever was at it, and was
    only slow, finds it gone; in case it still wrote meanwhile, all is then read once more at the end.

    Raises:
        TransferError: A file reads back otherwise than the source tells, or has another size than was listed.
        TakenOverError: Somebody else took the folder over.
    """
    items = source.items()
    partial = stem.with_name(f"{stem.name}.{items.digest[:DIGITS]}.{uuid.uuid4().hex[:_TOKEN]}.partial")
    adopted = _claim(stem, partial, tick)
    tally = _Tally(progress, tick, sum(item.size for item in items))
    try:
        with nullcontext() if source.tells_sha256 else Journal(partial, items) as journal:
            manifest = _fill(partial, source, items, journal, tally)
            if adopted:
                _see_whole(partial, manifest, tick)
    except _DamagedError as error:
        with suppress(FileNotFoundError):
            disk.remove(str(partial), tick)  # all of it: other files may be as damaged
        raise TransferError(f"what a broken copy had left is damaged: {error}; it was deleted") from error
    except FileNotFoundError as error:
        if partial.exists():
            raise
        raise TakenOverError("somebody else goes on with this copy") from error
    return Copied(partial, manifest)


def _see_whole(partial: Path, manifest: Manifest, tick: Tick) -> None:
    if fault := verify(partial, manifest, None, tick).fault:
        raise _DamagedError(fault)


def drop(stem: Path, *but: str, tick: Tick = lambda: None) -> None:
    """Delete partial folders, except those whose names begin with one of ``but``."""
    for broken in _broken_copies(stem):
        if not broken.name.startswith(but or "\0"):
            with suppress(OSError):
                disk.remove(str(broken), tick)


def _broken_copies(stem: Path) -> list[Path]:
    name = re.compile(rf"{re.escape(stem.name)}(\.[0-9a-f]{{{DIGITS}}}\.[0-9a-f]{{{_TOKEN}}})?\.partial")
    return [path for path in stem.parent.iterdir() if name.fullmatch(path.name)]


def _claim(stem: Path, partial: Path, tick: Tick) -> bool:
    """Claim the partial folder; True where it is adopted from a broken copy of the same files."""
    same = partial.name.removesuffix(partial.suffixes[-2] + ".partial")
    drop(stem, f"{same}.", tick=tick)
    for broken in _broken_copies(stem):
        with suppress(FileNotFoundError):
            if partial.exists():
                disk.remove(str(broken), tick)
            else:
                broken.rename(partial)
    if partial.exists():
        return True
    partial.mkdir()
    return False


def _fill(
    partial: Path, source: Source, items: Rows[Item], journal: Journal | None, tally: "_Tally"
) -> Manifest:
    starts = _starts(partial, items, journal, tally.tick)
    _check_room(partial, sum(item.size - start for item, start in zip(items, starts, strict=True)))
    files, last = Rows(File), ""
    for item, start, reading in zip(items, starts, source.read(items, starts), strict=True):
        if (folder := item.path.rpartition("/")[0]) != last:
            _make_folders(partial, folder)
            last = folder
        files.append(_copy_file(partial, item, start, reading, journal, tally))
    return Manifest(files)


def _make_folders(partial: Path, folder: str) -> None:
    """Make a folder and its parents, but not the partial folder itself: another may have taken it over."""
    parts = folder.split("/")
    for end in range(1, len(parts) + 1):
        with suppress(FileExistsError):
            os.mkdir(f"{partial}/{'/'.join(parts[:end])}")  # noqa: PTH102 - one for each of many


def _starts(partial: Path, items: Rows[Item], journal: Journal | None, tick: Tick) -> "array[int]":
    """Count how many bytes of each file are there; a file that cannot be gone on with is deleted."""
    starts = array("q", bytes(8 * len(items)))
    if not any(partial.iterdir()):
        return starts
    for number, item in enumerate(items):
        tick()
        path = Path(partial, item.path)
        if item.is_folder or not path.is_file():
            continue
        size = path.stat().st_size
        if size > item.size:
            path.unlink()
        else:
            starts[number] = journal.start(item, tick) if journal else size
            os.truncate(path, starts[number])
    return starts


def _check_room(folder: Path, needed: int) -> None:
    """Raise before anything is copied if the disk has too little room."""
    free = disk.free(folder)
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed} bytes are needed, {free} are free", str(folder))


class _Tally:
    """Counts the bytes copied, and reports progress."""

    def __init__(self, progress: Progress, tick: Tick, total: int) -> None:
        self.tick = tick
        self._progress, self._total, self._done = progress, total, 0

    def add(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)


def _copy_file(  # noqa: PLR0913, PLR0917 - each is of another type
    partial: Path, item: Item, start: int, reading: Reading, journal: Journal | None, tally: _Tally
) -> File:
    """Copy one file, of which the first ``start`` bytes are there; nothing is truncated."""
    path = f"{partial}/{item.path}"
    tally.add(start)
    if item.is_folder:
        copied = File(item.path, sum(map(len, reading.blocks)), hashlib.sha256().hexdigest())
    else:
        with FileIO(path, "r+", opener=_opener(item)) as file:
            copy = _Copy(file, start, tally.tick)
            is_large = not start and item.size >= _LARGE
            is_cloned = is_large and reading.path is not None and copy.clone(reading.path)
            for block in [] if is_cloned else reading.blocks:
                if copy.write(block) and journal:
                    journal.note(item.path, copy.hashed, copy.digest.hexdigest())
                tally.add(len(block))
            if is_cloned:
                tally.add(item.size)
            copied = File(item.path, copy.read_back(), copy.digest.hexdigest(), item.executable)
    if journal and start < copied.size:
        journal.note(item.path, copied.size, copied.sha256)
    if fault := _fault(item, copied, reading.sha256()):
        Path(path).unlink()
        raise (_DamagedError if start else TransferError)(f"{item.path} {fault}")
    return copied


def _opener(item: Item) -> Callable[[str, int], int]:
    mode = _EXECUTABLE if item.executable else _PLAIN
    return lambda path, flags: os.open(path, flags | os.O_CREAT, mode)


class _Copy:
    """A file that is written and read back: its digest is of what is on disk."""

    def __init__(self, file: FileIO, start: int, tick: Tick) -> None:
        self.digest, self.hashed = hashlib.sha256(), 0
        self._file, self._size, self._tick = file, start, tick
        file.seek(start)

    def clone(self, path: str) -> bool:
        """Have the file share the blocks of one of this disk, where the file system can; whether it does."""
        with open_file(path) as source:
            if not disk.clone(source.fileno(), self._file.fileno()):
                return False
            self._size = os.fstat(self._file.fileno()).st_size
            return True

    def write(self, block: Block) -> bool:
        """Write a block; whether a stretch is full, so that it was hashed."""
        self._size += len(block)
        while (written := self._file.write(block)) < len(block):
            block = memoryview(block)[written:]
        if self._size - self.hashed < _STRETCH:
            return False
        disk.start_writing(self._file.fileno(), self.hashed, self._size - self.hashed)
        self.read_back()
        return True

    def read_back(self) -> int:
        """Hash what was written since the last call; returns the length of the file."""
        self._file.seek(self.hashed)
        buffer = memoryview(bytearray(min(_BLOCK, self._size - self.hashed + 1)))
        while count := self._file.readinto(buffer):
            self._tick()
            self.digest.update(buffer[:count])
            self.hashed += count
        return self.hashed


def _fault(item: Item, copied: File, sha256: str) -> str | None:
    if copied.size != item.size:
        return f"had {item.size} bytes when it was listed and {copied.size} when it was copied"
    if sha256 not in ("", copied.sha256):
        return f"had sha256 {sha256} where it was read, and the copy has {copied.sha256}"
    return None
