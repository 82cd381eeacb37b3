"""Proof of scale: all ranks meet and exchange records of themselves, before the script may run."""

import contextlib
import ipaddress
import json
import os
import secrets
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from manycpu.pipeline.node.emit import NodeExit, say, warn
from manycpu.pipeline.node.world import Rank, RequestedWorld
from manycpu.pipeline.spec import exit_records
from manycpu.pipeline.spec.cpu_plan import CpuPlan
from manycpu.pipeline.spec.exit_records import EXIT_PROOF
from manycpu.pipeline.spec.kernel import address_towards, interface_of

# Rank 0 serves the store. It is kept until the process ends, because the script meets there too (env://).
_STORES: list[Store] = []
_READ_TIMEOUT: Final = timedelta(seconds=10)  # for the other ranks to read the records: it takes milliseconds
_OTHER_SERVER_TIMEOUT: Final = timedelta(seconds=10)  # to meet at a server that another process started
_ANY_PORT: Final = 9  # only the route matters: no packet is sent


class Meeting(NamedTuple):
    """The ranks that met: a record of each, in the order of ranks."""

    me: dict[str, Any]  # the record of this rank
    records: tuple[dict[str, Any], ...]
    backend: str | None = None
    """The collective backend that all of them use; None: the script chooses."""
    finished: str = ""
    """Name of an earlier meeting, if all of its ranks have finished: nothing is left to do; else empty."""


def meet(
    rank: Rank,
    requested: RequestedWorld,
    plan: CpuPlan,
    no_ccl: str,
    listener: socket.socket | None = None,
) -> Meeting:
    """Exchange records with all ranks, check them, choose the backend from them, and report the proof.

    If all ranks of an earlier meeting have finished, nothing is checked or reported, and the backend is None.
    The rank ends with exit code 87 if a rank does not come in time, or if the ranks that come are not those
    that the run asks for.

    Args:
        rank: This rank.
        requested: The world that the run asks for.
        plan: This rank's CPU plan.
        no_ccl: Why this rank cannot use the backend ccl; empty where it can.
        listener: The socket on which rank 0 serves the store; None: rank 0 opens MASTER_PORT itself.
    """
    me = _own_record(rank, requested, plan) | {"no_ccl": no_ccl}
    # With a listener the store is needed for one rank too: the script meets itself there.
    must_meet = rank.world_size > 1 or listener is not None
    records = _exchange(rank, me, requested, listener) if must_meet else [me]
    # A name sorts after an empty text: one rank that knows of a finished meeting is enough.
    if finished := max(record["finished"] for record in records):
        return Meeting(me, tuple(records), finished=finished)
    requested.check_meeting(records)
    # Each node counts its own restarts, and a new node starts at 0: the oldest node has the right number.
    me["round"] = max(record["round"] for record in records)
    # The members may change within a round, so each meeting has a name of its own, chosen by rank 0.
    me["meeting"] = next(record["meeting"] for record in records if record["rank"] == 0)
    me["backend"], reason = requested.choose_backend(records)
    reported = ["rank", "world_size", "host", "hostname", "cpus", "threads", "backend", "round", "meeting"]
    if requested.devices:
        reported.append("devices")
    of_rank_0 = {"backend_reason": reason} if reason and rank.rank == 0 else {}  # it is the same for all
    say("proof", **{name: me[name] for name in reported}, **of_rank_0)
    return Meeting(me, tuple(sorted(records, key=lambda record: int(record["rank"]))), me["backend"])


