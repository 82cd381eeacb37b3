"""The CPU plan on described nodes of every kind: processes, threads, pins, memory, and the mistakes."""

import re
from dataclasses import replace
from typing import Any

import pytest

from manycpu.pipeline.cli.node_spec import describe
from manycpu.pipeline.spec.cpu_plan import (
    THREAD_VARIABLES,
    CpuPlan,
    CpuRequest,
    plan,
    processor_ranges,
    shm_of,
)
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.machine import Cpu, Machine

TWO = "sockets=2,cores=56,threads=2,memory=512Gi"
OURS = {"processes": 2, "backend": "ccl"}


def planned(node: str, **wanted: Any) -> CpuPlan:
    return plan(describe(node), CpuRequest(**wanted))


def rows(made: CpuPlan) -> dict[str, str]:
    return {row.name: row.value for row in made.rows}


@pytest.mark.parametrize(
    ("node", "wanted", "processes", "threads"),
    [
        ("cores=1", {}, 1, 1),
        ("cores=8", {"processes": 3}, 3, 2),
        ("cores=8", {"processes": 1, "subprocesses": 4}, 1, 2),
        ("cores=8", {"processes": 2, "subprocesses": 3}, 2, 1),
        ("cores=2", {"processes": 1, "subprocesses": 4}, 1, 1),
        (TWO, {"subprocesses": 4}, 2, 14),
        ("cores=3", {"processes": 2}, 2, 1),
        ("cores=2", {"processes": 4}, 4, 1),
        ("cores=2,threads=2", {"processes": 2}, 2, 1),
        (TWO, {}, 2, 56),
        (TWO, {"cpus": 200}, 2, 56),
        (TWO, {"cpus": 40}, 1, 40),
        (TWO, {"cpus": 60}, 2, 30),
        (TWO, {"processes": 4}, 4, 28),
        (f"{TWO},numa=4", {}, 2, 56),
        (f"{TWO},limit=8", {}, 1, 8),
        ("cores=64,limit=2.5", {}, 1, 2),
        ("cores=64,limit=2500m", {"processes": 2}, 2, 1),
        ("cores=64,limit=0.5", {}, 1, 1),
        ("sockets=2,cores=4,cpus=1,5-6", {}, 2, 1),
        ("sockets=2,cores=4,threads=2,cpus=0,8", {}, 1, 1),
    ],
)
def test_processes_and_threads(node: str, wanted: dict[str, Any], processes: int, threads: int) -> None:
    made = planned(node, **wanted)
    assert (made.processes, made.threads) == (processes, threads)
    assert made.env == dict.fromkeys(THREAD_VARIABLES, str(threads))


def test_sockets_that_share_a_numa_node_count_as_one() -> None:
    """As many virtual machines show their processors."""
    made = plan(Machine(cpus=tuple(Cpu(socket=n, node=0, core=n, number=n) for n in range(16))))
    assert (made.processes, made.threads, made.warnings) == (1, 16, ())
    (processes,) = [row for row in made.rows if row.name == "processes"]
    assert "sockets of one NUMA node count as one" in processes.reason


@pytest.mark.parametrize(
    ("node", "processes", "pins"),
    [
        ("cores=2", 2, ["0", "1"]),
        ("cores=8,threads=2", 2, ["0-3,8-11", "4-7,12-15"]),
        (TWO, 2, ["0-55,112-167", "56-111,168-223"]),
        ("sockets=2,cores=4,numa=4", 4, ["0-1", "2-3", "4-5", "6-7"]),
        # A rank that fits into no node of four cores takes neighbours, on its socket.
        ("sockets=2,cores=4,numa=4", 2, ["0-3", "4-7"]),
        # Five threads each: the third takes what the first two left, of both nodes.
        ("sockets=2,cores=8", 3, ["0-4", "8-12,15", "5-7,13-15"]),
        # The core that is left over is everybody's on its node.
        ("cores=4", 3, ["0,3", "1,3", "2-3"]),
        ("sockets=2,cores=4,cpus=1,3,5-6", 2, ["1,3", "5-6"]),
        ("sockets=2,cores=2,threads=2,cpus=0,2-5", 2, ["0,4-5", "2-3"]),
    ],
)
def test_pins(node: str, processes: int, pins: list[str]) -> None:
    made = planned(node, processes=processes)
    assert [processor_ranges(pin) for pin in made.pins] == pins
    assert all(len({cpu.core for cpu in pin}) >= made.threads for pin in made.pins)


def test_a_ranks_cores_are_those_of_all_its_subprocesses() -> None:
    made = planned("cores=8", processes=2, subprocesses=3)
    assert [processor_ranges(pin) for pin in made.pins] == ["0-3", "4-7"]
    found = {row.name: row for row in made.rows}
    assert (found["processes"].value, found["subprocesses"].value, found["threads"].value) == ("2", "3", "1")
    assert found["threads"].reason == "floor(8 cores / (2 processes x 3 subprocesses)), at least 1"
    assert found["cores"].reason.endswith("2 left over by whole threads")
    assert "subprocesses" not in rows(planned("cores=8", processes=2))


