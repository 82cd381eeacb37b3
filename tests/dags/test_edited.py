"""A task whose fields are edited between its tries."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manycpu.operators import TrainOperator
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import find, open_context
from manycpu.pipeline.verbs.build import build
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.prepare import prepare
from manycpu.pipeline.verbs.stage import stage


@pytest.mark.usefixtures("home")
def test_what_was_staged_and_built_from_other_fields_is_made_anew(
    script: Callable[..., str], tmp_path: Path
) -> None:
    for name in ("old", "new"):
        (tmp_path / f"{name}.txt").write_text(name)
    other = Path(script()).with_name("other.py")
    other.write_text("pass")

    def described(program: str, data: str) -> RunContext:
        run = {"program": program, "data": str(tmp_path / data), "output": str(tmp_path / "out")}
        return find(open_context(run, None, "edited", base=tmp_path))

    ctx = described(script(), "old.txt")
    prepare(ctx)
    made: dict[str, Any] = {"staged": stage(ctx), "built": build(ctx)}
    task = TrainOperator(task_id="t", **{name: one.model_dump(mode="json") for name, one in made.items()})
    assert task.stage_and_build_if_needed(ctx) == (made["staged"], made["built"])
    now = described(str(other), "new.txt")
    staged, built = task.stage_and_build_if_needed(now)
    assert Path(staged.data).read_text() == "new"
    assert built.program == ("other.py",)
    assert (task.stage_and_build_if_needed(described(script(), "new.txt"))[1]) == made["built"]
    cleanup(now, keep=False)


@pytest.mark.usefixtures("home")
def test_what_an_earlier_ledger_recorded_is_staged_and_built_again(
    script: Callable[..., str], tmp_path: Path
) -> None:
    """Airflow clears ``prepare`` with ``train``, but not ``stage`` and ``build``: their results are old."""
    data = tmp_path / "data.txt"
    data.write_text("the data")
    run = {"program": script(), "data": str(data), "output": str(tmp_path / "out")}
    ctx = find(open_context(run, None, "cleared", base=tmp_path))
    prepare(ctx)
    made: dict[str, Any] = {"staged": stage(ctx), "built": build(ctx)}
    task = TrainOperator(task_id="t", **{name: one.model_dump(mode="json") for name, one in made.items()})
    cleanup(ctx, keep=False)
    Path(made["staged"].data).parent.rename(tmp_path / "deleted since")
    prepare(ctx)
    assert task.stage_and_build_if_needed(ctx) == (made["staged"], made["built"])
    entry = ctx.ledger.read()
    assert [*entry.verbs] == ["prepare", "stage", "build"]
    assert (entry.data, entry.code) == (made["staged"].data, made["built"].code)
    assert Path(made["staged"].data).read_text() == "the data"
    with ctx.ledger.update() as entry:
        entry.verbs["stage"].result, entry.verbs["stage"].error = "failed", "the disk is full"
    task.stage_and_build_if_needed(ctx)
    assert ctx.ledger.read().verbs["stage"].error is None
    cleanup(ctx, keep=False)
