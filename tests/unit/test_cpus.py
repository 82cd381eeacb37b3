"""Runs of one machine at once: no two pin ranks to one core, and what ended gives its cores back."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.killable_programs import Program

from manycpu.pipeline.cli.node_spec import describe
from manycpu.pipeline.node import cpus
from manycpu.pipeline.node.world import Rank
from manycpu.pipeline.spec import cpu_plan
from manycpu.pipeline.spec.cpu_plan import CpuRequest

HOLDER = """
import json, signal, sys
from pathlib import Path
from manycpu.pipeline.node import cpus
from manycpu.pipeline.node.world import Rank
from manycpu.pipeline.spec import cpu_plan
from manycpu.pipeline.spec.cpu_plan import CpuRequest
from manycpu.pipeline.cli.node_spec import describe
folder, run, node = sys.argv[1:]
plan = cpu_plan.plan(describe(node), CpuRequest(processes=2))
share = cpus.reserve_cores(plan, Rank(0, 2, 0, 2, "env"), {"MANYCPU_RUN": run}, Path(folder))
print(json.dumps(share.pins), flush=True)
signal.pause()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "manycpu" / "cores"
    while cpus.held:
        os.close(cpus.held.pop())


def planned(node: str) -> cpu_plan.CpuPlan:
    return cpu_plan.plan(describe(node), CpuRequest(processes=2))


def take(folder: Path, run: str, node: str = "cores=4", local_rank: int = 0) -> cpus.Share:
    rank = Rank(local_rank, 2, local_rank, 2, "env")
    return cpus.reserve_cores(planned(node), rank, {"MANYCPU_RUN": run}, folder)


def test_a_run_alone_is_pinned_as_planned(folder: Path) -> None:
    assert take(folder, "a") == (((0, 1), (2, 3)), "")


def test_runs_at_once_are_pinned_to_cores_of_their_own(folder: Path) -> None:
    assert take(folder, "a", "cores=8,threads=2,cpus=0-3,8-11").pins == ((0, 8, 1, 9), (2, 10, 3, 11))
    assert take(folder, "b", "cores=8,threads=2,cpus=4-7,12-15").pins == ((4, 12, 5, 13), (6, 14, 7, 15))


def test_a_run_moves_to_cores_that_are_free(folder: Path) -> None:
    """The plan alone would begin with the first core."""
    assert take(folder, "a", "cores=8,cpus=0-1").pins == ((0,), (1,))
    plan = replace(planned("cores=8"), cores=4)
    share = cpus.reserve_cores(plan, Rank(0, 2, 0, 2, "env"), {"MANYCPU_RUN": "b"}, folder)
    assert [pin[:2] for pin in share.pins] == [(2, 3), (4, 5)]


def test_where_the_cores_are_too_few_no_rank_is_pinned_and_the_reason_is_said(folder: Path) -> None:
    take(folder, "train-1")
    for local_rank in (0, 1):
        share = take(folder, "train-2", local_rank=local_rank)
        assert share.pins == ()
        assert "need 4 cores, and train-1, which runs on this machine too, leaves 0" in share.why_not


def test_all_ranks_of_a_run_are_pinned_or_none(folder: Path) -> None:
    """Also where another run ended after its first rank had asked."""
    take(folder, "a")
    other = cpus.held.pop()
    assert take(folder, "b").pins == ()
    os.close(other)
    assert take(folder, "b", local_rank=1).pins == ()
    assert take(folder, "c").pins == ((0, 1), (2, 3))


def test_a_run_that_was_killed_gives_its_cores_back(folder: Path) -> None:
    folder.parent.mkdir()
    command = [sys.executable, "-c", HOLDER, str(folder), "a", "cores=4"]
    with Program(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert json.loads(holder.stdout.readline()) == [[0, 1], [2, 3]]
        assert take(folder, "b").pins == ()
    os.close(cpus.held.pop())
    assert take(folder, "c").pins == ((0, 1), (2, 3))
    assert len(list(folder.glob("*.json"))) == 1


def test_where_nothing_can_be_shared_out_no_rank_is_pinned_and_the_reason_is_said(tmp_path: Path) -> None:
    """A folder that others may write to, as anybody can make it in /tmp."""
    folder = cpus.folder_of_user({"TMPDIR": str(tmp_path)})
    folder.parent.mkdir()
    folder.parent.chmod(0o777)
    before = os.sched_getaffinity(0)
    reason = cpus.pin(planned("cores=4"), Rank(0, 2, 0, 2, "env"), {"TMPDIR": str(tmp_path)})
    assert "not pinned to cores, which other runs may have" in reason
    assert "is not this user's alone" in reason
    assert os.sched_getaffinity(0) == before
