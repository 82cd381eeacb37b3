"""Locks between processes, and between machines."""

import errno
import fcntl
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from manycpu.pipeline.spec.errors import BadInputError, DeadlineError

BEAT_INTERVAL_S: Final = 5.0  # seconds between two heartbeats of a lease's holder
STALE_AFTER_S: Final = 30.0  # seconds without a heartbeat after which a lease is stale
_SILENCE_TIMEOUT_S: Final = 600.0  # to wait for a lock after the last sign of life of its holder
_SIGN_INTERVAL_S: Final = 1.0  # at least, between two signs of life
_POLL_INTERVAL_S: Final = 0.05
# Errors of file systems that have no locks, such as Lustre without its mount option, or NFS without lockd.
_NO_LOCKS: Final = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})
_held: Final[dict[tuple[int, Path], IO[str]]] = {}
"""Thread and path of each lock that this process holds -> its open file."""


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[int]:
    """Hold an exclusive lock on a file of this machine; yields the file's descriptor.

    The file is created if it is missing. The holder may delete it: waiting processes then lock a new file of
    the same name.

    A thread that holds a lock must not take it again. If it does, the lock is one that Ctrl-C has left: an
    interrupt at the very end of a ``with`` block prevents the release, while its traceback exists.

    Args:
        path: The file.
        wait: True: wait while another process holds the lock. False: do not wait.

    Raises:
        BadInputError: The file's disk has no locks.
        BlockingIOError: Another process holds the lock, and ``wait`` is false.
        DeadlineError: For ten minutes, the holder has given no sign of life (:func:`signs`).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    here = (threading.get_ident(), path)
    if left := _held.pop(here, None):
        left.close()
    while True:
        with _open(path) as file:
            last_sign, since = 0, time.monotonic()
            while not _try_flock(file, path):
                if not wait:
                    raise BlockingIOError(errno.EAGAIN, "another process holds it", str(path))
                sign = os.fstat(file.fileno()).st_mtime_ns  # the holder touches the file
                if sign != last_sign:
                    last_sign, since = sign, time.monotonic()
                elif time.monotonic() - since > _SILENCE_TIMEOUT_S:
                    raise DeadlineError(
                        f"another process holds the lock {path}, and has made no progress for "
                        f"{_SILENCE_TIMEOUT_S:g} s",
                        fix=f"See which: fuser {path}; end it where it hangs, and run again",
                    )
                time.sleep(_POLL_INTERVAL_S)
            try:
                is_current = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                is_current = False
            # The last holder deleted this file, and others lock a new file of this name: begin again.
            if not is_current:
                continue
            _held[here] = file
            try:
                yield file.fileno()
            finally:
                if _held.get(here) is file:
                    del _held[here]
            return


def _open(path: Path) -> IO[str]:
    """Open the file of a lock; create it if it is missing.

    Raises:
        PermissionError: The file is missing and cannot be created, or it exists and cannot be read.
    """
    try:
        return path.open("a")
    except PermissionError as refused:  # to lock a file of another user, read permission is enough
        try:
            return path.open()
        except FileNotFoundError:  # no file to read: report that it cannot be created
            raise refused from None


def signs(descriptor: int) -> Callable[[], None]:
    """Return a function for a lock's holder to call during long work, so that waiting processes keep waiting.

    The function touches the lock's file, which is the sign of life, at most once a second. ``descriptor`` is
    the descriptor that :func:`locked` yields.
    """
    last = 0.0

    def sign() -> None:
        """Touch the file, unless this was done less than a second ago."""
        nonlocal last
        if time.monotonic() - last >= _SIGN_INTERVAL_S:
            last = time.monotonic()
            with suppress(PermissionError):  # another user's file: waiting processes then time out
                os.utime(descriptor)

    return sign


def try_out(folder: Path) -> None:
    """Check that files in a folder can be locked: lock a temporary file there, which is then gone.

    Raises:
        BadInputError: The folder's disk has no locks.
        OSError: No file can be made there.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        _try_flock(file, folder)


def _try_flock(file: IO[str] | IO[bytes], path: Path) -> bool:
    """Try to lock a file, without waiting. True: locked. False: another process holds the lock.

    Raises:
        BadInputError: The disk has no file locks; the error names ``path``.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise BadInputError(
            f"the disk of {path} has no file locks: {error.strerror}",
            field="target.directory",
            fix="Set target.directory, or $MANYCPU_HOME, to a folder on another disk; Lustre has locks with "
            "its mount option flock",
        ) from error
    return True


@contextmanager
def leased(
    path: Path,
    beat: float = BEAT_INTERVAL_S,
    stale: float = STALE_AFTER_S,
    alive: Callable[[], bool] = lambda: True,
    tick: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Hold a lease between machines that share a folder; wait while another process holds it.

    The lease is a file that only one process can create (O_EXCL): all shared file systems guarantee that,
    while many keep flock and fcntl local to a node. The holder renews the lease: it touches the file. If no
    renewal comes for ``stale`` seconds, by the clock of a waiting process, that process renames the file
    away. Of several waiting processes, the rename succeeds for only one.

    So a second process may take the lease of a slow holder, and both work at the same time. The protected
    work must tolerate that: copies do, since each holder writes to its own folder.

    Args:
        path: The file.
        beat: Seconds between two renewals.
        stale: Seconds without a renewal after which this process takes the lease of another.
        alive: Returns whether this holder's work makes progress; while it is false, the lease is not renewed.
        tick: Called while this process waits, each time the present holder has renewed or taken the lease.
    """
    token = uuid.uuid4().hex
    path.parent.mkdir(parents=True, exist_ok=True)
    last_holder, since = ("", 0), time.monotonic()
    while not _create(path, token):
        holder = _read_holder(path)
        if holder != last_holder:
            last_holder, since = holder, time.monotonic()
            tick()
        elif time.monotonic() - since > stale and _read_holder(path) == holder:  # not renewed just now either
            aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")  # a name of this process alone
            with suppress(FileNotFoundError):
                path.rename(aside)
                aside.unlink()
        time.sleep(min(stale / 100, 0.3))
    ended = threading.Event()
    renewal = threading.Thread(target=_renew, args=(path, token, ended, beat, alive), daemon=True)
    renewal.start()
    try:
        yield
    finally:
        ended.set()
        renewal.join()
        if _read_holder(path)[0] == token:  # else another process has taken the lease
            path.unlink()


def _create(path: Path, token: str) -> bool:
    """Create the file of a lease, with its holder's token; False: the file exists, so the lease is held."""
    try:
        with path.open("x") as file:
            file.write(token)
    except FileExistsError:
        return False
    except OSError:  # such as a full volume, with room for the name but not for the token
        path.unlink(missing_ok=True)
        raise
    return True


def _renew(path: Path, token: str, ended: threading.Event, beat: float, alive: Callable[[], bool]) -> None:
    """Renew a lease every ``beat`` seconds, until it has ended or another process has taken it."""
    while not ended.wait(beat):
        if not alive():
            continue
        with suppress(OSError):  # the volume's server may be back at the next beat
            if _read_holder(path)[0] != token:  # another process has taken the lease
                return
            os.utime(path)


def _read_holder(path: Path) -> tuple[str, int]:
    """Return the token of a lease's holder, and when the holder last renewed the lease.

    The time is in nanoseconds since the epoch, by the volume's clock. ``("", 0)``: there is no lease.
    """
    try:
        with path.open() as file:  # opened also for its time: NFS may cache the status of a path
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return "", 0
