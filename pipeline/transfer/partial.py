"""Copy into a partial folder: resume what a broken copy left, and read back what is written."""

import errno
import hashlib
import json
import os
import re
import uuid
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.listing import Item, OddFileError, Rows
from manycpu.pipeline.adapters.storage import Block, Location, Reading, open_file
from manycpu.pipeline.transfer.manifest import DIGITS, File, Manifest, Progress, Tick, TransferError, verify

_STRETCH: Final = 8 << 20  # bytes between two times that the written part is read back
_BLOCK_BYTES: Final = 1 << 18  # read back at once: fits into a core's cache
_LARGE_BYTES: Final = 1 << 20  # a file of this size is worth a try to clone it
_TOKEN_DIGITS: Final = 8
_MODE, _EXECUTABLE_MODE = 0o666, 0o777  # less the umask
# Sorts after most names: files that are no part of the copy are deleted in this order.
_JOURNAL: Final = "~manycpu.journal"


class TakenOverError(TransferError):
    """Another process has taken over this copy, because this one gave no sign of life for a while."""


class _DamagedError(Exception):
    """The files that a broken copy left differ from the source."""


class Copied(NamedTuple):
    """A complete copy in a partial folder, which the caller renames, and its manifest."""

    partial: Path
    manifest: Manifest


class Source(Protocol):
    """A source of files: a location, a folder that is hashed as it is read, or the other end of a stream."""

    @property
    def tells_sha256(self) -> bool:
        """Whether :meth:`read` gives the sha256 of the whole file, even if it starts in the middle."""

    def items(self) -> Rows[Item]:
        """List every file."""

    def read(self, items: Rows[Item], starts: Sequence[int]) -> Iterator[Reading]:
        """Yield each file, to be read from its start offset.

        The caller reads all blocks of a file before it takes the next file.
        """


class Journal:
    """Records how much of each file was copied, so that a copy from a source without sha256 can resume.

    The journal is a file in the partial folder. Each line has a path, a number of bytes, and the sha256 of
    that many first bytes. After a crash a file may have its full length, and holes. So the copy resumes after
    the part whose sha256 still matches. A line may thus reach the disk before the bytes that it describes.
    """

    def __init__(self, folder: Path, items: Iterable[Item]) -> None:
        self._copy = Location.of(f"file://{folder}", field="run.data")
        self._path = folder / _journal_name(items)
        self._copied = _read_journal(self._path)
        self._file = self._path.open("a", buffering=1)  # each line is written at once, for after a kill

    def __enter__(self) -> Self:
        self._file.write("\n")  # the last line may be cut off
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        """Close the journal; delete it after a success, and keep it for the next try after an error."""
        self._file.close()
        if failed is None:
            self._path.unlink(missing_ok=True)

    def record(self, path: str, size: int, sha256: str) -> None:
        """Record the sha256 of a file's first ``size`` bytes."""
        self._file.write(json.dumps([path, size, sha256]) + "\n")

    def bytes_to_keep(self, item: Item, tick: Tick) -> int:
        """Return how many bytes of a broken copy to keep: those recorded, if they still have that sha256."""
        size, sha256 = self._copied.get(item.path, (0, ""))
        if size and self._copy.hashed(item, size, tick) == (size, sha256):
            return size
        return 0


def _journal_name(items: Iterable[Item]) -> str:
    """Return a name for the journal that no file or folder to copy has: ``~`` are added until it is free."""
    top_names = (item.path.split("/", 1)[0] for item in items)
    taken = {top for top in top_names if top.endswith(_JOURNAL)}
    name = _JOURNAL
    while name in taken:
        name = f"~{name}"
    return name


def _read_journal(path: Path) -> dict[str, tuple[int, str]]:
    """Return the last record of each file: path -> number of bytes, sha256 of these bytes."""
    if not path.exists():
        return {}
    copied: dict[str, tuple[int, str]] = {}
    with path.open(errors="replace") as lines:
        for line in lines:
            with suppress(ValueError, TypeError):  # a line that is cut off, or damaged by a crash
                name, size, sha256 = json.loads(line)
                copied[name] = int(size), sha256
    return copied


