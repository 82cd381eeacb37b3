"""Read which rank of which world this process is, from the environment that its launcher gave it."""

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = ["ALONE", "LAUNCHER", "Rank", "RankError", "of"]


class RankError(ValueError):
    """The launcher's environment contradicts itself."""


class Rank(NamedTuple):
    """A rank, as torch counts them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str

    def environment(self) -> dict[str, str]:
        """Build what torch and everything above it reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }


LAUNCHER: Final = "MANYCPU_LAUNCHER"
"""Variable that names the launcher to people, where its variables are those of another."""
ALONE: Final = Rank(0, 1, 0, 1, "none")

# The variable that gives a launcher away, and its names for rank, world size, local rank and local world
# size. The order matters: torchrun and mpirun may run where an outer launcher left RANK behind.
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


def of(environ: Mapping[str, str]) -> Rank:
    """Read the rank; a process that no launcher started is alone in its world.

    Raises:
        RankError: A number is missing, is none, or is out of its range.
    """
    for launcher, (mark, *names) in _LAUNCHERS.items():
        if environ.get(mark):
            return _checked(Rank(*_numbers(environ, names), environ.get(LAUNCHER, launcher)), names)
    return ALONE


def _numbers(environ: Mapping[str, str], names: list[str]) -> tuple[int, int, int, int]:
    # RANK and WORLD_SIZE by hand, without the local two: one process for each node.
    defaults = (None, None, "0", "1")
    texts = [environ.get(name, default) for name, default in zip(names, defaults, strict=True)]
    for name, text in zip(names, texts, strict=True):
        if text is None or not text.isdecimal():
            raise RankError(f"{name} should be a number and is {text!r}")
    rank, world, local, local_world = (int(text or 0) for text in texts)
    return rank, world, local, local_world


def _checked(rank: Rank, names: list[str]) -> Rank:
    if not (rank.rank < rank.world_size and rank.local_rank < rank.local_world_size <= rank.world_size):
        values = ", ".join(f"{name}={value}" for name, value in zip(names, rank, strict=False))
        raise RankError(f"this is no rank of any world: {values}")
    return rank
