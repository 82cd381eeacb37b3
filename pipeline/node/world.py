"""Read which rank of which world this process is, and which world the run asked for; compare the two."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from manycpu.pipeline.node.emit import NodeExit
from manycpu.pipeline.spec.exit_records import EXIT_PROOF

LAUNCHER: Final = "MANYCPU_LAUNCHER"
"""Variable with the launcher's name for messages; for a launcher that else sets torchrun's variables."""
AUTO: Final = "auto"
"""The backend of a run that names none: the best that every rank has."""
_REASON_LIMIT: Final = 500  # characters of why there is no ccl: a compiler may print a lot

# For each launcher the variable that identifies it, and its names for rank, world size, local rank and local
# world size. The order matters: torchrun and mpirun may run where an outer launcher left RANK behind.
_LAUNCHERS: Final = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "hydra": ("PMI_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "env": ("RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}


class RankError(ValueError):
    """The launcher's environment contradicts itself."""


class Rank(NamedTuple):
    """A rank and its world, which is all ranks that train together; numbered as torch does."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str

    def environment(self) -> dict[str, str]:
        """Build the variables that torch, and everything on top of torch, reads."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # in the order of the fields
        return {name: str(number) for name, number in zip(names, self, strict=False)}


ALONE: Final = Rank(0, 1, 0, 1, "none")


def read_rank(environ: Mapping[str, str]) -> Rank:
    """Read the rank from the launcher's variables; without a launcher the process is alone in its world.

    Raises:
        RankError: A number is missing, is not a number, or is out of range.
    """
    launcher = next((name for name, (variable, *_) in _LAUNCHERS.items() if environ.get(variable)), None)
    if launcher is None:
        return ALONE
    names = _LAUNCHERS[launcher][1:]
    # A user may set RANK and WORLD_SIZE by hand, without the two local ones: one process on each node.
    defaults = (None, None, "0", "1")
    numbers: dict[str, int] = {}
    for name, default in zip(names, defaults, strict=True):
        text = environ.get(name, default)
        if text is None or not text.isdecimal():
            raise RankError(f"{name} should be a number and is {text!r}")
        numbers[name] = int(text)
    rank, size, local_rank, local_size = numbers.values()
    if not (rank < size and local_rank < local_size <= size):
        values = ", ".join(f"{name}={number}" for name, number in numbers.items())
        raise RankError(f"this is no rank of any world: {values}")
    return Rank(rank, size, local_rank, local_size, environ.get(LAUNCHER, launcher))


class RequestedWorld(NamedTuple):
    """The world that the run asks for: number of nodes and of processes, backend and devices."""

    nodes: tuple[int, int] | None
    """Least and greatest number of nodes; None: the run gives no number."""
    processes: int
    """Processes on each node."""
    backend: str | None
    """A name, :data:`AUTO`, or None: the script chooses."""
    spread: bool
    """Whether each node must be another machine."""
    timeout: int
    """Seconds to wait for all ranks."""
    devices: int | None = None
    """Devices of XLA that each process drives; None: it trains on CPUs."""

    def check_world(self, rank: Rank) -> None:
        """End the rank with exit code 87 if the launcher made another world than the run asks for."""
        if self.nodes is None:
            return
        least, greatest = (nodes * self.processes for nodes in self.nodes)
        if least <= rank.world_size <= greatest and rank.world_size % self.processes == 0:
            return
        if rank.launcher == "none":
            why = "No known launcher has set its rank: an mpirun of another MPI, or none at all?"
        elif rank.world_size == 1:
            why = "Each process is alone: two MPIs that do not match, or an mpirun that ran one process?"
        else:
            why = "The launcher started another number of processes than the run asks for."
        raise NodeExit(
            EXIT_PROOF,
            f"proof of scale failed: {self} were asked for, and {rank.launcher} gave this process a world of "
            f"{rank.world_size} (it is rank {rank.rank}). {why}",
        )

    def check_meeting(self, records: Sequence[Mapping[str, Any]]) -> None:
        """End the rank with exit code 87 and all faults if the ranks' records do not fit the request.

        All ranks have the same records, so all of them end.
        """
        faults = []
        ranks = sorted(record["rank"] for record in records)
        worlds = sorted({record["world_size"] for record in records})
        if worlds != [len(records)]:
            faults.append(f"the ranks report worlds of {worlds}, and {len(records)} of them met")
        if ranks != list(range(len(records))):
            faults.append(f"the ranks that met are {ranks}")
        backends = sorted({str(record["backend"]) for record in records})
        if len(backends) > 1:
            faults.append(f"the ranks ask for different backends, {' and '.join(backends)} (run.backend)")
        hosts = sorted({record["host"] for record in records})
        least = self.nodes[0] if self.nodes else 1
        if self.spread and len(hosts) < least:
            faults.append(f"they run on {', '.join(hosts)} alone, where run.spread requires {least} machines")
        if faults:
            message = f"proof of scale failed: {self} were asked for, and {'; '.join(faults)}."
            raise NodeExit(EXIT_PROOF, message)

    def choose_backend(self, records: Sequence[Mapping[str, Any]]) -> tuple[str | None, str | None]:
        """Choose the backend: the one that the run names, else ccl if all ranks have it, else gloo.

        Returns the backend (None: the script chooses), and the reason (None: the run has decided).
        """
        if self.backend != AUTO:
            return self.backend, None
        without_ccl = [record for record in records if record["no_ccl"]]
        if not without_ccl:
            return "ccl", "run.backend is left out, and every rank has ccl"
        lowest = min(without_ccl, key=lambda record: int(record["rank"]))
        who = f"rank {lowest['rank']} on {lowest['host']}"
        return "gloo", f"run.backend is left out, and {who} has no ccl: {lowest['no_ccl'][:_REASON_LIMIT]}"

    def __str__(self) -> str:
        if self.nodes is None:
            return "no particular number of processes"
        low, high = self.nodes
        count = str(low) if low == high else f"{low} to {high}"
        return f"{count} nodes with {self.processes} processes each"


def read_requested(environ: Mapping[str, str]) -> RequestedWorld:
    """Read the requested world from the run's variables.

    With neither MANYCPU_NNODES nor MANYCPU_NPROC_PER_NODE, any number of processes is accepted. With one of
    them, the other counts as 1.
    """
    nodes, processes = environ.get("MANYCPU_NNODES"), environ.get("MANYCPU_NPROC_PER_NODE")
    least, _, greatest = (nodes or "1").partition(":")  # "4", or "2:4" for two to four nodes
    return RequestedWorld(
        nodes=(int(least), int(greatest or least)) if nodes or processes else None,
        processes=int(processes or 1),
        backend=environ.get("MANYCPU_BACKEND") or None,
        spread=environ.get("MANYCPU_SPREAD") == "require",
        timeout=int(environ.get("MANYCPU_START_TIMEOUT") or 900),
        devices=int(environ.get("MANYCPU_XLA_DEVICES") or 0) or None,
    )
