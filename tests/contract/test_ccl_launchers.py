"""The backend ccl under every launcher, on one machine and over hosts; and ranks that cannot have it."""

import json
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import namespace_hosts as made_hosts
from support.rank_launches import by_hand, launch

pytest.importorskip("torch")

from manycpu.pipeline import BareMetal, train
from manycpu.pipeline.node.backends import UnavailableError
from manycpu.pipeline.node.ccl import build

try:
    build.built()
    MISSING = ""
except UnavailableError as error:
    MISSING = error.args[0]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
ON_HOSTS = pytest.mark.skipif(bool(made_hosts.reason()), reason=made_hosts.reason() or "")
LAUNCHERS = ["processes", "openmpi"]
"""One of each way to meet; oneCCL sees no difference to the others (test_ranks.py tries all)."""

SUM = """
import os, time, torch, torch.distributed as dist
dist.init_process_group()
total = torch.ones(300_001)
dist.all_reduce(total)
print("sum", int(total.min()), os.environ["CCL_ATL_TRANSPORT"], flush=True)
if dist.get_rank() == 0:
    with open(os.path.join(os.environ["MANYCPU_OUTPUT"], "model.txt"), "w") as file:
        file.write(f"{os.environ['CCL_ATL_TRANSPORT']} {int(total.max())}")
    time.sleep(1)  # longer than the others wait for it when they end
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_that_end_at_different_times_all_end_well(launcher: str, write: Callable[[str], Path]) -> None:
    ended = launch(launcher, write(SUM), backend="ccl")
    assert ended.code == 0, ended.out
    assert [text for text in ended.texts() if text.startswith("sum")] == ["sum 2 ofi"] * 2
    assert "CCL_WARN" not in ended.out


def test_ranks_of_intel_mpi_meet_over_it_and_an_exit_code_ends_them(write: Callable[[str], Path]) -> None:
    """That they may also end at different times, test_intel_mpi_over_two_hosts sees."""
    ended = launch("intel", write(SUM.replace("time.sleep(1)", "raise SystemExit(5)")), backend="ccl")
    assert [text for text in ended.texts() if text.startswith("sum")] == ["sum 2 mpi"] * 2, ended.out
    assert "CCL_WARN" not in ended.out
    assert {event["rank"]: event["code"] for event in ended.events("exit")}[0] == 5
    assert ended.code != 0


def test_without_a_compiler_every_rank_says_so(write: Callable[[str], Path], tmp_path: Path) -> None:
    lacking = {"MANYCPU_BACKEND": "ccl", "MANYCPU_CACHE": str(tmp_path / "cache"), "PATH": "/nowhere"}
    for ended in by_hand(write("print('trained')"), {"RANK": "0"} | lacking, {"RANK": "1"} | lacking):
        assert ended.code == 88, ended.out
        assert "run.backend: 'ccl' is not available: " in ended.events("error")[0]["message"]
        assert "there is no C++ compiler" in ended.events("error")[0]["message"]


def test_a_backend_that_is_left_out_is_one_that_every_rank_has(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    """One rank has ccl and the other cannot: both train over gloo, and say why."""
    script = write(
        "import os, torch.distributed as dist\ndist.init_process_group()\n"
        "print(dist.get_backend(), os.environ['MANYCPU_BACKEND'])\n"
    )
    auto = {"MANYCPU_BACKEND": "auto"}
    lacking = {"MANYCPU_CACHE": str(tmp_path / "cache"), "PATH": "/nowhere"}
    first, second = by_hand(script, {"RANK": "0"} | auto, {"RANK": "1"} | auto | lacking)
    assert (first.code, second.code) == (0, 0), first.out + second.out
    assert "gloo gloo" in first.texts()
    assert "gloo gloo" in second.texts()
    said = f"run.backend is left out, and rank 1 on {socket.gethostname()} has no ccl: it was not built"
    assert first.events("proof")[0]["backend_reason"].startswith(said)


def test_ranks_that_ask_for_different_backends_of_a_subgroup_all_fail(write: Callable[[str], Path]) -> None:
    script = """
        import torch.distributed as dist
        dist.init_process_group()
        for members in (None, [0, 1]):
            try:
                dist.new_group(members, backend=["ccl", "gloo"][dist.get_rank()])
            except SystemExit as refusal:
                refused = refusal
                print("refused", refusal.message)
        raise refused
    """
    asked = {"MANYCPU_BACKEND": "ccl"}
    for ended in by_hand(write(script), {"RANK": "0"} | asked, {"RANK": "1"} | asked):
        assert ended.code == 88, ended.out
        told = "the ranks of a group ask for different backends: rank 0 ccl, rank 1 gloo."
        assert ended.texts().count(f"refused {told}") == 2


@ON_HOSTS
def test_intel_mpi_over_two_hosts(
    hosts: made_hosts.Hosts, script: Callable[..., str], tmp_path: Path
) -> None:
    target = BareMetal(
        hostfile=str(hosts.hostfile("node-a", "node-b")), ssh=hosts.ssh, directory=str(tmp_path / "runs")
    )
    given = {"program": script(SUM), "output": str(tmp_path / "out"), "nnodes": 2, "backend": "ccl"}
    report = train(given, target)
    assert (report.state, report.world_size, report.hosts) == ("succeeded", 2, ["node-a", "node-b"])
    assert (tmp_path / "out" / "model.txt").read_text() == "mpi 2"


@ON_HOSTS
def test_torchrun_over_two_hosts(hosts: made_hosts.Hosts, script: Callable[..., str], tmp_path: Path) -> None:
    """Two ranks on each: shared memory within a host, tcp between them."""
    words = ["MANYCPU_BACKEND=ccl", f"MANYCPU_OUTPUT={tmp_path}"]
    places = ["--nnodes=2", "--nproc-per-node=2", f"--master-addr={hosts['node-a'].address}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port=29500", *places]
    node = ["--no-python", sys.executable, "-m", "manycpu.pipeline.node", script(SUM)]

    def run(rank: int) -> str:
        return hosts.hosts[rank].run("env", *words, *command, f"--node-rank={rank}", *node)

    with ThreadPoolExecutor(2) as pool:
        said = "".join(pool.map(run, range(2)))
    assert said.count("sum 4 ofi") == 4, said
    proofs = [json.loads(line.partition("::manycpu:: ")[2]) for line in said.splitlines() if "proof" in line]
    assert sorted((proof["rank"], proof["host"]) for proof in proofs) == [
        (0, "node-a"),
        (1, "node-a"),
        (2, "node-b"),
        (3, "node-b"),
    ]
