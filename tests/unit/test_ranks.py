"""Ranks by the environment of each launcher."""

import pytest

from manycpu.pipeline.node.world import ALONE, Rank, RankError, read_rank

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("environ", "launcher"), [(TORCHRUN, "torchrun"), (OPENMPI, "openmpi"), (HYDRA, "hydra")]
)
def test_every_launcher_says_the_same(environ: dict[str, str], launcher: str) -> None:
    assert read_rank(environ) == Rank(5, 8, 1, 4, launcher)


def test_torch_reads_the_environment() -> None:
    assert read_rank(HYDRA).environment() == {name: TORCHRUN[name] for name in list(TORCHRUN)[1:]}


def test_the_inner_launcher_counts() -> None:
    """A job's own RANK is the node's number; mpirun and torchrun inside of it know better."""
    assert read_rank({"RANK": "1", "WORLD_SIZE": "2"} | HYDRA).rank == 5
    assert read_rank(HYDRA | TORCHRUN).launcher == "torchrun"


def test_by_hand_and_alone() -> None:
    assert read_rank({"RANK": "1", "WORLD_SIZE": "2"}) == Rank(1, 2, 0, 1, "env")
    assert read_rank({"PATH": "/bin"}) == ALONE


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"PMI_RANK": "8"}, "no rank of any world: PMI_RANK=8, PMI_SIZE=8"),
        ({"PMI_SIZE": "many"}, "PMI_SIZE should be a number and is 'many'"),
        ({"MPI_LOCALNRANKS": "9"}, "no rank of any world"),
        ({"MPI_LOCALRANKID": "-1"}, "MPI_LOCALRANKID should be a number"),
    ],
)
def test_contradictions(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(RankError, match=message):
        read_rank(HYDRA | wrong)


def test_a_size_that_is_missing() -> None:
    with pytest.raises(RankError, match="WORLD_SIZE should be a number and is None"):
        read_rank({"RANK": "0"})
