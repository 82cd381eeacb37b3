"""The manifest of a folder, every file with its size and sha256: read, write, hash and verify it."""

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from manycpu.pipeline.adapters.listing import Item, Rows, below, item_of, leads_out
from manycpu.pipeline.adapters.storage import Block, Location, Reading, blocks
from manycpu.pipeline.spec.credentials import redacted

DIGITS = 16
"""Digits of a digest in the name of a folder."""
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""
Tick = Callable[[], None]
"""Called during the work, also while no bytes are copied."""
_BEGIN, _END = '{"files": [', "]"


class TransferError(Exception):
    """A copy differs from its source."""


class File(NamedTuple):
    """One file of a manifest: path relative to its root, size in bytes, sha256 in hexadecimal.

    A path that ends with a slash is an empty folder.
    """

    path: str
    size: int
    sha256: str
    executable: bool = False

    def described(self) -> dict[str, Any]:
        """Return the fields for JSON; ``executable`` only if it is true."""
        fields = self._asdict()
        return fields if self.executable else {name: fields[name] for name in ("path", "size", "sha256")}


class Manifest:
    """The files of a folder, in about a hundred bytes each: a folder may have a million.

    Args:
        files: Its files, by path.
    """

    def __init__(self, files: Iterable[File] = ()) -> None:
        self.files: Rows[File] = files if isinstance(files, Rows) else Rows(File, files)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Manifest) and self.files == other.files

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @cached_property
    def digest(self) -> str:
        """The sha256 of the paths and digests: equal if and only if the contents are equal."""
        digest = hashlib.sha256()
        for file in self.files:
            # The format of sha256sum; its mark for binary files marks executable ones.
            path = file.path.replace("\\", r"\\").replace("\n", r"\n")
            mark = "" if path == file.path else "\\"
            line = f"{mark}{file.sha256} {'*' if file.executable else ' '}{path}\n"
            digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def lines(self, run: str | None = None) -> Iterator[str]:
        """Serialise as JSON, a file on each line, and at the end the key of the run that wrote it."""
        return write_lines((file.described() for file in self.files), run)

    @classmethod
    def parse(cls, text: str) -> tuple["Manifest", str | None]:
        """Parse a text that :meth:`lines` wrote; returns the manifest, and the key of its run.

        Raises:
            ValueError: It is no manifest, or is cut off.
        """
        read = _whole(text)
        return cls(file_of(fields) for fields in read["files"]), read.get("run")

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Parse a file that :meth:`lines` wrote.

        Raises:
            ValueError: It is no manifest, or is cut off.
            FileNotFoundError: There is none.
        """
        return cls(file_of(fields) for fields in read_lines(path))


def file_of(fields: dict[str, Any]) -> File:
    """Make a file from its JSON fields.

    Raises:
        ValueError: A field is missing or has a wrong type, or the path leads out of the folder.
    """
    try:
        path, size, sha256 = fields["path"], fields["size"], fields["sha256"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{fields!r} is no file of a manifest") from error
    if not (isinstance(path, str) and isinstance(size, int) and isinstance(sha256, str)):
        raise ValueError(f"{fields!r} is no file of a manifest")  # noqa: TRY004 - of what was read
    if leads_out(path):
        raise ValueError(f"{path!r} leads out of its folder")
    return File(path, size, sha256, bool(fields.get("executable")))


def write_lines(files: Iterable[dict[str, Any]], run: str | None = None) -> Iterator[str]:
    """Write the fields of files as JSON, a file on each line: ``{"files": [...], "run": "..."}``."""
    yield _BEGIN
    comma = "\n"
    for fields in files:
        yield comma + json.dumps(fields)
        comma = ",\n"
    signature = f', "run": {json.dumps(run)}' if run else ""
    yield f"\n{_END}{signature}}}\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Parse the fields of files line by line, or all at once if the file has another layout.

    Raises:
        ValueError: It is no list of files, or is cut off.
        FileNotFoundError: There is none.
    """
    with path.open(encoding="utf-8") as file:
        if (first := file.readline()).rstrip("\n") != _BEGIN:
            yield from _whole(first + file.read())["files"]
            return
        for line in file:
            if line.startswith(_END) and line.endswith("}\n"):
                return
            yield json.loads(line.rstrip(",\n"))
    raise ValueError(f"{path} is cut off")


def _whole(text: str) -> dict[str, Any]:
    """Parse a manifest all at once, as earlier versions wrote it."""
    read = json.loads(text)
    if not isinstance(read, dict) or not isinstance(read.get("files"), list):
        raise ValueError("it is no list of files")  # noqa: TRY004 - of what was read
    return read


