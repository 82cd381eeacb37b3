"""A process that outlives a killed log forwarder just long enough to kill what the rank had started."""

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["start_orphan_killer"]


def start_orphan_killer(group: int) -> int:
    """Fork a process that kills the process group ``group`` once this one is gone, however it went; its id.

    The kernel kills the rank with its forwarder (``die_with_parent``), but not the rank's own children.
    """
    watched, _held = os.pipe()  # the other end stays open for as long as this process lives, and in no other
    if killer := os.fork():
        os.close(watched)
        return killer
    try:
        # Out of reach of a launcher that kills its ranks by session or group, and holding none of its pipes.
        os.setsid()
        _close_all_but(watched)
        os.read(watched, 1)
        os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)


def _close_all_but(descriptor: int) -> None:
    for name in [entry.name for entry in Path("/proc/self/fd").iterdir()]:
        if int(name) != descriptor:
            with contextlib.suppress(OSError):
                os.close(int(name))
