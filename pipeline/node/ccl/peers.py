"""Connect rank 0 of a group with each other rank: a process that dies closes its connection."""

import contextlib
import os
import secrets
import socket
import time
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["Peers", "connect"]

_KEY = "peers"
_WELCOME = b"+"
_RETRY_INTERVAL_S = 0.05


class Peers(NamedTuple):
    """Connections, the ranks at their other ends by name, and a token of this meeting of the group alone."""

    connections: list[socket.socket]
    names: list[str]
    token: str


def connect(store: Store, rank: int, size: int, timeout: timedelta, address: str) -> Peers:
    """Connect: to every other rank on rank 0, to rank 0 elsewhere.

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
    if rank == 0:
        return _serve(store, size, deadline, address)
    return _join(store, rank, deadline)


def _name() -> str:
    host = os.environ.get("MANYCPU_HOST") or socket.gethostname()
    return f"rank {os.environ.get('RANK', '?')} on {host}"


def _serve(store: Store, size: int, deadline: float, address: str) -> Peers:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    token = secrets.token_hex(8)
    came: dict[int, tuple[socket.socket, str]] = {}
    with socket.create_server((address, 0), family=family, backlog=size) as server:
        store.set(_KEY, f"{address} {server.getsockname()[1]} {token} {_name()}")
        while len(came) < size - 1:
            missing = [str(other) for other in range(1, size) if other not in came]
            who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            server.settimeout(_seconds_left(deadline, f"{who} of the group did not come"))
            try:
                link, _ = server.accept()
                rank, name = _greeting(link, token, deadline)
            except TimeoutError:
                continue
            except (OSError, ValueError):
                link.close()  # of a program that is not in the group
                continue
            came[rank] = (link, name)
    ordered = [came[rank] for rank in sorted(came)]
    return Peers([link for link, _ in ordered], [name for _, name in ordered], token)


def _seconds_left(deadline: float, why: str) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError(f"ccl: {why} in time")
    return seconds


def _greeting(link: socket.socket, token: str, deadline: float) -> tuple[int, str]:
    link.settimeout(_seconds_left(deadline, "a rank of the group connected and did not say which it is"))
    with link.makefile("r", encoding="utf-8", newline="\n") as stream:
        greeting, rank, name = stream.readline(512).rstrip("\n").split(" ", 2)
    if not secrets.compare_digest(greeting, token):
        raise ValueError("not one of the group")
    link.sendall(_WELCOME)
    _tune(link)
    return int(rank), name


def _join(store: Store, rank: int, deadline: float) -> Peers:
    store.wait([_KEY], timedelta(seconds=_seconds_left(deadline, "rank 0 of the group did not come")))
    while True:
        # Read it in each try: torchrun may have replaced rank 0, and the store still have the old address.
        address, port, token, name = store.get(_KEY).decode().split(" ", 3)
        seconds = _seconds_left(deadline, f"{name}, rank 0 of the group, did not answer at {address}:{port}")
        link = _welcomed((address, int(port)), f"{token} {rank} {_name()}\n", seconds)
        if link is not None:
            _tune(link)
            return Peers([link], [name], token)
        time.sleep(_RETRY_INTERVAL_S)


def _welcomed(place: tuple[str, int], greeting: str, timeout: float) -> socket.socket | None:
    with contextlib.suppress(OSError):
        link = socket.create_connection(place, timeout=timeout)
        with contextlib.suppress(OSError):
            link.sendall(greeting.encode())
            if link.recv(1) == _WELCOME:
                return link
        link.close()
    return None


def _tune(link: socket.socket) -> None:
    """Enable keepalives, so that the kernel notices within a minute that a whole host is gone."""
    link.settimeout(None)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
