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
"""Called during the work, also while no bytes are copied: the caller shows others that it still works."""
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

    def json_fields(self) -> dict[str, Any]:
        """Return the fields for JSON; ``executable`` only if it is true."""
        fields = self._asdict()
        if not self.executable:
            del fields["executable"]
        return fields


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
        """The sha256 of all paths, digests and executable flags: the same if the folders are the same."""
        digest = hashlib.sha256()
        for file in self.files:
            # The format of sha256sum: a backslash before a line whose path is escaped, and its mark for
            # binary files, which stands for executable ones here.
            path = file.path.replace("\\", r"\\").replace("\n", r"\n")
            backslash = "" if path == file.path else "\\"
            mark = "*" if file.executable else " "
            line = f"{backslash}{file.sha256} {mark}{path}\n"
            digest.update(line.encode(errors="surrogateescape"))
        return digest.hexdigest()

    def lines(self, run: str | None = None) -> Iterator[str]:
        """Yield the JSON text, with a file on each line, and at the end the key of the run that wrote it."""
        return json_lines((file.json_fields() for file in self.files), run)

    @classmethod
    def parse(cls, text: str) -> tuple["Manifest", str | None]:
        """Parse a text that :meth:`lines` wrote; returns the manifest, and the key of its run.

        Raises:
            ValueError: It is no manifest, or is cut off.
        """
        content = _parse_at_once(text)
        return cls(file_of(fields) for fields in content["files"]), content.get("run")

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


def json_lines(files: Iterable[dict[str, Any]], run: str | None = None) -> Iterator[str]:
    """Yield a list of files as JSON text, with a file on each line: ``{"files": [...], "run": "..."}``."""
    yield _BEGIN
    comma = "\n"
    for fields in files:
        yield comma + json.dumps(fields)
        comma = ",\n"
    signature = f', "run": {json.dumps(run)}' if run else ""
    yield f"\n{_END}{signature}}}\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the fields of each file that :func:`json_lines` wrote, parsed line by line to save memory.

    A file with another layout, as earlier versions wrote it, is parsed at once.

    Raises:
        ValueError: It is no list of files, or is cut off.
        FileNotFoundError: There is none.
    """
    with path.open(encoding="utf-8") as file:
        first_line = file.readline()
        if first_line.rstrip("\n") != _BEGIN:
            yield from _parse_at_once(first_line + file.read())["files"]
            return
        for line in file:
            if line.startswith(_END) and line.endswith("}\n"):
                return
            yield json.loads(line.rstrip(",\n"))
    raise ValueError(f"{path} is cut off")


def _parse_at_once(text: str) -> dict[str, Any]:
    """Parse the whole JSON text of a manifest, in any layout.

    Raises:
        ValueError: It is no JSON object with a list named ``files``.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(content.get("files"), list):
        raise ValueError("it is no list of files")  # noqa: TRY004 - of what was read
    return content


def scan(source: Location, tick: Tick = lambda: None) -> Manifest:
    """Read and hash every file of a folder."""
    items = source.items(tick)
    return Manifest(File(item.path, item.size, source.sha256(item, tick), item.executable) for item in items)


def identity(source: Location, tick: Tick = lambda: None, copied: Manifest | None = None) -> str:
    """Compute a digest that changes when the content of a source changes.

    Files on disk are hashed. Behind a URL the server's version of a file, such as its ETag, stands for its
    content; a file without a version is downloaded and hashed.

    Args:
        source: The source.
        tick: Called during the work.
        copied: The manifest of a copy of the source: its hashes are used, and no file is read again. None:
            there is no copy.

    Raises:
        FileNotFoundError: There is nothing behind the URL, or it cannot be reached.
    """
    if source.local is not None:
        return (copied or scan(source, tick)).digest
    items = source.items()
    if not any(item.size for item in items):
        raise FileNotFoundError(f"there is nothing at {redacted(source.url)}, or it cannot be reached")
    digest = hashlib.sha256(f"{source.url}\n[".encode())
    copied_files = iter(() if copied is None else copied.files)
    for number, item in enumerate(items):
        copied_file = next(copied_files, None)
        if item.version:
            version = item.version
        elif copied is None:
            version = source.sha256(item, tick)
        else:  # both lists are in order; "none": the source has got more files since, and its digest changes
            version = copied_file.sha256 if copied_file else "none"
        comma = ", " if number else ""  # what is hashed is the text of a JSON list
        digest.update(f"{comma}{json.dumps([item.path, item.size, version])}".encode())
    digest.update(b"]")
    return digest.hexdigest()


