"""The disk under a folder."""

import ctypes
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["clone", "copy", "free", "may_hold_files", "remove", "start_writing", "sync", "try_out"]


_TRIAL = ".manycpu."  # begins the name of a trial's folder
_TRIAL_LIVES_S = 600.0  # a trial takes milliseconds


def free(folder: Path) -> int:
    """Return the bytes that may still be written below a folder."""
    filesystem = os.statvfs(folder)
    return filesystem.f_bavail * filesystem.f_frsize


def may_hold_files(path: Path) -> bool:
    """Whether a path is a file, or a folder with files or links, or one that cannot be listed."""
    unlisted: list[OSError] = []
    for folder, folders, files in os.walk(path, onerror=unlisted.append):
        if files or any(os.path.islink(os.path.join(folder, name)) for name in folders):  # noqa: PTH114, PTH118
            return True
    return os.path.lexists(path) and (bool(unlisted) or not path.is_dir())


def try_out(folder: Path) -> None:
    """Make a folder and all above it that is missing, and delete them again: elsewhere, but as deep.

    Raises:
        OSError: A file is in the way, a name is too long, or nothing can be written there.
    """
    above = next(parent for parent in folder.parents if os.path.lexists(parent))
    for left in above.glob(f"{_TRIAL}*"):
        _remove_left_trial(left)
    with tempfile.TemporaryDirectory(prefix=_TRIAL, dir=above) as trial:
        (Path(trial) / folder.relative_to(above)).mkdir(parents=True)


def _remove_left_trial(trial: Path) -> None:
    """Delete what a process that was killed left of its trial: empty folders, and nothing else."""
    with suppress(OSError):
        if time.time() - trial.lstat().st_mtime > _TRIAL_LIVES_S:
            for folder, _, _ in os.walk(trial, topdown=False):
                Path(folder).rmdir()


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


def copy(source: Path, folder: Path) -> None:
    """Copy a folder to another place, where its owner may write to all of it.

    Raises:
        OSError: It cannot be read, or the disk is full.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.copytree(source, partial, symlinks=True)
    for path in (partial, *partial.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
    partial.rename(folder)


def clone(source: int, file: int) -> bool:
    """Have an empty file share the blocks of another until one of them is written to.

    Args:
        source: Descriptor of the other.
        file: Descriptor of the empty one.

    Returns:
        Whether it does; False where the file system has nothing of the kind, or they are on two.
    """
    try:
        fcntl.ioctl(file, _FICLONE, source)
    except OSError:
        return False
    return True


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
_FICLONE = 0x40049409  # of linux/fs.h
