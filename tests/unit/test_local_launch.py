"""What starts the ranks of this machine, where the target names it and where it leaves it open."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from manycpu.pipeline import node, recipes
from manycpu.pipeline.launchers import refusals
from manycpu.pipeline.launchers.environment import environment
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import open_context


def context(max_restarts: int, launch: str | None = None, **fields: Any) -> RunContext:
    run = {"program": "train.py", "output": "out", "max_restarts": max_restarts, **fields}
    target = {"kind": "local"} | ({"launch": launch} if launch else {})
    return open_context(run, target, "test", base=Path())


@pytest.mark.parametrize(("max_restarts", "launch"), [(0, "processes"), (2, "torchrun")])
def test_what_is_left_open_can_do_what_the_run_asks_for(max_restarts: int, launch: str) -> None:
    ctx = context(max_restarts)
    assert ctx.target.launch == launch
    assert refusals(ctx.run, ctx.target) == []


@pytest.mark.parametrize("launch", ["processes", "torchrun", "mpirun"])
@pytest.mark.parametrize("max_restarts", [0, 2])
def test_what_is_named_is_taken(max_restarts: int, launch: str) -> None:
    assert context(max_restarts, launch=launch).target.launch == launch


def test_a_rank_reads_every_variable_of_ours_that_it_is_given() -> None:
    paths = {"code", "data", "model", "output", "checkpoints", "caches", "attempt_directory", "resume_from"}
    placed = dict.fromkeys(paths | {"name", "python"}, "given")
    run = context(0, oversubscribe=True, resources={"cpu": 1}, env={"A": "1"}).run
    variables = environment(run, Placement(attempt=1, program=("train.py",), **placed))
    ours = {name for name in variables if name.startswith("MANYCPU_")}
    code = "".join(file.read_text() for part in (node, recipes) for file in _files(part))
    assert {"MANYCPU_CPUS", "MANYCPU_RESUME_FROM"} < ours
    assert {name for name in ours if name not in code} == set()


def _files(package: ModuleType) -> Iterator[Path]:
    return Path(package.__path__[0]).rglob("*.py")


def test_processes_are_not_restarted() -> None:
    ctx = context(2, launch="processes")
    (finding,) = refusals(ctx.run, ctx.target)
    assert finding.field == "run.max_restarts"
    assert "target.launch 'torchrun' does that" in finding.message


def test_downloads_of_before_are_found_where_the_user_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that a notebook has loaded in one cell is not downloaded again in the next."""

    def caches(**fields: Any) -> list[str]:
        ctx = context(0, **fields)
        env = ctx.driver.objects(ctx)[-1]["env"]
        return [env["HF_HOME"], env["HF_DATASETS_CACHE"]]

    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    assert [Path(folder).name for folder in caches()] == ["huggingface", "datasets"]
    monkeypatch.setenv("HF_HOME", "/cache")
    assert caches() == ["/cache", "/cache/datasets"]
    monkeypatch.setenv("HF_DATASETS_CACHE", "/sets")
    assert caches(env={"HF_HOME": "/mine"}) == ["/mine", "/sets"]


@pytest.mark.parametrize(
    ("program", "dtype", "told"),
    [
        ("question_answering", None, "auto"),
        ("question_answering", "fp32", "fp32"),
        ("train.py", None, "fp32"),
        ("train.py", "bf16", "bf16"),
    ],
)
def test_only_a_recipe_chooses_its_number_format(program: str, dtype: str | None, told: str) -> None:
    paths = {"code", "data", "model", "output", "checkpoints", "caches", "attempt_directory", "resume_from"}
    placed = dict.fromkeys(paths | {"name", "python"}, "given")
    run = context(0, program=program, dtype=dtype).run
    assert environment(run, Placement(attempt=1, program=("x",), **placed))["MANYCPU_DTYPE"] == told