class Hashing:
    """A source on disk (a ``Source``) that hashes each whole file while it reads the file for a copy.

    If the copy has the first part of a file already, this part is only hashed, and not yielded.

    Args:
        folder: The folder.
        tick: Called while the folder is listed and read, also while nothing is yielded.
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
            yield Reading(self._hash_and_yield(item, start, digest), digest.hexdigest)

    def _hash_and_yield(self, item: Item, start: int, digest: Any) -> Iterator[Block]:
        """Hash all blocks of a file, and yield those after the first ``start`` bytes."""
        if item.is_folder:
            return
        to_skip = start
        with self._folder.open(item.path) as file:
            for block in blocks(file):
                self._tick()
                digest.update(block)
                if to_skip >= len(block):
                    to_skip -= len(block)
                else:
                    yield memoryview(block)[to_skip:]
                    to_skip = 0
            if item_of(item.path, os.fstat(file.fileno())) != item:
                raise TransferError(f"{item.path} was written to after it had been listed")


class Verdict(NamedTuple):
    """The result of :func:`verify`."""

    fault: str | None
    """The first file that is missing, changed or not in the manifest, and why; None: the folder matches."""
    files_read: int
    """How many files were hashed, because their modification time is unknown or has changed."""


def verify(
    folder: Path,
    manifest: Manifest,
    mtimes_ns: "array[int] | None",
    tick: Tick,
    *,
    keep_unlisted: bool = False,
) -> Verdict:
    """Compare the files in a folder with its manifest: all sizes, and the content if the mtime differs.

    Files and links that the manifest does not list are deleted, unless ``keep_unlisted``. The comparison ends
    at the first file that differs: what follows that file, by name, is left as it is.

    Args:
        folder: The folder, which has no links of its own.
        manifest: The expected files.
        mtimes_ns: Modification time of each file in nanoseconds; None: unknown, so all files are hashed.
        tick: Called during the work.
        keep_unlisted: Keep files that the manifest does not list, and report them as a fault.
    """
    files_on_disk = _FolderCursor(folder, keep_unlisted=keep_unlisted)
    files_read = 0
    for number, file in enumerate(manifest.files):
        tick()
        item = files_on_disk.advance_to(file.path)  # deletes or notes the unlisted files before it
        if item is None:
            return Verdict(f"{file.path!r} is missing", files_read)
        if item.size != file.size:
            return Verdict(f"{file.path!r} has {item.size} bytes, and had {file.size}", files_read)
        # The version of a file on disk is its modification time.
        is_untouched = mtimes_ns is not None and item.version == str(mtimes_ns[number])
        if item.is_folder or is_untouched:
            continue
        files_read += 1
        if Location.of(f"file://{folder}", field="run.data").sha256(item, tick) != file.sha256:
            return Verdict(f"{file.path!r} has other content", files_read)
    files_on_disk.advance_to(None)  # the unlisted files after the last one of the manifest
    if files_on_disk.unlisted:
        return Verdict(f"{files_on_disk.unlisted[0]!r} is none of it", files_read)
    return Verdict(None, files_read)


class _FolderCursor:
    """A position in the sorted list of a folder's files, for a comparison with a manifest in the same order.

    Files that the position moves past are not in the manifest: they are deleted, or added to ``unlisted``.
    """

    def __init__(self, folder: Path, *, keep_unlisted: bool) -> None:
        self._folder, self._keep_unlisted = folder, keep_unlisted
        self.unlisted: list[str] = []
        # What is neither a file nor a folder, such as a link, is not yielded but passed to `left_out`.
        self._rest: Iterator[Item] = below(
            str(folder), left_out=lambda path, _: self._delete_or_list(path), follow=False
        )
        self._next = next(self._rest, None)

    def advance_to(self, path: str | None) -> Item | None:
        """Move past the next path of the manifest (None: to the end); return its file, None if it is missing.

        Files before it are deleted, or added to ``unlisted``.
        """
        while self._next is not None and (path is None or self._next.path < path):
            self._delete_or_list(self._next.path)
            self._next = next(self._rest, None)
        item = self._next
        if item is None or item.path != path:
            return None
        self._next = next(self._rest, None)
        return item

    def _delete_or_list(self, path: str) -> None:
        """Delete an unlisted file, link or empty folder; or only add it to ``unlisted``."""
        if self._keep_unlisted:
            self.unlisted.append(path)
            return
        full_path = f"{self._folder}/{path}"
        if path.endswith("/"):
            os.rmdir(full_path)  # noqa: PTH106 - as listed
        else:
            os.unlink(full_path)  # noqa: PTH108 - as listed
