"""Delete the memory regions that libfabric leaves in /dev/shm when its process is killed.

A process id is no proof of the owner: containers that share /dev/shm (``--ipc=host``) each count processes
from 1. So each process locks its regions, and then marks them. The kernel releases a lock when its process
ends, which every container sees. A region with the mark and without the lock has lost its owner; every other
region stays.
"""

import fcntl
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

_SHARED: Final = Path("/dev/shm")  # noqa: S108 - where libfabric puts them
_NAME: Final = re.compile(r"(\d+):\d+:\d+")  # the process, and its endpoint
_MARK: Final = stat.S_ISVTX  # the kernel ignores it on a file, and only the owner can set it
_claimed: Final[dict[Path, int]] = {}
"""Regions of this process, and the descriptors that hold their locks."""


def sweep(folder: Path = _SHARED) -> list[str]:
    """Delete the regions of this user that have lost their owner; returns their names."""
    names = []
    for path in sorted(folder.glob("*:*:*")):
        if not _NAME.fullmatch(path.name):
            continue
        with suppress(OSError):  # it is gone by now, or another user's, or its owner still runs
            _delete_if_left(path)
            names.append(path.name)
    return names


def claim(folder: Path = _SHARED) -> None:
    """Lock and mark the regions that libfabric made in this process, until it ends or releases them."""
    for path, descriptor in list(_claimed.items()):
        if os.fstat(descriptor).st_nlink == 0:  # libfabric deleted it; an open file would keep its memory
            os.close(_claimed.pop(path))
    maps = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    for path in folder.glob(f"{os.getpid()}:*:*"):
        # A process of another container may have the same id; only a region of this process is mapped here.
        is_mapped = any(line.endswith(f" {path.resolve()}") for line in maps)
        if path not in _claimed and _NAME.fullmatch(path.name) and is_mapped:
            with suppress(OSError):
                _claimed[path] = _locked_and_marked(path)


def release() -> None:
    """Delete the regions of this process that are still there."""
    for path, descriptor in _claimed.items():
        with suppress(OSError):
            # Another process may have a new region under the name of a region that is gone.
            if os.path.samestat(path.lstat(), os.fstat(descriptor)):
                path.unlink()
        os.close(descriptor)
    _claimed.clear()


def _delete_if_left(path: Path) -> None:
    """Delete a region whose owner has ended; raise OSError if the owner still runs or is not known."""
    descriptor = _opened(path)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or not status.st_mode & _MARK:
            raise PermissionError(f"{path} has no known owner")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the owner runs
        if not os.path.samestat(path.lstat(), status):
            raise FileNotFoundError(f"{path} is another file now")
        path.unlink()
    finally:
        os.close(descriptor)


def _locked_and_marked(path: Path) -> int:
    """Lock and mark a region; returns the descriptor that holds the lock."""
    descriptor = _opened(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) | _MARK)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _close_in_child() -> None:
    """Close the parent's locks in a forked child, which may outlive the parent."""
    for descriptor in _claimed.values():
        os.close(descriptor)
    _claimed.clear()


os.register_at_fork(after_in_child=_close_in_child)