def choose_interface(meeting: Meeting) -> None:
    """Set GLOO_SOCKET_IFNAME, gloo's network interface, unless it is set already or there is only one rank.

    By itself gloo may choose an interface that the other ranks cannot reach. If all ranks are on one machine,
    choose the loopback interface. Else choose the interface that leads to another machine. If none is found,
    warn, and let gloo choose.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME") or len(meeting.records) == 1:
        return
    me = (meeting.me["host"], meeting.me["address"])  # identifies this machine, or this pod
    elsewhere = [record for record in meeting.records if (record["host"], record["address"]) != me]
    address = str(meeting.me["address"])  # by which this host reaches the meeting point; empty: not known
    if not elsewhere:
        address = "127.0.0.1"
    elif not address or ipaddress.ip_address(address).is_loopback:
        # The host of the meeting point reaches itself over the loopback: use the route to another host.
        address = _own_address_towards(str(elsewhere[0]["address"]), _ANY_PORT)
    interface = interface_of(address)
    if interface is None:
        warn(f"no interface has the address {address!r}: gloo chooses one by itself; set GLOO_SOCKET_IFNAME")
        return
    os.environ["GLOO_SOCKET_IFNAME"] = interface


def _own_address_towards(address: str, port: int) -> str:
    """Find the address by which this host reaches another one; empty where there is no route."""
    try:
        return address_towards(address, port)
    except OSError:
        return ""


def _own_record(rank: Rank, requested: RequestedWorld, plan: CpuPlan) -> dict[str, Any]:
    """Build the record of this rank, which all other ranks read when they meet."""
    host = os.environ.get("MANYCPU_HOST") or socket.gethostname()
    finished: list[dict[str, Any]] = []  # records of this attempt's last round that all ranks finished
    with contextlib.suppress(OSError, KeyError):  # they cannot be read now, or the run keeps none
        finished = exit_records.finished_round(Path(os.environ["MANYCPU_EXITS"]))
    return {
        "rank": rank.rank,
        "world_size": rank.world_size,
        "host": host,
        "hostname": socket.gethostname(),  # in a pod, the pod's name; host is the name of its Kubernetes node
        "address": _own_address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
        "cpus": plan.cores,
        "threads": plan.threads,
        "backend": requested.backend,
        "devices": requested.devices,
        "round": _restart_count(),
        "meeting": secrets.token_hex(4),  # a proposal: all ranks take that of rank 0
        "finished": str(finished[0]["meeting"]) if finished else "",
    }


def _exchange(
    rank: Rank, me: dict[str, Any], requested: RequestedWorld, listener: socket.socket | None
) -> list[dict[str, Any]]:
    """Put this rank's record into torch's key-value store, and return the records of all ranks.

    The records are in the order in which the ranks came. The store is served by rank 0, or by torchrun's
    agent. The rank ends with exit code 87 if the store is not reached or a rank is missing after
    ``requested.timeout`` seconds, or if more processes come than there are ranks.
    """
    limit = timedelta(seconds=requested.timeout)
    try:
        base = _connect(rank, limit, listener)
    except DistError as error:
        raise NodeExit(
            EXIT_PROOF,
            f"proof of scale failed: rank {rank.rank} could not reach the meeting point "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within "
            f"{requested.timeout} s (run.start_timeout): {str(error).splitlines()[0]}",
        ) from error
    _STORES.append(base)
    # An agent's store outlives its ranks and serves every round; any other store serves one round only.
    store = PrefixStore(f"proof/{_restart_count()}" if _agent_serves() else "proof", base)
    # Seats in the order of arrival, not by rank: so two processes with the same rank are both seen.
    seat = store.add("seats", 1) - 1
    store.set(f"seat/{seat}", json.dumps(me))
    if seat >= rank.world_size:
        message = f"proof of scale failed: {seat + 1} processes came for {rank.world_size} ranks"
        raise NodeExit(EXIT_PROOF, message)
    seats = [f"seat/{number}" for number in range(rank.world_size)]
    try:
        store.wait(seats, limit)
        records = [json.loads(store.get(name)) for name in seats]
        store.set(f"read/{seat}", "")  # rank 0 waits for this before it leaves
    except DistError as error:
        raise NodeExit(EXIT_PROOF, _describe_missing(rank, store, seats, requested, error)) from error
    # Rank 0 serves the store: it leaves last, also where it refuses the run.
    if rank.rank == 0 and not _agent_serves():
        with contextlib.suppress(DistError):  # a rank that has died since it came never reads
            store.wait([f"read/{number}" for number in range(rank.world_size)], min(limit, _READ_TIMEOUT))
    return records


def _connect(rank: Rank, limit: timedelta, listener: socket.socket | None) -> Store:
    """Connect to the store at MASTER_ADDR. Rank 0 also serves it, unless torchrun's agent does.

    ``listener`` is the socket to serve on, which a launcher may have opened for rank 0; None on other ranks.

    Raises:
        DistError: The store was not reached within ``limit``.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # multi_tenant: the store that the script opens at this port, in this process, shares the server.
    if listener is not None:
        file = listener.detach()
        return TCPStore(
            address, port, None, is_master=True, timeout=limit, multi_tenant=True, master_listen_fd=file
        )
    if rank.rank == 0 and not _agent_serves():
        try:
            return TCPStore(address, port, None, is_master=True, timeout=limit, multi_tenant=True)
        except DistError:
            # Something serves at that port already. Only a meeting there shows whether it is another rank 0.
            limit = min(limit, _OTHER_SERVER_TIMEOUT)
    return TCPStore(address, port, None, is_master=False, timeout=limit)


def _agent_serves() -> bool:
    """Whether torchrun's agent, the parent of the ranks of a node, serves the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _restart_count() -> int:
    """Return this rank's round: how often torchrun has restarted the ranks of this node."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def _describe_missing(
    rank: Rank, store: Store, seats: list[str], requested: RequestedWorld, error: Exception
) -> str:
    """Build the message for a timeout: it names the ranks that came in time."""
    try:
        arrived = [json.loads(store.get(name)) for name in seats if store.check([name])]
    except DistError:  # rank 0 timed out a moment earlier, and its store is gone
        return (
            f"proof of scale failed: rank {rank.rank} lost the meeting point, which rank 0 serves: "
            f"{str(error).splitlines()[0]}"
        )
    names = ", ".join(f"rank {record['rank']} on {record['host']}" for record in arrived)
    return (
        f"proof of scale failed: {len(arrived)} of {len(seats)} ranks came within {requested.timeout} s "
        f"(run.start_timeout): {names}"
    )
