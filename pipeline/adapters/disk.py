"""Operations on a disk that Python's library lacks: clone and sync files, check and remove folders."""

import ctypes
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from manycpu.pipeline.spec.errors import BuildError, LaunchError

_TRIAL_PREFIX = ".manycpu-trial."  # of the name of a trial's folder
_TRIAL_STALE_S = 600.0  # age of a leftover, where trials cannot be locked; a trial takes milliseconds


def free(folder: Path) -> int:
    """Return the bytes that may still be written below a folder."""
    filesystem = os.statvfs(folder)
    return filesystem.f_bavail * filesystem.f_frsize


def mount_point(path: Path) -> Path:
    """Return the nearest folder above a path, or the path itself, on which a disk is mounted."""
    resolved = path.resolve()
    return next(folder for folder in (resolved, *resolved.parents) if folder.is_mount())


def walk(
    folder: Path, field: str, *, follow_links: bool = False
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk the folders that a field names; ``os.walk`` alone would skip folders that it cannot list.

    Raises:
        BuildError: A folder cannot be listed.
    """

    def fail(error: OSError) -> NoReturn:
        message = f"folder {error.filename} cannot be listed: {error.strerror}"
        raise BuildError(message, field=field, fix="See that this machine can, or move it away") from error

    return os.walk(folder, onerror=fail, followlinks=follow_links)


def may_hold_files(path: Path) -> bool:
    """Whether there is a file or a link at a path or below it; true also if a folder cannot be listed."""
    unlisted: list[OSError] = []
    for folder, folders, files in os.walk(path, onerror=unlisted.append):
        if files or any(os.path.islink(os.path.join(folder, name)) for name in folders):  # noqa: PTH114, PTH118
            return True
    # No file was found. Still true if a folder cannot be listed, or for a broken link.
    unknown = any(not isinstance(error, FileNotFoundError | NotADirectoryError) for error in unlisted)
    return unknown or (os.path.lexists(path) and not path.is_dir())


def holds_only(folder: Path, name: str) -> bool:
    """Whether a folder holds one file of a name, and nothing else."""
    return folder.is_dir() and [path.name for path in folder.iterdir()] == [name]


def try_out(folder: Path) -> None:
    """Check that a folder and its missing parents can be made: make a trial folder of the same depth.

    The trial is deleted at once; so are empty trials that killed processes left.

    Raises:
        OSError: A file is in the way, a name is too long, or nothing can be written there.
    """
    existing_parent = next(parent for parent in folder.parents if os.path.lexists(parent))
    for trial in existing_parent.glob(f"{_TRIAL_PREFIX}*"):  # left by killed processes
        with suppress(OSError), _lock_of_trial(trial) as is_free:
            is_old = time.time() - trial.lstat().st_mtime > _TRIAL_STALE_S
            if is_free or is_old:  # the age counts where the file system locks no folders
                for inner, _, _ in os.walk(trial, topdown=False):
                    Path(inner).rmdir()  # empty folders only
    with (
        tempfile.TemporaryDirectory(prefix=_TRIAL_PREFIX, dir=existing_parent) as name,
        _lock_of_trial(Path(name)),
    ):
        (Path(name) / folder.relative_to(existing_parent)).mkdir(parents=True)


@contextmanager
def _lock_of_trial(trial: Path) -> Iterator[bool]:
    """Try to lock the folder of a trial, without waiting.

    Yields True: no other process uses the folder. False: one does, the folder is gone, or the file system
    locks no folders.
    """
    try:
        descriptor = os.open(trial, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # another process deleted it before this one could lock it
        yield False
        return
    try:
        is_free = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a process holds it, or the file system locks no folders
            is_free = False
        yield is_free
    finally:
        os.close(descriptor)


def remove(folder: str, tick: Callable[[], None]) -> None:
    """Delete a folder and all below it, without following links; ``tick`` is called for each entry."""
    with os.scandir(folder) as entries:
        for entry in entries:
            tick()
            if entry.is_dir(follow_symlinks=False):
                remove(entry.path, tick)
            else:
                Path(entry.path).unlink()
    Path(folder).rmdir()


def copy(source: Path, folder: Path) -> None:
    """Copy a folder, and make all of the copy writable for its owner; links stay links.

    Raises:
        LaunchError: A file cannot be copied, for example because the disk is full.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        shutil.copytree(source, partial, symlinks=True)
    except shutil.Error as error:  # an OSError without an errno
        _, path, reason = error.args[0][0]  # the first failure: source, copy and reason
        fix = "See that its disk works and has room, and run again"
        raise LaunchError(f"{path} was not written: {reason}", fix=fix) from error
    for path in (partial, *partial.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
    partial.rename(folder)


def clone(source: int, file: int) -> bool:
    """Make the empty ``file`` share the blocks of ``source`` (copy on write); both are descriptors.

    Returns False if the file system cannot clone, or if the files are on two file systems.
    """
    try:
        fcntl.ioctl(file, _FICLONE, source)
    except OSError:
        return False
    return True


def sync(folder: Path) -> None:
    """Flush everything below a folder to disk, with one call however many files there are."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if _syncfs is None:
            os.sync()
        elif _syncfs(descriptor):  # not 0: it failed
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)


def start_writing(descriptor: int, start: int, size: int) -> None:
    """Start to write some bytes of a file to disk without waiting, so that :func:`sync` has little to do."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(size), _WRITE)


# Python has os.sync for all file systems, and os.fsync for one file; Linux can sync one file system.
_libc = ctypes.CDLL(None, use_errno=True)
_syncfs, _sync_file_range = getattr(_libc, "syncfs", None), getattr(_libc, "sync_file_range", None)
_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_FICLONE = 0x40049409  # linux/fs.h
