"""List the files below a folder on disk, and keep lists of many files in little memory.

A list has regular files, the targets of links, empty folders, and whether a file is executable.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any, Final, Generic, NamedTuple, TypeVar

_FIELDS: Final = 4  # of a row
_ROW: Final = re.compile(rb"([^\0]*)\0" * _FIELDS)
LeftOut = Callable[[str, str], None]
"""Called with the path of what is no file or folder, and why it cannot be copied."""


class Item(NamedTuple):
    """A file below a location: its path there, its size in bytes, and a version that changes with it.

    A path that ends with a slash is an empty folder.
    """

    path: str
    size: int
    version: str
    executable: bool = False

    @property
    def is_folder(self) -> bool:
        """Whether this is an empty folder."""
        return self.path.endswith("/")


class OddFileError(OSError):
    """A path is neither a file nor a folder, and cannot be copied."""


Row = TypeVar("Row", bound=tuple[Any, ...])


class Rows(Collection[Row], Generic[Row]):
    """A list of rows (path, size, text, flag) in little memory: about 40 bytes for each, beside its texts.

    ``make_row`` makes a row from these four fields. Fields end with NUL, which no path has. Paths that are
    not UTF-8 are written as :func:`os.fsdecode` returns them.
    """

    def __init__(self, make_row: Callable[[str, int, str, bool], Row], rows: Iterable[Row] = ()) -> None:
        self._make_row, self._count = make_row, 0
        self.content = bytearray()
        for row in rows:
            self.append(row)

    @classmethod
    def of(cls, make_row: Callable[[str, int, str, bool], Row], content: bytearray) -> "Rows[Row]":
        """Wrap the bytes of encoded rows.

        Raises:
            ValueError: The last row, or its last field, is cut off.
        """
        rows = cls(make_row)
        rows.content = content
        rows._count, rest = divmod(content.count(b"\0"), _FIELDS)
        if rest or (content and content[-1]):  # a part of a row, or a last field without its NUL
            raise ValueError("a list of files is cut off")
        return rows

    def append(self, row: Row) -> None:
        """Add a row; raise ValueError if its path or its text has a NUL."""
        path, size, text, flag = row
        line = f"{path}\0{size}\0{text}\0{'x' if flag else ''}\0".encode(errors="surrogateescape")
        if line.count(b"\0") != _FIELDS:
            with_nul = path if "\0" in path else text
            raise ValueError(f"there is a NUL in {with_nul!r}")
        self.content += line
        self._count += 1

    def __iter__(self) -> Iterator[Row]:
        for match in _ROW.finditer(self.content):
            path, size, text, flag = (part.decode(errors="surrogateescape") for part in match.groups())
            yield self._make_row(path, int(size), text, bool(flag))

    def __len__(self) -> int:
        return self._count

    def __contains__(self, row: object) -> bool:
        return any(existing == row for existing in self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self.content == other.content

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def digest(self) -> str:
        """The sha256 of all rows, in hexadecimal; only for complete lists."""
        return hashlib.sha256(self.content).hexdigest()


def regular(status: os.stat_result) -> bool:
    """Whether a status is that of a regular file."""
    return stat.S_ISREG(status.st_mode)


def item_of(path: str, status: os.stat_result) -> Item:
    """Make an item of a file on disk; its version is the time of its last change, in nanoseconds."""
    return Item(path, status.st_size, str(status.st_mtime_ns), bool(status.st_mode & stat.S_IXUSR))


def below(folder: str, left_out: LeftOut | None = None, *, follow: bool = True) -> Iterator[Item]:
    """List the files below a folder on disk, sorted by path.

    An entry that is neither a file nor a folder is left out: ``left_out`` is called with its path and the
    reason. If ``left_out`` is None, such an entry raises OddFileError. With ``follow``, a link counts as the
    file or folder that it leads to; without it, a link is neither.
    """
    return _Walk(left_out or _refuse, follow).below(folder, prefix="", above=())


class _Walk(NamedTuple):
    """A search through folders; ``left_out`` is called with what is neither file nor folder, and why."""

    left_out: LeftOut
    follow: bool

    def below(self, folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Item]:
        """List the files below a folder.

        Args:
            folder: Its path on the disk.
            prefix: Its path in the list: empty, or with a slash at the end.
            above: Device and inode of each folder that it is in: a link back to one of them is left out.
        """
        status = os.stat(folder)  # noqa: PTH116 - here and below: faster, for many files
        identity = status.st_dev, status.st_ino
        if identity in above:
            self.left_out(prefix.rstrip("/"), "is a link to a folder that it is in itself")
            return
        names = []  # those of folders end with a slash
        with os.scandir(folder) as entries:
            for entry in entries:
                is_folder = False
                with suppress(OSError):  # a link that leads back to itself
                    is_folder = entry.is_dir(follow_symlinks=self.follow)
                names.append(f"{entry.name}/" if is_folder else entry.name)
        names.sort()  # in the order of whole paths: "a.txt" comes before the files in the folder "a"
        if not names and prefix:  # an empty folder, but not the top one
            yield Item(prefix, size=0, version="")
        for name in names:
            absolute, path = f"{folder}/{name}", prefix + name
            if name.endswith("/"):
                yield from self.below(absolute[:-1], path, (*above, identity))
            elif child_status := self._status(absolute, path):
                yield item_of(path, child_status)

    def _status(self, absolute: str, path: str) -> os.stat_result | None:
        """Return the status of a regular file; None: it is something else, and ``left_out`` was called."""
        try:
            status = os.stat(absolute, follow_symlinks=self.follow)  # noqa: PTH116
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
            self.left_out(path, "is a link that leads nowhere")
            return None
        if regular(status):
            return status
        self.left_out(path, f"is {_NAME_OF_TYPE.get(stat.S_IFMT(status.st_mode), 'no file')}")
        return None


_NAME_OF_TYPE: Final = {
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFLNK: "a link",
}


def leads_out(path: str) -> bool:
    """Whether a path from outside, such as an archive's, leads out of its folder."""
    return path.startswith("/") or ".." in path.split("/")


def _refuse(path: str, why: str) -> None:
    """Raise OddFileError: the default of ``left_out``."""
    raise OddFileError(f"{path!r} {why}")
