"""Calls to the kernel on both sides of a launch: which process ends with which, and the way to a host."""

import ctypes
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36


def end_with_parent(number: int) -> None:
    """Have the kernel send the signal ``number`` to this process when its parent dies in any way (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def send_signal(pid: int, number: int) -> bool:
    """Send a signal; returns False if the process is another user's, such as one that sudo started.

    True also if the process has ended.
    """
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
    except PermissionError:
        return False
    return True


def boot_id() -> str | None:
    """Return the kernel's id of this boot of the machine (Linux); None: it cannot be read."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def pid_namespace() -> str | None:
    """Return the kernel's name of this process's PID namespace (Linux); None: it cannot be read."""
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return None


def address_towards(host: str, port: int) -> str:
    """Find the address by which this host reaches another; no packet is sent.

    Raises:
        OSError: The host has no address, or there is no route to it.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # of a UDP socket: chooses the route and the own address, and sends nothing
        return str(probe.getsockname()[0]).partition("%")[0]  # without the zone of an IPv6 address


def interface_of(address: str) -> str | None:
    """Name the network interface that has an address; None: there is none."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    return None


def _prctl(option: int, value: int) -> None:
    """Call prctl(2); do nothing on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
