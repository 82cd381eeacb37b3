"""Delete what libfabric leaves in /dev/shm when its process is killed."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["sweep"]

_SHARED: Final = Path("/dev/shm")  # noqa: S108 - where libfabric puts them
_NAME: Final = re.compile(r"(\d+):\d+:\d+")  # the process, and its endpoint


def sweep(folder: Path = _SHARED, *, mine: bool = False) -> list[str]:
    """Delete the regions of this user's processes that are gone; with ``mine`` also this process' own."""
    swept = []
    for path in folder.glob("*:*:*"):
        match = _NAME.fullmatch(path.name)
        if match is None or not (_is_gone(int(match[1])) or (mine and int(match[1]) == os.getpid())):
            continue
        with suppress(OSError):
            if path.stat().st_uid == os.getuid():
                path.unlink()
                swept.append(path.name)
    return swept


def _is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
