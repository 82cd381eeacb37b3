"""The backend ccl: every collective beside gloo's, what goes wrong, and trainings."""

import functools
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support import ccl_requirements, rank_worlds
from support.rank_worlds import SCRIPTS, Found

from manycpu.pipeline.adapters import mpi
from manycpu.pipeline.node.ccl import build

MISSING = ccl_requirements.missing()
# The longer limit is for machines that do much else: quiet ones need a quarter of it.
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING)]

WORLDS = (
    "matrix+subsets+in_memory:3",
    "matrix+crossed+futures+overlap+refusals+average+impatient_wait+several_at_once+monitored:2",
    "child_that_exits:2",  # not beside matrix: forks of some torches hang in the destructor of a gloo group
    "dead_first:2",
    "dead_peer_with_a_child:3",
    "dead_in_the_middle:3",
    "peer_that_exits:2",
    "late_peer:2",
    "aborted:2",
    "shutdown_oldest_first:2",
    "shutdown_never:2",
    "raise_at_the_end:2",
    "again:2",
    "unlike_sizes:2",
    "unlike_gathered:2",
    "another_collective:2",
    "mismatch_in_detail:2",
    "alone:1",
    "hasty:2",
    # What these import, they share.
    "sparse+profiled+trains+sharded:2",
    "hybrid:4",
)
LONG = (
    "matrix:4",
    "dead_peer:3",
    "dead_in_a_scatter:3",
    "dead_in_a_gather:3",
    "shutdown_at_once:2",
    "shutdown_newest_first:2",
    "in_memory:2",
    "in_memory:4",
    "sharded:4",
)
SOON = 20  # seconds; a third of what a group waits, for machines that do much else


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    build.built()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return a function that says what a case saw; all worlds run when the first one is asked for."""

    @functools.cache
    def of(worlds: tuple[str, ...]) -> Found:
        return rank_worlds.run(tmp_path_factory.mktemp("worlds"), *worlds)

    return lambda case: of(LONG if case in LONG else WORLDS)(case)


def cases(*names: Any) -> list[Any]:
    """Mark those of some cases that only `make test-long` runs: each has one beside it that is like it."""
    return [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in names]


@pytest.mark.parametrize("case", cases("matrix:2", "matrix:3", "matrix:4"))
def test_every_collective_is_as_torch_and_gloo_have_it(found: Found, case: str) -> None:
    result = found(case)
    assert set(result["codes"]) == {0}
    assert len(result["results"]) == len(result["codes"])
    for rank in result["results"].values():
        assert rank["faults"] == []
        assert rank["torch"] >= 372
        assert 0.9 * rank["torch"] > rank["gloo"] > 0.8 * rank["torch"]


@pytest.mark.parametrize("case", cases("dead_peer:3", "dead_first:2", "dead_peer_with_a_child:3"))
def test_a_dead_peer_is_named_by_every_survivor_within_seconds(found: Found, case: str) -> None:
    result = found(case)
    dead = "0" if case == "dead_first:2" else str(len(result["codes"]) - 1)
    survivors = [rank for rank in map(str, range(len(result["codes"]))) if rank != dead]
    assert result["codes"][int(dead)] == -9
    assert result["left"] == []  # in /dev/shm, where the dead rank could not delete its own
    for rank in survivors:
        seen = result["results"][rank]
        assert f"rank {dead} on here died" in seen["error"]
        assert seen["seconds"] < SOON
        assert seen["again"] == seen["error"]
        assert result["codes"][int(rank)] == 0  # it can still end


@pytest.mark.parametrize("case", cases("dead_in_the_middle:3", "dead_in_a_scatter:3", "dead_in_a_gather:3"))
def test_a_peer_that_dies_in_the_middle_is_named(found: Found, case: str) -> None:
    result = found(case)
    assert result["codes"] == [0, 0, -9]
    for rank in ("0", "1"):
        seen = result["results"][rank]
        assert "rank 2 on here died" in seen["error"]
        assert seen["seconds"] < SOON
        assert seen["again"] == seen["error"]


@pytest.mark.parametrize("case", cases("in_memory:2", "in_memory:3", "in_memory:4"))
def test_ranks_of_one_host_reduce_in_memory_to_the_same_bits(found: Found, case: str) -> None:
    result = found(case)
    assert set(result["codes"]) == {0}
    assert len(result["results"]) == len(result["codes"])
    for rank in result["results"].values():
        assert rank == {"wrong": [], "shared": True, "kept": False}


def test_sizes_that_differ_are_named(found: Found) -> None:
    results = found("unlike_sizes:2")["results"]
    assert results.keys() == {"0", "1"}
    for rank in results.values():
        assert "of the group has 1000" in rank["error"]
        assert rank["again"] == rank["error"]


def test_rows_that_differ_are_named(found: Found) -> None:
    first, second = found("unlike_gathered:2")["results"].values()
    assert "rank 1 of the group has 1000 elements where this one expects 1001" in first["error"]
    assert "rank 0 of the group has 1001 elements where this one expects 1000" in second["error"]


def test_collectives_that_differ_are_named(found: Found) -> None:
    for rank in found("another_collective:2")["results"].values():
        assert "or it calls another collective" in rank["error"]
        assert rank["again"] == rank["error"]


def test_a_peer_that_leaves_in_order_is_an_error_to_those_who_wait(found: Found) -> None:
    result = found("peer_that_exits:2")
    assert result["codes"] == [3, 0]
    assert "rank 0 on here has left the group" in result["results"]["1"]["error"]


def test_a_timeout_poisons_the_group(found: Found) -> None:
    result = found("late_peer:2")
    seen = result["results"]["1"]
    assert result["codes"] == [0, 0]
    assert seen["error"].startswith("ccl: Timed out waiting 4000ms for all_reduce to complete")
    assert 3.9 < seen["seconds"] < SOON
    assert seen["again"] == seen["error"]
    assert seen["large"].startswith("ccl: Timed out waiting 4000ms for all_reduce to complete")


def test_a_wait_may_time_out_and_be_repeated(found: Found) -> None:
    results = found("impatient_wait:2")["results"]
    assert results["1"] == {"error": "ccl: Timed out waiting 200ms for a collective to complete", "sum": 2}
    assert results["0"] == {"sum": 2}


def test_an_aborted_group_fails_on_every_rank(found: Found) -> None:
    result = found("aborted:2")
    assert result["codes"] == [0, 0]
    for rank in ("0", "1"):
        assert "ccl: the group was aborted" in result["results"][rank]["error"]


@pytest.mark.parametrize(
    "case",
    cases("shutdown_at_once:2", "shutdown_newest_first:2", "shutdown_oldest_first:2", "shutdown_never:2"),
)
def test_several_groups_shut_down_in_every_order(found: Found, case: str) -> None:
    result = found(case)
    assert result["codes"] == [0, 0]
    assert all(rank["sums"] == [2, 2, 2] for rank in result["results"].values())


def test_an_exit_code_is_kept(found: Found) -> None:
    assert found("raise_at_the_end:2")["codes"] == [7, 7]


def test_a_forked_child_may_end(found: Found) -> None:
    assert list(found("child_that_exits:2")["results"].values()) == [{"child": 4, "sum": 2}] * 2


def test_a_world_can_be_made_anew(found: Found) -> None:
    result = found("again:2")
    assert result["codes"] == [0, 0]
    assert result["results"] == {"0": {"sum": 2}, "1": {"sum": 2}}
    assert result["left"] == []


def test_groups_may_be_used_in_another_order_on_another_rank(found: Found) -> None:
    assert [rank["right"] for rank in found("crossed:2")["results"].values()] == [True, True]


def test_groups_of_some_ranks(found: Found) -> None:
    assert found("subsets:3")["results"] == {
        "0": {"alone": 1, "pair": 2},
        "1": {"alone": 1, "pair": 2, "rest": 2},
        "2": {"alone": 1, "rest": 2},
    }


def test_futures_call_back_with_the_result(found: Found) -> None:
    for rank in found("futures:2")["results"].values():
        assert rank["found"] == list(range(20))


def test_it_goes_on_while_its_caller_computes(found: Found) -> None:
    for rank in found("overlap:2")["results"].values():
        assert rank == {"completed": True, "right": True}


def test_hybrid_sharding_trains_as_plain_data_parallelism(found: Found) -> None:
    for rank in found("hybrid:4")["results"].values():
        assert rank["fsdp"] == pytest.approx(rank["ddp"], rel=1e-3)
        assert rank["fsdp2"] == pytest.approx(rank["ddp"], rel=1e-3)


@pytest.mark.parametrize("case", cases("sharded:2", "sharded:4"))
def test_sharded_gradients_are_those_of_one_process(found: Found, case: str) -> None:
    result = found(case)
    assert set(result["codes"]) == {0}, result["stderr"][-3000:]
    for rank in result["results"].values():
        assert rank == {
            "ccl": {"float32": [], "bfloat16": []},
            "gloo": {"float32": []},
            "compared": 6,
        }


def test_what_it_cannot_do_is_refused_and_leaves_the_group_usable(found: Found) -> None:
    for rank in found("refusals:2")["results"].values():
        assert rank == {
            "device": "ccl: works on CPU tensors; this one is on meta. "
            "Move it with .cpu(), or train on the CPU",
            "dtype": "ccl: cannot reduce tensors of dtype Float8_e4m3fn",
            "average": "ccl: an average of Int is not defined; take the sum",
            "sparse": "ccl: works on dense tensors, and adds up sparse ones in all_reduce; "
            "this one is Sparse",
            "size": "ccl: the output of allgather has 3 elements and needs 4, "
            "the input's 2 for each of 2 ranks",
            "sum": 2,
        }


def test_sparse_gradients_train_as_with_gloo_and_ddp_names_the_backend(found: Found) -> None:
    for rank in found("sparse:2")["results"].values():
        assert rank == {"name": "ccl", "trained": True, "same": True}


def test_several_tensors_of_each_rank_are_gathered_at_once(found: Found) -> None:
    error = "ccl: all_gather_coalesced takes a list of tensors for each of 2 ranks, not 1"
    assert list(found("several_at_once:2")["results"].values()) == [{"right": True, "error": error}] * 2


def test_a_monitored_barrier_names_who_is_late(found: Found) -> None:
    results = found("monitored:2")["results"]
    assert "Rank 1 failed to pass monitoredBarrier" in results["0"]["error"]
    assert [rank["sum"] for rank in results.values()] == [2, 2]


def test_a_profiler_shows_it_by_its_name(found: Found) -> None:
    assert list(found("profiled:2")["results"].values()) == [{"shapes": [[[4]]]}] * 2


def test_a_group_of_one_rank_has_all_of_it(found: Found) -> None:
    assert found("alone:1")["results"] == {"0": {"sum": 3}}


def test_a_short_timeout_is_for_collectives_not_for_the_meeting(found: Found) -> None:
    result = found("hasty:2")
    assert result["codes"] == [0, 0]
    assert result["results"]["0"]["error"].startswith("ccl: Timed out waiting 1ms for barrier to complete")


def test_averages(found: Found) -> None:
    assert [rank["average"] for rank in found("average:2")["results"].values()] == [0.5, 0.5]


def test_detail_names_shapes_that_differ(found: Found) -> None:
    for rank in found("mismatch_in_detail:2")["results"].values():
        assert "mismatch between collectives" in rank["error"]


def assert_as_gloo(seen: dict[str, list[list[float]]]) -> None:
    for way in ("ddp", "fsdp", "fsdp2"):
        ours, gloos = seen[way]
        assert ours == pytest.approx(gloos, rel=1e-4)
        assert ours == pytest.approx(seen["ddp"][0], rel=1e-3)


def test_trainings_go_as_with_gloo(found: Found) -> None:
    """Over the transport of a run without MPI; test_accelerate.py and the recipe's tests train scripts."""
    for rank in found("trains:2")["results"].values():
        assert_as_gloo(rank)


def test_an_unmodified_script_trains_over_mpi_as_with_gloo(tmp_path: Path) -> None:
    """Over oneCCL's other transport."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    intel = mpi.find(None)
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "I_MPI_PIN": "off",
        "I_MPI_HYDRA_BOOTSTRAP": "fork",
    }
    node = [sys.executable, "-m", "manycpu.pipeline.node", str(SCRIPTS / "ccl_train.py"), str(tmp_path)]
    done = subprocess.run(
        [intel.mpirun, "-n", "2", *node],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env=rank_worlds.environment(MANYCPU_BACKEND="ccl", **intel.env, **env),
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    for rank in (0, 1):
        seen = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert seen["backend"] == "ccl"
        assert_as_gloo(seen)
