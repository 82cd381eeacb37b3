"""Calls to the kernel on both sides of a launch: which process ends with which, and the way to a host."""

import ctypes
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def end_with_parent(number: int) -> None:
    """Ask for a signal to this process when its parent dies, for any reason (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of orphans among its descendants (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def boot_id() -> str | None:
    """Return the kernel's id of this boot of the machine (Linux)."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def pid_namespace() -> str | None:
    """Return the kernel's name of this process's PID namespace (Linux)."""
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return None


def address_towards(host: str, port: int) -> str:
    """Find the address by which this host reaches another; no packet is sent.

    Raises:
        OSError: There is no way to it.
    """
    kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0]).partition("%")[0]


def interface_of(address: str) -> str | None:
    """Name the network interface that has an address; None: there is none."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