def copy(source: Source, stem: Path, progress: Progress, tick: Tick) -> Copied:
    """Copy a source to a partial folder that only this call uses, and resume a broken copy of the same files.

    The folder's name is ``<stem>.<digest of the list of files>.<token>.partial``. A broken copy is adopted by
    a rename, which succeeds for only one process. If the earlier process still runs, it finds its folder
    gone. Until then it may have written to files there, so an adopted folder is read again at the end.

    Returns:
        The folder, and the manifest of the files that are now on disk.

    Raises:
        TransferError: A file differs from its source, or its size from the list of files.
        TakenOverError: Another process took the folder over.
        OSError: The disk has no room for all of it, or the source cannot be read.
    """
    items = source.items()
    partial = stem.with_name(
        f"{stem.name}.{items.digest[:DIGITS]}.{uuid.uuid4().hex[:_TOKEN_DIGITS]}.partial"
    )
    is_adopted = _adopt_or_make(stem, partial, tick)
    tally = _Tally(progress, tick, sum(item.size for item in items))
    try:
        # A source that tells the sha256 needs no journal: the whole file is compared with it at the end.
        with nullcontext() if source.tells_sha256 else Journal(partial, items) as journal:
            manifest = _fill(partial, source, items, journal, tally)
            fault = verify(partial, manifest, mtimes_ns=None, tick=tick).fault if is_adopted else None
            if fault:
                raise _DamagedError(fault)  # noqa: TRY301 - handled as damage that is found earlier
    except _DamagedError as error:
        with suppress(FileNotFoundError):
            disk.remove(str(partial), tick)  # all of it: other files may be damaged too
        raise TransferError(f"what a broken copy had left is damaged: {error}; it was deleted") from error
    except FileNotFoundError as error:
        if partial.exists():
            raise
        raise TakenOverError("another process has taken this copy over") from error
    return Copied(partial, manifest)


def delete_broken_copies(stem: Path, *, except_prefix: str | None = None, tick: Tick = lambda: None) -> None:
    """Delete the partial folders of a destination, except those whose names begin with ``except_prefix``.

    A folder that cannot be deleted is left.
    """
    for broken in broken_copies(stem):
        if except_prefix is None or not broken.name.startswith(except_prefix):
            with suppress(OSError):
                disk.remove(str(broken), tick)


def broken_copies(stem: Path) -> list[Path]:
    """List the partial folders of a destination, also those of earlier versions, without digest and token."""
    name = re.compile(
        rf"{re.escape(stem.name)}(\.[0-9a-f]{{{DIGITS}}}\.[0-9a-f]{{{_TOKEN_DIGITS}}})?\.partial"
    )
    return [path for path in stem.parent.iterdir() if name.fullmatch(path.name)]


def _adopt_or_make(stem: Path, partial: Path, tick: Tick) -> bool:
    """Rename a broken copy of the same files to ``partial``, and return True.

    If there is none, make an empty folder, and return False. All other broken copies of this destination are
    deleted.
    """
    token = partial.suffixes[-2]  # with its dot
    name_without_token = partial.name.removesuffix(f"{token}.partial")
    # The rest of the name says which list of files was copied: no other list can be resumed.
    delete_broken_copies(stem, except_prefix=f"{name_without_token}.", tick=tick)
    for broken in broken_copies(stem):
        with suppress(FileNotFoundError):  # another process was faster
            if partial.exists():  # one is adopted: the others of the same files are of no use
                disk.remove(str(broken), tick)
            else:
                broken.rename(partial)
    is_adopted = partial.exists()
    if not is_adopted:
        partial.mkdir()
    return is_adopted


def _fill(
    partial: Path, source: Source, items: Rows[Item], journal: Journal | None, tally: "_Tally"
) -> Manifest:
    """Copy what is missing of each file; return the manifest of the files that are now in the partial folder.

    Raises:
        OSError: The disk has no room for all of it.
    """
    starts = _keep_good_parts(partial, items, journal, tally.tick)
    needed = sum(item.size - start for item, start in zip(items, starts, strict=True))
    free = disk.free(partial)
    if needed > free:
        raise OSError(errno.ENOSPC, f"{needed} bytes are needed, {free} are free", str(partial))
    files = Rows(File)
    last_folder = ""
    for item, start, reading in zip(items, starts, source.read(items, starts), strict=True):
        folder = item.path.rpartition("/")[0]
        if folder != last_folder:  # not once more for each file of a folder
            _make_folders(partial, folder)
            last_folder = folder
        files.append(_copy_file(partial, item, start, reading, journal, tally))
    return Manifest(files)


