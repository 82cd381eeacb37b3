"""The world that was requested beside the world that exists."""

from typing import Any

import pytest

from manycpu.pipeline.node import world as worlds
from manycpu.pipeline.node.emit import NodeExit
from manycpu.pipeline.node.world import ALONE, Rank


def want(nodes: str = "2", processes: str = "2", **more: str) -> worlds.RequestedWorld:
    return worlds.read_requested({"MANYCPU_NNODES": nodes, "MANYCPU_NPROC_PER_NODE": processes} | more)


def world(size: int) -> Rank:
    return Rank(0, size, 0, min(size, 2), "hydra")


def records(*ranks: int, size: int | None = None, **fields: Any) -> list[dict[str, Any]]:
    common = {"world_size": size or len(ranks), "backend": "gloo"} | fields
    return [{"rank": rank, "host": f"host-{rank % 2}"} | common for rank in ranks]


@pytest.mark.parametrize(("nodes", "sizes"), [("2", [4]), ("1:3", [2, 4, 6])])
def test_worlds_that_were_asked_for(nodes: str, sizes: list[int]) -> None:
    for size in range(1, 9):
        if size in sizes:
            want(nodes).check_world(world(size))
            continue
        with pytest.raises(NodeExit, match="87") as refusal:
            want(nodes).check_world(world(size))
        assert f"a world of {size}" in refusal.value.message


def test_several_alone_side_by_side() -> None:
    with pytest.raises(NodeExit) as refusal:
        want().check_world(ALONE)
    assert "2 nodes with 2 processes each were asked for" in refusal.value.message
    assert "No known launcher has set its rank" in refusal.value.message


def test_outside_of_a_run_nothing_in_particular_is_asked_for() -> None:
    worlds.read_requested({}).check_world(world(7))
    worlds.read_requested({}).check_world(ALONE)


def test_a_meeting_as_asked() -> None:
    want(MANYCPU_SPREAD="require").check_meeting(records(2, 0, 3, 1))


@pytest.mark.parametrize(
    ("met", "message"),
    [
        (records(0, 0), "the ranks that met are [0, 0]"),
        (records(0, 1, size=4), "worlds of [4], and 2 of them met"),
        (records(0) + records(1, size=1), "worlds of [1], and 2"),
        (records(0, 1, backend="gloo") + records(2, 3, backend="mpi"), "gloo and mpi (run.backend)"),
        (records(0, 1, host="same"), "they run on same alone, where run.spread requires 2 machines"),
    ],
)
def test_meetings_that_fail(met: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(NodeExit) as refusal:
        want(MANYCPU_SPREAD="require").check_meeting(met)
    assert refusal.value.code == 87
    assert message in refusal.value.message


def met(*lacking: str) -> list[dict[str, Any]]:
    """Make records of ranks, in no order: why each of them has no ccl."""
    found = [{"rank": rank, "host": f"host-{rank}", "no_ccl": no_ccl} for rank, no_ccl in enumerate(lacking)]
    return found[::-1]


def test_a_backend_that_is_left_out_is_the_best_that_every_rank_has() -> None:
    auto = want(MANYCPU_BACKEND=worlds.AUTO)
    assert auto.choose_backend(met("", "")) == ("ccl", "run.backend is left out, and every rank has ccl")
    for order in (1, -1):
        assert auto.choose_backend(met("", "no compiler", "no oneCCL")[::order]) == (
            "gloo",
            "run.backend is left out, and rank 1 on host-1 has no ccl: no compiler",
        )


def test_a_reason_of_many_words_is_cut_so_that_every_line_holds_it() -> None:
    _, why = want(MANYCPU_BACKEND=worlds.AUTO).choose_backend(met("x" * 5000))
    assert why is not None
    assert why.count("x") == 500


@pytest.mark.parametrize("backend", ["ccl", "gloo", "mpi"])
def test_a_backend_that_is_named_is_never_swapped(backend: str) -> None:
    assert want(MANYCPU_BACKEND=backend).choose_backend(met("no oneCCL", "")) == (backend, None)


def test_outside_of_a_run_the_script_chooses_its_backend() -> None:
    assert worlds.read_requested({}).choose_backend(met("")) == (None, None)


def test_one_machine_is_enough_where_spread_is_only_preferred() -> None:
    want(MANYCPU_SPREAD="prefer").check_meeting(records(0, 1, host="same"))


def test_no_except_exception_swallows_a_refusal() -> None:
    assert not issubclass(NodeExit, Exception)
