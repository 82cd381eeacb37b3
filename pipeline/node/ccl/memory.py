"""Share memory among all ranks of a group, where they are processes of one host.

It has no name in any file system: it takes no room of /dev/shm, and the kernel frees it when the last of its
ranks ends, even by a signal.
"""

import ctypes
import os
import secrets
import socket
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Final

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from manycpu.pipeline.node.emit import warn
from manycpu.pipeline.spec import kernel

__all__ = ["share"]

_OFFER: Final = "offer"
_VERDICT: Final = "verdict"
_ELSEWHERE: Final = "elsewhere"
_YES: Final = "yes"
_CLOEXEC: Final = 1  # MFD_CLOEXEC


def share(store: Store, rank: int, size: int, timeout: timedelta, part: int) -> int | None:
    """Have all ranks open the same memory, or none of them, if one cannot.

    Args:
        store: The group's own part of torch's store.
        rank: This process' rank in the group.
        size: How many ranks the group has.
        timeout: How long to wait for the others.
        part: Bytes of each rank.

    Returns:
        A descriptor, of ``size`` times ``part`` bytes, or None.
    """
    if size == 1:
        return None
    own = PrefixStore("memory", store)
    if rank == 0:
        return _offer(own, size, timeout, part)
    return _accept(own, rank, timeout, part)


def _offer(store: Store, size: int, timeout: timedelta, part: int) -> int | None:
    memory, answer = None, _YES
    try:
        memory = _create_nameless(f"manycpu-{secrets.token_hex(8)}")
        os.ftruncate(memory, size * part)
        _reserve(memory, 0, part)
        place = Path(f"/proc/{os.getpid()}/fd/{memory}")
        store.set(_OFFER, f"{_host()}\n{place}\n{place.readlink()}")
    except OSError as error:
        answer = str(error)
        store.set(_OFFER, _ELSEWHERE)
    answers = [str(rank) for rank in range(1, size)]
    store.wait(answers, timeout)
    all_answers = {answer, *(store.get(rank).decode() for rank in answers)}
    store.set(_VERDICT, _YES if all_answers == {_YES} else _ELSEWHERE)
    faults = all_answers - {_YES, _ELSEWHERE}
    if faults:
        _warn(f"ccl: the ranks of this host share no memory, so that allreduce is slower: {min(faults)}")
    return _agreed(store, memory)


def _accept(store: Store, rank: int, timeout: timedelta, part: int) -> int | None:
    memory, answer = None, _ELSEWHERE
    store.wait([_OFFER], timeout)
    offer = store.get(_OFFER).decode().split("\n")
    if offer[0] == _host():
        try:
            place = Path(offer[1])
            if str(place.readlink()) != offer[2]:  # no other memory has that name: open nothing else
                raise FileNotFoundError(f"{place} is not {offer[2]}")
            memory, answer = os.open(place, os.O_RDWR | os.O_CLOEXEC), _YES
            _reserve(memory, rank * part, part)
        except OSError as error:
            answer = str(error)
    store.set(str(rank), answer)
    store.wait([_VERDICT], timeout)
    return _agreed(store, memory)


@cache
def _warn(message: str) -> None:
    """Warn once, for all groups."""
    warn(message)


def _create_nameless(label: str) -> int:
    # Not os.memfd_create: a Python that was built for old systems does not have it.
    libc = ctypes.CDLL(None, use_errno=True)
    memory: int = libc.memfd_create(label.encode(), _CLOEXEC)
    if memory < 0:
        raise OSError(ctypes.get_errno(), f"memfd_create: {os.strerror(ctypes.get_errno())}")
    return memory


def _host() -> str:
    """Identify this host, or the part of it that has one numbering of processes."""
    boot, namespace = kernel.boot_id(), kernel.pid_namespace()
    if boot is None or namespace is None:
        return f"{socket.gethostname()} {os.getpid()}"
    return f"{socket.gethostname()} {boot} {namespace}"


def _reserve(memory: int, start: int, size: int) -> None:
    """Allocate memory now: on the NUMA node of the rank that uses it most; fails if there is none left."""
    os.posix_fallocate(memory, start, size)


def _agreed(store: Store, memory: int | None) -> int | None:
    if memory is None or store.get(_VERDICT).decode() == _YES:
        return memory
    os.close(memory)
    return None
