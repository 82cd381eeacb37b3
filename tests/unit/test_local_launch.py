"""What starts the ranks of this machine, where the target names it and where it leaves it open."""

from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline.launchers import refusals
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import open_context


def context(max_restarts: int, **target: Any) -> RunContext:
    run = {"program": "train.py", "output": "out", "max_restarts": max_restarts}
    return open_context(run, {"kind": "local", **target}, "test", base=Path())


@pytest.mark.parametrize(("max_restarts", "launch"), [(0, "processes"), (2, "torchrun")])
def test_what_is_left_open_can_do_what_the_run_asks_for(max_restarts: int, launch: str) -> None:
    ctx = context(max_restarts)
    assert ctx.target.launch == launch
    assert refusals(ctx.run, ctx.target) == []


@pytest.mark.parametrize("launch", ["processes", "torchrun", "mpirun"])
@pytest.mark.parametrize("max_restarts", [0, 2])
def test_what_is_named_is_taken(max_restarts: int, launch: str) -> None:
    assert context(max_restarts, launch=launch).target.launch == launch


def test_processes_are_not_restarted() -> None:
    ctx = context(2, launch="processes")
    (finding,) = refusals(ctx.run, ctx.target)
    assert finding.field == "run.max_restarts"
    assert "target.launch 'torchrun' does that" in finding.message
