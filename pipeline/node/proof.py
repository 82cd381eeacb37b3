"""Proof of scale: the ranks meet and say who they are, before the script may run."""

import contextlib
import json
import os
import secrets
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from manycpu.pipeline.node.emit import say
from manycpu.pipeline.node.node_exit import PROOF, NodeExit
from manycpu.pipeline.node.rank_environment import Rank
from manycpu.pipeline.node.requested_world import RequestedWorld
from manycpu.pipeline.spec import exit_records
from manycpu.pipeline.spec.cpu_plan import CpuPlan
from manycpu.pipeline.spec.kernel import address_towards

__all__ = ["Meeting", "meet"]

# Rank 0 serves the store: it stays for as long as the process, for the script meets there too (env://).
_KEPT: list[Store] = []
_LEAVING: Final = timedelta(seconds=10)  # in which the others read what was exchanged: milliseconds


class Meeting(NamedTuple):
    """Who met: a record of each rank, in the order of ranks."""

    me: dict[str, Any]
    records: tuple[dict[str, Any], ...]
    finished: str = ""
    """The name of an earlier meeting whose ranks have all finished: there is nothing left to do."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.records)

    @property
    def backend(self) -> str | None:
        """The collective backend that all of them use; None leaves the choice to the script."""
        chosen: str | None = self.me["backend"]
        return chosen


def meet(
    rank: Rank,
    requested: RequestedWorld,
    plan: CpuPlan,
    no_ccl: str,
    listener: socket.socket | None = None,
) -> Meeting:
    """Exchange records with all ranks, judge them, and choose the backend by them.

    Args:
        rank: This rank.
        requested: What the run asked for.
        plan: Its CPU plan.
        no_ccl: Why this rank cannot have the backend ccl; empty where it can.
        listener: What rank 0 is to serve the store on; None: on a port that it takes by itself.

    Raises:
        NodeExit: 87, somebody did not come in time, or who came is not who was asked for.
    """
    me = _describe(rank, requested, plan) | {"no_ccl": no_ccl}
    # A port that is taken for the store is served also for one rank alone: the script meets itself there.
    met = rank.world_size > 1 or listener is not None
    records = _exchange(rank, me, requested, listener) if met else [me]
    if finished := max(record["finished"] for record in records):  # one who sees it is enough
        return Meeting(me, tuple(records), finished)
    requested.check_meeting(records)
    # Each node counts its own restarts, a new one from nothing: who was there longest gives the number.
    me["round"] = max(record["round"] for record in records)
    # Membership may change within a round: the meeting has a name of its own, which rank 0 brings.
    me["meeting"] = next(record["meeting"] for record in records if record["rank"] == 0)
    me["backend"], reason = requested.choose_backend(records)
    shown = ["rank", "world_size", "host", "hostname", "cpus", "threads", "backend", "round", "meeting"]
    shown += ["devices"] if requested.devices else []
    said_once = {"backend_reason": reason} if reason and rank.rank == 0 else {}
    say("proof", **{name: me[name] for name in shown}, **said_once)
    return Meeting(me, tuple(sorted(records, key=lambda record: int(record["rank"]))))


def _describe(rank: Rank, requested: RequestedWorld, plan: CpuPlan) -> dict[str, Any]:
    host = os.environ.get("MANYCPU_HOST") or socket.gethostname()
    return {
        "rank": rank.rank,
        "world_size": rank.world_size,
        "host": host,
        "hostname": socket.gethostname(),
        "machine": os.environ.get("MANYCPU_MACHINE") or host,
        "address": _own_address(),
        "cpus": plan.cores,
        "threads": plan.threads,
        "backend": requested.backend,
        "devices": requested.devices,
        "round": _round(),
        "meeting": secrets.token_hex(4),
        "finished": _finished(),
    }


def _finished() -> str:
    """Name the round of this attempt that all of its ranks have finished; empty where none is seen."""
    records: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, KeyError):
        records = exit_records.finished_round(Path(os.environ["MANYCPU_EXITS"]))
    return str(records[0]["meeting"]) if records else ""


def _exchange(
    rank: Rank, me: dict[str, Any], requested: RequestedWorld, listener: socket.socket | None
) -> list[dict[str, Any]]:
    limit = timedelta(seconds=requested.timeout)
    try:
        base = _store(rank, limit, listener)
    except DistError as error:
        raise NodeExit(PROOF, _unreachable(rank, requested, error)) from error
    _KEPT.append(base)
    store = PrefixStore(_place(), base)
    # Seats in the order of arrival, not by rank: two processes of the same rank are both seen.
    seat = store.add("seats", 1) - 1
    store.set(f"seat/{seat}", json.dumps(me))
    if seat >= rank.world_size:
        raise NodeExit(PROOF, f"proof of scale failed: {seat + 1} processes came for {rank.world_size} ranks")
    seats = [f"seat/{number}" for number in range(rank.world_size)]
    try:
        store.wait(seats, limit)
        records = [json.loads(store.get(name)) for name in seats]
        store.set(f"read/{seat}", "")
    except DistError as error:
        raise NodeExit(PROOF, _missing(rank, store, seats, requested, error)) from error
    if rank.rank == 0 and not _agent_serves():  # who serves the store leaves last, also where it will refuse
        with contextlib.suppress(DistError):
            store.wait([f"read/{number}" for number in range(rank.world_size)], min(limit, _LEAVING))
    return records


def _store(rank: Rank, limit: timedelta, listener: socket.socket | None) -> Store:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if listener is not None:
        own: dict[str, Any] = {"is_master": True, "multi_tenant": True, "master_listen_fd": listener.detach()}
        return TCPStore(address, port, None, timeout=limit, **own)
    # Under torchrun the agent serves the store, and every rank is a client of it.
    if rank.rank == 0 and not _agent_serves():
        try:
            return TCPStore(address, port, None, is_master=True, timeout=limit, multi_tenant=True)
        except DistError:
            # Somebody serves there already: another rank 0 is found out only by meeting it.
            limit = min(limit, timedelta(seconds=10))
    return TCPStore(address, port, None, is_master=False, timeout=limit)


def _place() -> str:
    # An agent's store outlives its ranks and serves every round; else each round has one of its own.
    return f"proof/{_round()}" if _agent_serves() else "proof"


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _unreachable(rank: Rank, requested: RequestedWorld, error: Exception) -> str:
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return (
        f"proof of scale failed: rank {rank.rank} could not reach the meeting point {where} within "
        f"{requested.timeout} s (run.start_timeout): {str(error).splitlines()[0]}"
    )


def _missing(rank: Rank, store: Store, seats: list[str], requested: RequestedWorld, error: Exception) -> str:
    try:
        came = [json.loads(store.get(name)) for name in seats if store.check([name])]
    except DistError:  # who serves it has given up a moment before
        return (
            f"proof of scale failed: rank {rank.rank} lost the meeting point, which rank 0 serves: "
            f"{str(error).splitlines()[0]}"
        )
    who = ", ".join(f"rank {record['rank']} on {record['host']}" for record in came)
    return (
        f"proof of scale failed: {len(came)} of {len(seats)} ranks came within {requested.timeout} s "
        f"(run.start_timeout): {who}"
    )


def _round() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def _own_address() -> str:
    """Find the address by which this host reaches the meeting point; empty where there is no way to it."""
    try:
        return address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    except OSError:
        return ""