def _make_folders(partial: Path, folder: str) -> None:
    """Make a folder and its parents, but not the partial folder itself, which may have been taken over."""
    parts = folder.split("/") if folder else []  # empty: the partial folder itself
    for end in range(1, len(parts) + 1):
        path = "/".join(parts[:end])
        try:
            os.mkdir(f"{partial}/{path}")  # noqa: PTH102 - one for each of many
        except FileExistsError:
            if not Path(partial, path).is_dir():
                raise OddFileError(f"{path!r} is both a file and a folder") from None


def _keep_good_parts(partial: Path, items: Rows[Item], journal: Journal | None, tick: Tick) -> "array[int]":
    """Truncate each file of a broken copy to the part that can be kept; return how many bytes each part has.

    Without a journal all bytes are kept: the source's sha256 shows at the end whether they are right. A file
    that is longer than its source is deleted.
    """
    starts = array("q", bytes(8 * len(items)))  # a zero for each file
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
            starts[number] = journal.bytes_to_keep(item, tick) if journal else size
            os.truncate(path, starts[number])
    return starts


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
    """Copy the rest of one file, whose first ``start`` bytes are on disk, and check it.

    Raises:
        TransferError: Its size or sha256 differs from the source's; the file is deleted.
        _DamagedError: The same, but the first bytes are from a broken copy, and may be the reason.
    """
    path = f"{partial}/{item.path}"
    tally.add(start)
    if item.is_folder:  # an empty one: any byte that comes for it is a fault, which is raised below
        copied = File(item.path, sum(map(len, reading.blocks)), hashlib.sha256().hexdigest())
    else:
        mode = _EXECUTABLE_MODE if item.executable else _MODE
        # r+ with O_CREAT: a missing file is made, and an existing one keeps its first bytes.
        with FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, mode)) as file:
            target = _Copy(file, start, tally.tick)
            may_clone = not start and item.size >= _LARGE_BYTES
            if may_clone and reading.path is not None and target.clone(reading.path):
                tally.add(item.size)
            else:
                for block in reading.blocks:
                    has_hashed = target.write(block)
                    if has_hashed and journal:
                        journal.record(item.path, target.hashed, target.digest.hexdigest())
                    tally.add(len(block))
            # read_back() completes the digest, and so comes before it.
            copied = File(item.path, target.read_back(), target.digest.hexdigest(), item.executable)
    if journal and start < copied.size:  # else nothing was added to what the journal has
        journal.record(item.path, copied.size, copied.sha256)
    sha256 = reading.sha256()  # empty: the source does not know it
    fault = ""
    if copied.size != item.size:
        fault = f"had {item.size} bytes when it was listed and {copied.size} when it was copied"
    elif sha256 not in ("", copied.sha256):
        fault = f"had sha256 {sha256} where it was read, and the copy has {copied.sha256}"
    if fault:
        Path(path).unlink()
        kind = _DamagedError if start else TransferError
        raise kind(f"{item.path} {fault}")
    return copied


class _Copy:
    """A file that is written and read back in stretches, so that its sha256 is that of the bytes on disk.

    ``digest`` covers the first ``hashed`` bytes of the file.
    """

    def __init__(self, file: FileIO, start: int, tick: Tick) -> None:
        self.digest, self.hashed = hashlib.sha256(), 0
        self._file, self._size, self._tick = file, start, tick  # _size: the bytes that are in the file
        file.seek(start)

    def clone(self, path: str) -> bool:
        """Share the disk blocks of the file at ``path`` (copy on write); False: the file system cannot."""
        with open_file(path) as source:
            if not disk.clone(source.fileno(), self._file.fileno()):
                return False
            self._size = os.fstat(self._file.fileno()).st_size
            return True

    def write(self, block: Block) -> bool:
        """Write a block; return whether this call has read back and hashed what was written.

        That is done after each 8 MiB.
        """
        self._size += len(block)
        rest = memoryview(block)
        while rest:  # a call may write only a part
            rest = rest[self._file.write(rest) :]
        if self._size - self.hashed < _STRETCH:  # written, and not read back yet
            return False
        disk.start_writing(self._file.fileno(), self.hashed, self._size - self.hashed)
        self.read_back()
        return True

    def read_back(self) -> int:
        """Read back and hash what the digest does not cover yet; returns the file's size in bytes."""
        self._file.seek(self.hashed)
        # At least one byte: an empty buffer would look like the end of the file.
        buffer = memoryview(bytearray(min(_BLOCK_BYTES, self._size - self.hashed + 1)))
        while count := self._file.readinto(buffer):
            self._tick()
            self.digest.update(buffer[:count])
            self.hashed += count
        return self.hashed
