"""A process that outlives a killed pump just long enough to end what the rank had started."""

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["post"]


def post(group: int) -> None:
    """Fork a sentinel: once this process is gone, however it went, it kills the process group ``group``.

    The kernel kills the rank itself with its pump (``die_with_parent``), but not the rank's own children.
    """
    watched, _held = os.pipe()  # the other end stays open for as long as this process lives, and in no other
    if os.fork():
        os.close(watched)
        return
    try:
        # Out of reach of a launcher that kills its ranks by session or group, and holding none of its pipes.
        os.setsid()
        _close_all_but(watched)
        os.read(watched, 1)
        os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)


def _close_all_but(kept: int) -> None:
    for name in [entry.name for entry in Path("/proc/self/fd").iterdir()]:
        if int(name) != kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
