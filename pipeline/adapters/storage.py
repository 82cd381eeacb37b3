"""Files, wherever they are: the door to fsspec. Paths and URLs in, open files out."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from manycpu.pipeline.spec.credentials import without
from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["Block", "Item", "Location", "Reading", "blocks", "is_remote", "item_of"]

_BLOCK = 1 << 18
Block = bytes | memoryview


class Item(NamedTuple):
    """A file below a location: its path there, its size in bytes, and what changes when it does."""

    path: str
    size: int
    version: str


class Reading(NamedTuple):
    """A file that is read from a byte on."""

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

    @classmethod
    def of(cls, url: str, field: str) -> "Location":
        """Open a path or an fsspec URL.

        Args:
            url: Such as ``/data/squad``, ``s3://bucket/squad`` or ``hf://datasets/rajpurkar/squad``.
            field: The field it came from, for the error.

        Raises:
            BadInputError: No such protocol, or its package is missing.
        """
        try:
            fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            fix = "Install the package that fsspec names, or use another protocol"
            text = without(f"{url!r} cannot be opened: {error}", url)
            raise BadInputError(text, field=field, fix=fix) from error
        return cls(url, fs, root)

    @property
    def local(self) -> Path | None:
        """The path, where this is on disk."""
        return Path(self.root) if isinstance(self.fs, LocalFileSystem) else None

    def only(self, paths: Iterable[str]) -> "Location":
        """Restrict to some of the files below."""
        return replace(self, chosen=tuple(paths))

    def exists(self) -> bool:
        """Whether there is a file or a folder."""
        return bool(self.fs.exists(self.root))

    def is_file(self) -> bool:
        """Whether this is one file."""
        return bool(self.fs.isfile(self.root))

    def items(self) -> list[Item]:
        """List every file below, or the file itself, by path."""
        if self.is_file():
            return [self._item(self.root.rsplit("/", 1)[-1])]
        if self.chosen is not None:
            return [self._item(path) for path in self.chosen]
        return sorted(self._all())

    def open(self, path: str, mode: str = "rb") -> BinaryIO:
        """Open a file below, or the file itself."""
        if mode == "rb" and isinstance(self.fs, LocalFileSystem):
            # fsspec takes thrice as long for small files; what is read in blocks needs no buffer.
            return cast("BinaryIO", open(self._at(path), "rb", buffering=0))  # noqa: PTH123
        return cast("BinaryIO", self.fs.open(self._at(path), mode))

    def read(self, wanted: Sequence[tuple[Item, int]]) -> Iterator[Reading]:
        """Read each of some files from a byte on; nothing is told of what they were."""
        return (Reading(self._from(item.path, start), str) for item, start in wanted)

    def write_text(self, path: str, text: str) -> None:
        """Write a small file below."""
        self.fs.makedirs(self._at(path).rsplit("/", 1)[0], exist_ok=True)
        self.fs.pipe_file(self._at(path), text.encode())

    def read_text(self, path: str) -> str | None:
        """Read a small file below; None where there is none."""
        try:
            return cast("bytes", self.fs.cat_file(self._at(path))).decode(errors="replace")
        except FileNotFoundError:
            return None

    def remove(self, path: str) -> None:
        """Delete a file below."""
        self.fs.rm_file(self._at(path))

    def has(self, path: str) -> bool:
        """Whether there is such a file below."""
        return bool(self.fs.exists(self._at(path)))

    def sha256(self, path: str) -> str:
        """Read a file below and hash it."""
        return self.hashed(path)[1]

    def hashed(self, path: str, size: int | None = None) -> tuple[int, str]:
        """Read a file below, or its first bytes: how many there were, and their sha256."""
        digest, count = hashlib.sha256(), 0
        with self.open(path) as file:
            for block in blocks(file):
                rest = block if size is None else block[: size - count]
                digest.update(rest)
                count += len(rest)
                if count == size:
                    break
        return count, digest.hexdigest()

    def _from(self, path: str, start: int) -> Iterator[bytes]:
        with self.open(path) as file:
            file.seek(start)
            yield from blocks(file)

    @cached_property
    def _one_file(self) -> bool:
        return self.is_file()

    def _at(self, path: str) -> str:
        return self.root if self._one_file else f"{self.root.rstrip('/')}/{path}"

    def _item(self, path: str) -> Item:
        at = self._at(path)
        return item_of(path, Path(at).stat()) if self.local else _described(path, self.fs.info(at))

    def _all(self) -> Iterable[Item]:
        if self.local:
            return _below(self.root)
        base = self.root.rstrip("/") + "/"
        found = cast("dict[str, dict[str, Any]]", self.fs.find(self.root, detail=True))
        return (_described(path.removeprefix(base), info) for path, info in found.items())


def item_of(path: str, found: os.stat_result) -> Item:
    """Describe a file on disk."""
    return Item(path, found.st_size, str(found.st_mtime_ns))


def _described(path: str, info: dict[str, Any]) -> Item:
    version = next((str(info[name]) for name in ("ETag", "etag", "blob_id", "mtime") if info.get(name)), "")
    return Item(path, int(info["size"] or 0), version)


def _below(folder: str, prefix: str = "") -> Iterator[Item]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _below(entry.path, f"{prefix}{entry.name}/")
            else:
                yield item_of(prefix + entry.name, _stat(entry))


def _stat(entry: "os.DirEntry[str]") -> os.stat_result:
    try:
        return entry.stat()
    except OSError:  # a link that leads nowhere: whoever reads it is told
        return entry.stat(follow_symlinks=False)


def is_remote(url: str) -> bool:
    """Whether a path or URL leads away from this machine, without opening it."""
    protocol, _ = fsspec.core.split_protocol(url)
    return protocol not in (None, "file", "local")


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """Read a file to its end, in blocks that a core's cache holds."""
    while block := file.read(_BLOCK):
        yield block
