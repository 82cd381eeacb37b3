"""The disk under a folder."""

import ctypes
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["free", "remove", "start_writing", "sync", "try_out"]


def free(folder: Path) -> int:
    """Return the bytes that may still be written below a folder."""
    filesystem = os.statvfs(folder)
    return filesystem.f_bavail * filesystem.f_frsize


def try_out(folder: Path) -> None:
    """Make a folder and all above it that is missing, and delete them again: elsewhere, but as deep.

    Raises:
        OSError: A file is in the way, a name is too long, or nothing can be written there.
    """
    above = next(parent for parent in folder.parents if os.path.lexists(parent))
    with tempfile.TemporaryDirectory(prefix=".manycpu.", dir=above) as trial:
        (Path(trial) / folder.relative_to(above)).mkdir(parents=True)


def remove(folder: str, tick: Callable[[], None]) -> None:
    """Delete a folder and all below, but nothing that links lead to; ``tick`` is called for each.

    Raises:
        OSError: Something could not be deleted.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            tick()
            if entry.is_dir(follow_symlinks=False):
                remove(entry.path, tick)
            else:
                Path(entry.path).unlink()
    Path(folder).rmdir()


def sync(folder: Path) -> None:
    """Flush everything below a folder to disk, with one call however many files there are.

    Raises:
        OSError: The disk did not take it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if _syncfs is None:
            os.sync()
        elif _syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)


def start_writing(descriptor: int, start: int, size: int) -> None:
    """Start to write some bytes of a file to disk, without waiting: little is left to :func:`sync`."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _WRITE)


# Python has os.sync for all file systems, and os.fsync for one file; Linux has the one between.
_libc = ctypes.CDLL(None, use_errno=True)
_syncfs, _sync_file_range = getattr(_libc, "syncfs", None), getattr(_libc, "sync_file_range", None)
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
