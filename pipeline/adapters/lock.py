"""Locks between processes, and between machines."""

import fcntl
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from manycpu.pipeline.spec.errors import DeadlineError

__all__ = ["leased", "locked", "signs"]

BEAT: Final = 5.0  # seconds between two signs of life of a lease's holder
STALE: Final = 30.0  # seconds without one after which a lease is free
_PATIENCE: Final = 600.0  # seconds to wait for a lock since the last sign of life of its holder
_SIGN: Final = 1.0  # seconds at least between two of those
_LOOK: Final = 0.05  # seconds between two tries


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a lock on a file of this machine, which is made if need be; yields its descriptor.

    Whoever holds the lock may delete the file: those who wait for it then wait for the new one.

    Raises:
        DeadlineError: Somebody holds it and gives no sign of life (:func:`signs`) for ten minutes: a process
            that hangs, or was stopped.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with _opened(path) as file:
            _flock(file, path)
            if not _is_same_file(file, path):
                continue
            yield file.fileno()
            return


def signs(descriptor: int) -> Callable[[], None]:
    """Return what a lock's holder calls as its work goes on, where that may take longer than minutes."""
    last = 0.0

    def sign() -> None:
        nonlocal last
        if time.monotonic() - last >= _SIGN:
            last = time.monotonic()
            with suppress(PermissionError):  # another user's file: those who wait do so for ten minutes
                os.utime(descriptor)

    return sign


def _opened(path: Path) -> IO[str]:
    """Open a lock's file; one that another user made can be locked by whoever may read it."""
    try:
        return path.open("a")
    except PermissionError:
        return path.open()


def _flock(file: IO[str], path: Path) -> None:
    last_sign, since = 0, time.monotonic()
    while not _is_taken(file):
        if (sign := os.fstat(file.fileno()).st_mtime_ns) != last_sign:
            last_sign, since = sign, time.monotonic()
        elif time.monotonic() - since > _PATIENCE:
            raise DeadlineError(
                f"another process holds the lock {path}, and has not got on for {_PATIENCE:g} s",
                fix=f"See which: fuser {path}; end it where it hangs, and run again",
            )
        time.sleep(_LOOK)


def _is_taken(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def leased(
    path: Path,
    beat: float = BEAT,
    stale: float = STALE,
    alive: Callable[[], bool] = lambda: True,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Hold a lock that holds between machines that see the same folder, for as long as its holder works.

    The lock is a file that only one can create (O_EXCL): every file system that nodes share keeps that, while
    many keep flock and fcntl to each node. Its holder renews it; one that is not renewed for ``stale``
    seconds, by the clock of whoever waits, is moved away by a rename, which succeeds for only one.

    A holder that was only slow may so meet another. What it protects must bear that: copies do, since each
    holder writes to a folder of its own.

    Args:
        path: The file.
        beat: Seconds between two signs of life.
        stale: Seconds without one after which the lease is another's.
        alive: Tells whether the holder's work goes on; while it does not, there is no sign of life.
        tick: Is called, while another holds the lease, for each sign of life of that other.
    """
    token = uuid.uuid4().hex
    _acquire(path, token, stale, tick)
    ended = threading.Event()
    renewal = threading.Thread(target=_renew, args=(path, token, ended, beat, alive), daemon=True)
    renewal.start()
    try:
        yield
    finally:
        ended.set()
        renewal.join()
        if _holder(path)[0] == token:
            path.unlink()


def _acquire(path: Path, token: str, stale: float, tick: Callable[[], None]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    last_holder, since = ("", 0), time.monotonic()
    while not _create(path, token):
        holder = _holder(path)
        if holder != last_holder:
            last_holder, since = holder, time.monotonic()
            tick()
        elif time.monotonic() - since > stale:
            _move_away(path, last_holder)
        time.sleep(min(stale / 100, 0.3))


def _create(path: Path, token: str) -> bool:
    try:
        with path.open("x") as file:
            file.write(token)
    except FileExistsError:
        return False
    except OSError:  # a full volume, perhaps, with room for a name but not for a word
        path.unlink(missing_ok=True)
        raise
    return True


def _move_away(path: Path, holder: tuple[str, int]) -> None:
    if _holder(path) != holder:  # another was quicker, and holds it now
        return
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        aside.unlink()


def _renew(path: Path, token: str, ended: threading.Event, beat: float, alive: Callable[[], bool]) -> None:
    while not ended.wait(beat):
        if not alive():
            continue
        with suppress(OSError):  # the volume's server is away for a moment: the next beat may come through
            if _holder(path)[0] != token:
                return
            os.utime(path)


def _holder(path: Path) -> tuple[str, int]:
    """Read who holds a lease, and when the volume's clock says that it was renewed last."""
    try:
        with path.open() as file:  # opened for its time too: what a path alone tells may be cached on NFS
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return "", 0


def _is_same_file(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
