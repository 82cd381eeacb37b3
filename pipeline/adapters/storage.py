"""Files, wherever they are: the door to fsspec. Paths and URLs in, open files out."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from manycpu.pipeline.adapters.listing import (
    Item,
    LeftOut,
    OddFileError,
    Rows,
    below,
    item_of,
    leads_out,
    regular,
)
from manycpu.pipeline.spec.credentials import without
from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["Block", "Item", "Location", "Reading", "blocks", "is_remote", "item_of"]

_BLOCK = 1 << 18
Block = bytes | memoryview


class Reading(NamedTuple):
    """A file that is being read from an offset on."""

    blocks: Iterator[Block]
    sha256: Callable[[], str]
    """Of all of it, as whoever read it saw it, once the blocks are taken; empty where that is not told."""


@dataclass(frozen=True)
class Location:
    """A folder or a file, on disk or behind a URL."""

    url: str
    fs: Any
    root: str
    chosen: tuple[str, ...] | None = None
    """Paths below that count; None: all."""
    left_out: LeftOut | None = None
    """Is told of what is on disk and cannot be copied (a FIFO); None: that is an error."""

    @classmethod
    def of(cls, url: str, field: str) -> "Location":
        """Open a path or an fsspec URL.

        Args:
            url: Such as ``/data/squad``, ``s3://bucket/squad`` or ``hf://datasets/rajpurkar/squad``.
            field: The field it came from, for the error.

        Raises:
            BadInputError: No such protocol, its package is missing, or what it needs to begin with.
        """
        try:
            fs, root = fsspec.core.url_to_fs(url) if is_remote(url) else _on_disk(url)
        except Exception as error:
            # Every protocol of fsspec has errors of its own.
            fix = "Install the package that fsspec names, mend the URL, or use another protocol"
            text = without(f"{url!r} cannot be opened: {error}", url)
            raise BadInputError(text, field=field, fix=fix) from error
        return cls(url, fs, root)

    @property
    def local(self) -> Path | None:
        """The path, where this is on disk."""
        return Path(self.root) if isinstance(self.fs, LocalFileSystem) else None

    @property
    def tells_sha256(self) -> bool:
        """Whether :meth:`read` tells what a file should be: it reads no more than is asked for."""
        return False

    def only(self, paths: Iterable[str]) -> "Location":
        """Restrict to some of the files below."""
        return replace(self, chosen=tuple(paths))

    def without_odd(self, left_out: LeftOut) -> "Location":
        """Skip what cannot be copied, such as a FIFO, and report it to a callback."""
        return replace(self, left_out=left_out)

    def exists(self) -> bool:
        """Whether there is a file or a folder."""
        return bool(self.fs.exists(self.root))

    def is_file(self) -> bool:
        """Whether this is one file."""
        return bool(self.fs.isfile(self.root))

    def items(self, tick: Callable[[], None] = lambda: None) -> Rows[Item]:
        """List every file below, or the file itself, by path; ``tick`` is called for each on disk.

        Raises:
            OddFileError: Something is no file or folder, and nobody is told of what is left out; or a path
                leads out of the folder, as those of an archive may.
            OSError: A folder cannot be read.
        """
        if self.is_file():
            return Rows(Item, [self._item(self.root.rsplit("/", 1)[-1])])
        if self.chosen is not None:
            return Rows(Item, map(self._item, self.chosen))
        return Rows(Item, self._on_disk(tick) if self.local else sorted(self._behind_url()))

    def open(self, path: str, mode: str = "rb") -> BinaryIO:
        """Open a file below, or the file itself."""
        if mode == "rb" and isinstance(self.fs, LocalFileSystem):
            # fsspec takes thrice as long for small files; what is read in blocks needs no buffer.
            return cast("BinaryIO", open(self._at(path), "rb", buffering=0, opener=_open_file))
        return cast("BinaryIO", self.fs.open(self._at(path), mode))

    def read(self, items: Rows[Item], starts: Sequence[int]) -> Iterator[Reading]:
        """Read each of some files from an offset on; its sha256 is not known."""
        return (Reading(self._from(item, start), str) for item, start in zip(items, starts, strict=True))

    def write_text(self, path: str, text: str) -> None:
        """Write a small file below."""
        self.fs.makedirs(self._at(path).rsplit("/", 1)[0], exist_ok=True)
        self.fs.pipe_file(self._at(path), text.encode())

    def read_text(self, path: str) -> str | None:
        """Read a small file below; None where there is none."""
        try:
            return cast("bytes", self.fs.cat_file(self._at(path))).decode(errors="replace")
        except (FileNotFoundError, IsADirectoryError):
            return None

    def remove(self, path: str) -> None:
        """Delete a file below."""
        self.fs.rm_file(self._at(path))

    def has(self, path: str) -> bool:
        """Whether there is such a file below."""
        return bool(self.fs.exists(self._at(path)))

    def sha256(self, item: Item, tick: Callable[[], None] = lambda: None) -> str:
        """Read a file below and hash it; ``tick`` is called after each block."""
        return self.hashed(item, tick=tick)[1]

    def hashed(
        self, item: Item, size: int | None = None, tick: Callable[[], None] = lambda: None
    ) -> tuple[int, str]:
        """Hash a file below, or its first bytes; returns their number and their sha256."""
        digest, count = hashlib.sha256(), 0
        for block in self._from(item, 0):
            rest = block if size is None else block[: size - count]
            digest.update(rest)
            count += len(rest)
            tick()
            if count == size:
                break
        return count, digest.hexdigest()

    def _from(self, item: Item, start: int) -> Iterator[bytes]:
        if item.is_folder:
            return
        with self.open(item.path) as file:
            file.seek(start)
            yield from blocks(file)

    @cached_property
    def _one_file(self) -> bool:
        return self.is_file()

    def _at(self, path: str) -> str:
        return self.root if self._one_file else f"{self.root.rstrip('/')}/{path}"

    def _item(self, path: str) -> Item:
        if path.endswith("/"):
            return Item(path, 0, "")
        at = self._at(path)
        return item_of(path, Path(at).stat()) if self.local else _described(path, self.fs.info(at))

    def _on_disk(self, tick: Callable[[], None]) -> Iterator[Item]:
        for item in below(self.root, self.left_out):
            tick()
            yield item

    def _behind_url(self) -> Iterable[Item]:
        self.fs.invalidate_cache()  # somebody may have written meanwhile
        base = self.root.rstrip("/") + "/"
        entries = cast("dict[str, dict[str, Any]]", self.fs.find(self.root, detail=True))
        for path, info in entries.items():
            name = path.removeprefix(base)
            if leads_out(name):
                raise OddFileError(f"{name!r} leads out of its folder")
            # Some list folders as files with a slash at the end; behind URLs there are no empty ones.
            if path[-1] != "/":
                yield _described(name, info)


def _on_disk(path: str) -> tuple[LocalFileSystem, str]:
    """Open a path on disk: ``::`` in it chains no protocols."""
    return LocalFileSystem(), fsspec.core.strip_protocol(path)


_VERSIONS: Final = ("ETag", "etag", "blob_id", "mtime", "Content-MD5", "Digest", "Last-Modified")


def _described(path: str, info: dict[str, Any]) -> Item:
    version = next((str(info[name]) for name in _VERSIONS if info.get(name)), "")
    return Item(path, int(info["size"] or 0), version)


def _open_file(path: str, flags: int) -> int:
    """Open a regular file; one that has become a FIFO meanwhile is not waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if regular(os.fstat(descriptor)):
        return descriptor
    os.close(descriptor)
    raise OddFileError(f"{path!r} is no regular file")


def is_remote(url: str) -> bool:
    """Whether a path or URL is elsewhere than on this machine, without opening it."""
    protocol, _ = fsspec.core.split_protocol(url)
    return protocol not in (None, "file", "local")


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """Read a file to its end, in blocks that a core's cache holds."""
    while block := file.read(_BLOCK):
        yield block