def test_a_plan_tells_whether_each_rank_has_its_memory_near() -> None:
    (near,) = [row for row in planned(TWO, processes=2).rows if row.name == "pinning"]
    (far,) = [row for row in planned("sockets=2,cores=4,numa=4", processes=2).rows if row.name == "pinning"]
    assert near.reason == "each rank within one NUMA node"
    assert far.reason == "a rank needs more cores than a NUMA node has"


@pytest.mark.parametrize(
    ("node", "wanted", "why"),
    [
        ("cores=4", {"processes": 1}, "one process"),
        ("cores=2", {"processes": 3}, "more processes than cores"),
        ("cores=8,limit=4", {"processes": 2}, "a quota grants time, not processors"),
        ("cores=8", {"processes": 2, "cpus": 4}, "run.resources.cpu is less"),
        ("cores=8", {"processes": 2, "env": {"OMP_NUM_THREADS": "2"}}, "run.env: OMP_NUM_THREADS"),
        ("cores=8", {"processes": 2, "env": {"KMP_AFFINITY": "compact"}}, "run.env: KMP_AFFINITY decides"),
    ],
)
def test_who_is_not_pinned_is_told_why(node: str, wanted: dict[str, Any], why: str) -> None:
    made = planned(node, **wanted)
    assert made.pins == ()
    (row,) = [row for row in made.rows if row.name == "pinning"]
    assert row.value == "none"
    assert row.reason.startswith(why)


def test_an_exclusive_cpuset_as_large_as_the_quota_is_pinned() -> None:
    """What the kubelet's static CPU manager gives: the quota counts hyper-threads."""
    made = planned("cores=8,threads=2,cpus=0-3,8-11,limit=8,request=8", processes=2)
    assert made.threads == 2
    assert [processor_ranges(pin) for pin in made.pins] == ["0-1,8-9", "2-3,10-11"]


@pytest.mark.parametrize(
    ("node", "wanted", "warning"),
    [
        ("cores=2", {"processes": 4}, "4 processes share 2 cores: oversubscribed"),
        (
            "cores=2",
            {"processes": 1, "subprocesses": 4},
            "1 process x 4 subprocesses share 2 cores: oversubscribed",
        ),
        (
            "cores=8",
            {"processes": 1, "subprocesses": 4, "env": {"OMP_NUM_THREADS": "8"}},
            "run.env: OMP_NUM_THREADS=8 makes 32 threads of 1 process x 4 subprocesses on 8 cores: .* 2",
        ),
        (
            "cores=8,limit=6.5",
            {"processes": 2, "cpus": 64},
            "run.resources.cpu asks for 64 cores; this node grants 6.5",
        ),
        (
            "cores=2,memory=8Gi",
            {"memory": 16 << 30},
            "run.resources.memory is 16 GiB, more than this node can allocate: 8 GiB",
        ),
        ("cores=8,limit=4,request=2", {}, "limits are not requests: .* its limit of 4"),
        ("cores=2,bf16=no", {"dtype": "bf16"}, "bf16 without hardware for it"),
        (TWO, {"processes": 1}, "a process of 112 threads spans 2 sockets, .* set run.nproc_per_node to 2"),
        ("cores=2,shm=64Mi", {"processes": 2}, "the shared memory at /dev/shm has 64 MiB"),
        (
            "cores=2",
            {"processes": 2, "env": {"OMP_NUM_THREADS": "4"}},
            "run.env: OMP_NUM_THREADS=4 makes 8 threads of 2 processes on 2 cores: oversubscribed",
        ),
        (
            "cores=8",
            {"processes": 2, "env": {"MKL_NUM_THREADS": "2"}},
            "run.env: MKL_NUM_THREADS=2 wins over the CPU plan's 4",
        ),
        (
            "cores=8",
            {"processes": 2, "env": {"OMP_NUM_THREADS": "many"}},
            "run.env: OMP_NUM_THREADS=many wins over the CPU plan's 4",
        ),
        (
            "cores=8",
            {"processes": 2, "env": {"GOMP_CPU_AFFINITY": "0-3"}},
            "run.env: GOMP_CPU_AFFINITY=0-3 wins over .* is the same for all 2 ranks",
        ),
        ("cores=8", OURS | {"env": {"CCL_WORKER_COUNT": "4"}}, "run.env: CCL_WORKER_COUNT=4 has no effect"),
    ],
)
def test_every_mistake_is_said(node: str, wanted: dict[str, Any], warning: str) -> None:
    (said,) = planned(node, **wanted).warnings
    assert re.match(warning, said), said


