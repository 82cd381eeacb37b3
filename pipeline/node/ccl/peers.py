"""What the ranks of a group have in common: connections with rank 0, and memory where they are on one host.

A process that dies closes its connection. The memory has no name in any file system: it takes no room of
/dev/shm, and the kernel frees it when the last of its ranks ends, even by a signal.
"""

import ctypes
import os
import secrets
import socket
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from manycpu.pipeline.node.emit import warn
from manycpu.pipeline.spec import kernel

_KEY = "peers"
_WELCOME = b"+"
_GREETING_TIMEOUT_S = 10.0
_RETRY_INTERVAL_S = 0.05
_OFFER: Final = "offer"
_VERDICT: Final = "verdict"
_ELSEWHERE: Final = "elsewhere"
_YES: Final = "yes"
_NO: Final = "no"
_CLOEXEC: Final = 1  # MFD_CLOEXEC


class Peers(NamedTuple):
    """A rank's connections, the names of the ranks at their other ends, and a token of this meeting alone.

    Rank 0 has a connection with every other rank, in the order of ranks; the others have one with rank 0.
    """

    connections: list[socket.socket]
    names: list[str]
    token: str


def connect(store: Store, rank: int, size: int, timeout: timedelta, address: str) -> Peers:
    """Connect rank 0 with every other rank; returns the connections of this rank.

    Args:
        store: The group's own part of torch's store.
        rank: This process' rank in the group.
        size: How many ranks the group has.
        timeout: How long to wait for the others.
        address: An address of this host that the other ranks can reach.

    Raises:
        TimeoutError: A rank did not come; the message names the missing ones.
    """
    if size == 1:
        return Peers([], [], "alone")
    deadline = time.monotonic() + timeout.total_seconds()
    return _serve(store, size, deadline, address) if rank == 0 else _join(store, rank, deadline)


def _name() -> str:
    host = os.environ.get("MANYCPU_HOST") or socket.gethostname()
    return f"rank {os.environ.get('RANK', '?')} on {host}"


def _serve(store: Store, size: int, deadline: float, address: str) -> Peers:
    """On rank 0: publish where it listens, and accept a connection of every other rank.

    A TimeoutError names the ranks that did not come by the deadline.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    token = secrets.token_hex(8)
    joined: dict[int, tuple[socket.socket, str]] = {}
    with socket.create_server((address, 0), family=family, backlog=size) as server:
        store.set(_KEY, f"{address} {server.getsockname()[1]} {token} {_name()}")
        while len(joined) < size - 1:
            missing = [str(other) for other in range(1, size) if other not in joined]
            missing_ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            server.settimeout(_seconds_left(deadline, f"{missing_ranks} of the group did not come"))
            try:
                link, _ = server.accept()
            except TimeoutError:
                continue  # `_seconds_left` names the missing ranks
            try:
                # A program that connects and is silent, such as a port scan, must not use up the time of all.
                rank, name = _greeting(link, token, min(deadline, time.monotonic() + _GREETING_TIMEOUT_S))
            except (OSError, ValueError):
                link.close()  # of a program that is not in the group; a rank that was late connects again
                continue
            joined[rank] = (link, name)
    ordered = [joined[rank] for rank in sorted(joined)]
    return Peers([link for link, _ in ordered], [name for _, name in ordered], token)


def _seconds_left(deadline: float, why: str) -> float:
    """Return the seconds until a deadline; if it has passed, raise a TimeoutError that says ``why``."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError(f"ccl: {why} in time")
    return seconds


def _greeting(link: socket.socket, token: str, deadline: float) -> tuple[int, str]:
    """Read which rank has connected, and welcome it; returns its number in the group and its name.

    Raises:
        ValueError: The program did not send the token, which only the group's ranks can read in their store.
        OSError: It sent nothing in time, or the connection broke.
    """
    link.settimeout(_seconds_left(deadline, "a rank of the group connected and did not say which it is"))
    with link.makefile("r", encoding="utf-8", newline="\n") as stream:
        sent_token, rank, name = stream.readline(512).rstrip("\n").split(" ", 2)
    if not secrets.compare_digest(sent_token, token):
        raise ValueError("not one of the group")
    link.sendall(_WELCOME)
    _tune(link)
    return int(rank), name


def _join(store: Store, rank: int, deadline: float) -> Peers:
    """On every other rank: connect to rank 0, whose address and token are in the store.

    Tries until the deadline, and then raises a TimeoutError.
    """
    store.wait([_KEY], timedelta(seconds=_seconds_left(deadline, "rank 0 of the group did not come")))
    while True:
        # Read it in each try: torchrun may have replaced rank 0, and the store still have the old address.
        address, port, token, name = store.get(_KEY).decode().split(" ", 3)
        seconds = _seconds_left(deadline, f"{name}, rank 0 of the group, did not answer at {address}:{port}")
        with suppress(OSError):
            link = socket.create_connection((address, int(port)), timeout=seconds)
            with suppress(OSError):
                link.sendall(f"{token} {rank} {_name()}\n".encode())
                if link.recv(1) == _WELCOME:
                    _tune(link)
                    return Peers([link], [name], token)
            link.close()
        time.sleep(_RETRY_INTERVAL_S)