def scan(source: Location, tick: Tick = lambda: None) -> Manifest:
    """Read and hash every file of a folder."""
    items = source.items(tick)
    return Manifest(File(i.path, i.size, source.sha256(i, tick), i.executable) for i in items)


def identity(source: Location, tick: Tick = lambda: None, copied: Manifest | None = None) -> str:
    """Compute a digest of a source's present content.

    Files on disk are hashed. Behind a URL the server's version of a file counts; without one, it is hashed.

    Args:
        source: The source.
        tick: Called during the work.
        copied: The manifest of its copy: then files that were read for the copy are not read again.

    Raises:
        FileNotFoundError: There is nothing behind the URL, or it cannot be reached.
    """
    if source.local is not None:
        return (copied or scan(source, tick)).digest
    items = source.items()
    hashes = None if copied is None else (file.sha256 for file in copied.files)
    if not any(item.size for item in items):
        raise FileNotFoundError(f"there is nothing at {redacted(source.url)}, or it cannot be reached")
    digest = hashlib.sha256(f"{source.url}\n[".encode())
    for number, item in enumerate(items):
        known = "" if hashes is None else next(hashes, "none")  # the copy has fewer files: the digest differs
        version = item.version or known or source.sha256(item, tick)
        described = json.dumps([item.path, item.size, version])
        digest.update(f"{', ' if number else ''}{described}".encode())
    digest.update(b"]")
    return digest.hexdigest()


class Hashing:
    """A folder on disk as a source that hashes each file while it reads it, once and whole.

    If the other end has the beginning of a file already, that part is read and hashed, and not yielded.

    Args:
        folder: The folder.
        tick: Called while it is listed and read, also while nothing is yielded.
    """

    tells_sha256 = True

    def __init__(self, folder: Location, tick: Tick = lambda: None) -> None:
        self._folder, self._tick = folder, tick

    def items(self) -> Rows[Item]:
        """List every file; its version is its modification time."""
        return self._folder.items(self._tick)

    def read(self, items: Rows[Item], starts: Sequence[int]) -> Iterator[Reading]:
        """Read each file from its start offset.

        Raises:
            TransferError: A file changed after it was listed.
        """
        for item, start in zip(items, starts, strict=True):
            self._tick()
            digest = hashlib.sha256()
            yield Reading(self._blocks_from(item, start, digest), digest.hexdigest)

    def _blocks_from(self, item: Item, start: int, digest: Any) -> Iterator[Block]:
        if item.is_folder:
            return
        with self._folder.open(item.path) as file:
            for block in blocks(file):
                self._tick()
                digest.update(block)
                if not start:
                    yield block
                    continue
                rest = memoryview(block)[start:]
                start -= len(block) - len(rest)
                if rest:
                    yield rest
            if item_of(item.path, os.fstat(file.fileno())) != item:
                raise TransferError(f"{item.path} was written to after it had been listed")


class Verdict(NamedTuple):
    """The result of a verification."""

    fault: str | None
    """The first file that is missing or changed, with the reason; None: all files match."""
    read: int
    """How many files were read for that."""


def verify(
    folder: Path, manifest: Manifest, written: "array[int] | None", tick: Tick, *, keep: bool = False
) -> Verdict:
    """Compare a folder with its manifest by size and modification time, and by content if these differ.

    Files that the manifest does not name, also links, are deleted: they were not copied.

    Args:
        folder: The folder, which has no links of its own.
        manifest: The expected files.
        written: Modification time of each file in nanoseconds; None: unknown, so all files are read.
        tick: Called during the work.
        keep: Whether files that the manifest does not name are a fault, and are kept.
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
        if Location.of(f"file://{folder}", "run.data").sha256(item, tick) != file.sha256:
            return Verdict(f"{file.path!r} has other content", read)
    walk.up_to(None)
    return Verdict(f"{walk.unlisted[0]!r} is none of it" if walk.unlisted else None, read)


class _Walk:
    """Walks the files of a folder by path; files that the caller skips are deleted, or listed."""

    def __init__(self, folder: Path, *, keep: bool) -> None:
        self._folder, self._keep = folder, keep
        self.unlisted: list[str] = []
        self._rest: Iterator[Item] = below(str(folder), lambda path, _: self._delete(path), follow=False)
        self._next = next(self._rest, None)

    def up_to(self, path: str | None) -> Item | None:
        """Advance to a path, or to the end; None: there is no such file."""
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