@pytest.mark.parametrize(
    ("node", "wanted"),
    [
        ("cores=2", {"processes": 2, "env": {"OMP_NUM_THREADS": "1", "PATH": "/bin"}}),
        ("cores=2", {"env": {"OMP_PROC_BIND": "close"}}),
        ("cores=2,bf16=yes", {"dtype": "bf16"}),
        ("cores=2", {"dtype": "bf16"}),
        ("cores=8,limit=4,request=4", {}),
        (TWO, {"cpus": 200, "memory": 128 << 30, "backend": "ccl", "env": {"CCL_WORKER_COUNT": "1"}}),
        ("cores=8", OURS | {"env": {"CCL_WORKER_COUNT": "4", "CCL_WORKER_OFFLOAD": "1"}}),
    ],
)
def test_what_is_right_is_not_warned_of(node: str, wanted: dict[str, Any]) -> None:
    assert planned(node, **wanted).warnings == ()


def test_the_users_threads_win() -> None:
    made = planned("cores=8", processes=2, env={"OMP_NUM_THREADS": "3"})
    assert made.threads == 3
    assert "OMP_NUM_THREADS" not in made.env
    assert made.env["MKL_NUM_THREADS"] == "3"
    assert ("OMP_NUM_THREADS", "3", "run.env") in made.rows


def test_one_allocator_and_openmp_are_preloaded_where_they_are() -> None:
    there = {"tcmalloc": "/l/tc.so", "jemalloc": "/l/je.so", "iomp5": "/l/iomp.so"}
    machine = replace(describe("cores=2"), libraries=there)
    assert plan(machine).preload == ("/l/tc.so", "/l/iomp.so")
    assert plan(replace(machine, libraries={"jemalloc": "/l/je.so"})).preload == ("/l/je.so",)
    assert plan(replace(machine, libraries={})).preload == ()


def test_the_users_preload_wins_aloud() -> None:
    machine = replace(describe("cores=2"), libraries={"iomp5": "/l/iomp.so"})
    made = plan(machine, CpuRequest(env={"LD_PRELOAD": "/mine.so"}))
    assert made.preload == ()
    assert made.warnings == ("run.env: LD_PRELOAD=/mine.so wins over the CPU plan's, without /l/iomp.so",)
    assert plan(machine, CpuRequest(env={"LD_PRELOAD": "/x.so:/l/iomp.so"})).warnings == ()


def test_shared_memory_is_bounded_by_half_of_the_memory() -> None:
    assert shm_of(8 << 30) == 4 << 30
    assert planned(TWO).shm == 256 << 30
    assert planned(TWO, memory=128 << 30).shm == 64 << 30
    assert planned("cores=2").shm is None


def test_rows_name_every_number() -> None:
    found = rows(planned(f"{TWO},numa=4", processes=2, backend="ccl"))
    assert found["granted"] == "224"
    assert found["topology"] == "2 sockets, 4 NUMA nodes"
    assert (found["cores"], found["processes"], found["threads"]) == ("112", "2", "56")
    assert (found["memory"], found["shared memory"]) == ("512 GiB", "256 GiB")
    assert found["oneCCL workers"] == "none"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there is no ''"),
        ("sockets=2", "cores= is missing"),
        ("cores=2,sokets=1", "there is no 'sokets'"),
        ("cores=none", "cores=none cannot be read"),
        ("cores=2,limit=0", "limit=0 cannot be read"),
        ("cores=2,memory=much", "memory=much cannot be read"),
        ("cores=2,memory=63Mi", "memory=63Mi cannot be read: '63Mi' is less than 64 MiB"),
        ("cores=2,bf16=maybe", "bf16=maybe cannot be read"),
        ("cores=2,cpus=0-7", "the node has the processors 0 to 1"),
        ("sockets=2,cores=4,numa=3", "3 NUMA nodes cannot be on 2 sockets"),
    ],
)
def test_a_description_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said) as raised:
        describe(text)
    assert raised.value.field == "--node"
    assert raised.value.fix


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("socket=2,cores=56", "Did you mean 'sockets'?"),
        ("cores=56,memory=512", "memory is: memory with its unit, such as 512Gi"),
    ],
)
def test_a_mistyped_description_is_mended(text: str, fix: str) -> None:
    with pytest.raises(BadInputError) as raised:
        describe(text)
    assert raised.value.fix == fix


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (TWO, "224 processors as described, no limit"),
        ("cores=4,limit=2500m", "4 processors as described, limit 2.5"),
    ],
)
def test_a_described_node_has_neither_affinity_nor_cgroup(text: str, why: str) -> None:
    reasons = {row.name: row.reason for row in planned(text).rows}
    assert (reasons["granted"], reasons.get("memory", "as described")) == (why, "as described")
    observed = {row.name: row.reason for row in plan(Machine(cpus=(Cpu(0, 0, 0, 0),))).rows}
    assert observed["granted"] == "1 processor of the affinity, no cgroup quota"
