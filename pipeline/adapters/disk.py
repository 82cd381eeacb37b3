"""The disk under a folder."""

import ctypes
import os
from pathlib import Path

__all__ = ["free", "sync"]


def free(folder: Path) -> int:
    """Bytes that may still be written below a folder."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def sync(folder: Path) -> None:
    """Have everything below a folder on disk, with one call however many files there are.

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


# Python has os.sync for all file systems, and os.fsync for one file; Linux has the one between.
_syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
