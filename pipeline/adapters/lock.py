"""One at a time, across processes."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["locked"]


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a lock on a file, which is made if need be; yields its descriptor.

    Whoever holds the lock may delete the file: those who wait for it then wait for the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is(file, path):
                continue
            yield file.fileno()
            return


def _is(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
