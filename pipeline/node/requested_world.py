"""Compare the world that the run asked for, read from the environment, with the one there is."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from manycpu.pipeline.node.node_exit import PROOF, NodeExit
from manycpu.pipeline.node.rank_environment import Rank

__all__ = ["AUTO", "RequestedWorld", "of"]

AUTO: Final = "auto"
"""The backend of a run that names none: the best that every rank has."""
_REASON: Final = 500  # characters of why there is no ccl: a compiler may have much to say


class RequestedWorld(NamedTuple):
    """Nodes (least and greatest) and processes on each; None where nobody asked for a number."""

    nodes: tuple[int, int] | None
    processes: int
    backend: str | None
    """A name, :data:`AUTO`, or None: the choice is the script's."""
    spread: bool
    timeout: int
    devices: int | None = None
    """Devices of XLA that each process drives; None: it trains on CPUs."""

    def check_world(self, rank: Rank) -> None:
        """Compare the world that the launcher made with the one asked for.

        Raises:
            NodeExit: 87, they differ.
        """
        if self.nodes is None:
            return
        low, high = (nodes * self.processes for nodes in self.nodes)
        if low <= rank.world_size <= high and rank.world_size % self.processes == 0:
            return
        raise NodeExit(
            PROOF,
            f"proof of scale failed: {self} were asked for, and {rank.launcher} gave this process a world of "
            f"{rank.world_size} (it is rank {rank.rank}). {_why(rank)}",
        )

    def check_meeting(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Compare the ranks' records with the requested world; every rank comes to the same verdict.

        Raises:
            NodeExit: 87, with everything that is wrong.
        """
        if faults := list(self._faults(records)):
            raise NodeExit(PROOF, f"proof of scale failed: {self} were asked for, and {'; '.join(faults)}.")

    def choose_backend(self, records: Sequence[Mapping[str, Any]]) -> tuple[str | None, str | None]:
        """Choose the backend by what all ranks have: they come to the same choice.

        Args:
            records: Of each rank; ``no_ccl`` says why it cannot have ccl, and is empty where it can.

        Returns:
            The backend, and why it was chosen; None where there was nothing to choose.
        """
        if self.backend != AUTO:
            return self.backend, None
        lacking = [record for record in records if record["no_ccl"]]
        if not lacking:
            return "ccl", "run.backend is left out, and every rank has ccl"
        first = min(lacking, key=lambda record: int(record["rank"]))
        who = f"rank {first['rank']} on {first['host']}"
        return "gloo", f"run.backend is left out, and {who} has no ccl: {first['no_ccl'][:_REASON]}"

    def _faults(self, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        ranks = sorted(record["rank"] for record in records)
        worlds = sorted({record["world_size"] for record in records})
        if worlds != [len(records)]:
            yield f"the ranks speak of worlds of {worlds}, and {len(records)} of them met"
        if ranks != list(range(len(records))):
            yield f"the ranks that met are {ranks}"
        backends = sorted({str(record["backend"]) for record in records})
        if len(backends) > 1:
            yield f"the ranks ask for different backends, {' and '.join(backends)} (run.backend)"
        hosts = sorted({record["machine"] for record in records})
        least = self.nodes[0] if self.nodes else 1
        if self.spread and len(hosts) < least:
            yield f"they run on {', '.join(hosts)} alone, where run.spread requires {least} machines"

    def __str__(self) -> str:
        if self.nodes is None:
            return "no particular number of processes"
        low, high = self.nodes
        return f"{low if low == high else f'{low} to {high}'} nodes with {self.processes} processes each"


def of(environ: Mapping[str, str]) -> RequestedWorld:
    """Read the requested world; outside of a run nothing in particular was asked for."""
    nodes, processes = environ.get("MANYCPU_NNODES"), environ.get("MANYCPU_NPROC_PER_NODE")
    low, _, high = (nodes or "1").partition(":")
    return RequestedWorld(
        nodes=(int(low), int(high or low)) if nodes or processes else None,
        processes=int(processes or 1),
        backend=environ.get("MANYCPU_BACKEND") or None,
        spread=environ.get("MANYCPU_SPREAD") == "require",
        timeout=int(environ.get("MANYCPU_START_TIMEOUT") or 900),
        devices=int(environ.get("MANYCPU_XLA_DEVICES") or 0) or None,
    )


def _why(rank: Rank) -> str:
    if rank.launcher == "none":
        return "No launcher that is known set its rank: an mpirun of another MPI, or none at all?"
    if rank.world_size == 1:
        return "Each process is alone: two MPIs that do not match, or an mpirun that ran one process?"
    return "The launcher started another number of processes than the run asks for."