def _tune(link: socket.socket) -> None:
    """Prepare a connection for collectives: no timeout, no delay of small packets, and keepalives.

    By keepalives the kernel notices within a minute that a whole host is gone.
    """
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def share(store: Store, rank: int, size: int, timeout: timedelta, part: int) -> int | None:
    """Have all ranks open the same memory, with ``part`` bytes for each rank.

    Returns a descriptor of the memory. If one rank cannot open it, or there is only one rank, all get None.
    """
    if size == 1:
        return None
    keys = PrefixStore("memory", store)
    memory = _offer(keys, size, timeout, part) if rank == 0 else _accept(keys, rank, timeout, part)
    if memory is None or keys.get(_VERDICT).decode() == _YES:
        return memory
    os.close(memory)
    return None


def _offer(store: Store, size: int, timeout: timedelta, part: int) -> int | None:
    """On rank 0: create the memory, collect the answers of all ranks, and publish whether all have it.

    Returns a descriptor, or None if it could not be created; the caller reads the verdict.
    """
    memory = None
    answer = _YES  # of rank 0 itself
    try:
        memory = _create_nameless(f"manycpu-{secrets.token_hex(8)}")
        os.ftruncate(memory, size * part)
        _reserve(memory, 0, part)
        # Other processes can open it at this path. Where the path links to is unique to this memory.
        fd_path = Path(f"/proc/{os.getpid()}/fd/{memory}")
        store.set(_OFFER, f"{_host()}\n{fd_path}\n{fd_path.readlink()}")
    except OSError as error:
        answer = str(error)
        store.set(_OFFER, _ELSEWHERE)  # no rank is there, so none opens it
    others = [str(rank) for rank in range(1, size)]
    store.wait(others, timeout)
    all_answers = {answer, *(store.get(rank).decode() for rank in others)}
    store.set(_VERDICT, _YES if all_answers == {_YES} else _NO)
    faults = all_answers - {_YES, _ELSEWHERE}  # a rank on another host is no fault, and needs no warning
    if faults:
        _warn(f"ccl: the ranks of this host share no memory, so that collectives are slower: {min(faults)}")
    return memory


def _accept(store: Store, rank: int, timeout: timedelta, part: int) -> int | None:
    """On every other rank: open the memory of rank 0, if rank 0 is on this host; answer; await the verdict.

    Returns a descriptor, or None if it could not be opened; the caller reads the verdict.
    """
    memory = None
    answer = _ELSEWHERE
    store.wait([_OFFER], timeout)
    offer = store.get(_OFFER).decode().split("\n")
    if offer[0] == _host():
        try:
            fd_path = Path(offer[1])
            if str(fd_path.readlink()) != offer[2]:  # a later process may have that id: leave its files alone
                raise FileNotFoundError(f"{fd_path} is not {offer[2]}")
            memory, answer = os.open(fd_path, os.O_RDWR | os.O_CLOEXEC), _YES
            _reserve(memory, rank * part, part)
        except OSError as error:
            answer = str(error)
    store.set(str(rank), answer)
    store.wait([_VERDICT], timeout)
    return memory


@cache
def _warn(message: str) -> None:
    """Warn once, for all groups."""
    warn(message)


def _create_nameless(label: str) -> int:
    """Create memory that has no name in any file system; returns its descriptor."""
    # Not os.memfd_create: a Python that was built for old systems does not have it.
    libc = ctypes.CDLL(None, use_errno=True)
    memory: int = libc.memfd_create(label.encode(), _CLOEXEC)
    if memory < 0:
        raise OSError(ctypes.get_errno(), f"memfd_create: {os.strerror(ctypes.get_errno())}")
    return memory


def _host() -> str:
    """Return a text that is equal for two processes of one host and one PID namespace.

    Such processes can open each other's /proc/PID/fd. If the boot id or the namespace cannot be read, no
    other process gets an equal text.
    """
    boot, namespace = kernel.boot_id(), kernel.pid_namespace()
    if boot is None or namespace is None:
        return f"{socket.gethostname()} {os.getpid()}"
    return f"{socket.gethostname()} {boot} {namespace}"


def _reserve(memory: int, start: int, size: int) -> None:
    """Allocate memory now, on the NUMA node of this rank, which uses it most; OSError if none is left."""
    os.posix_fallocate(memory, start, size)
