"""A pod deletes all of a run on its volume but what its training wrote."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manycpu.pipeline.pod.commands import trim


def written(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("x")


def trimmed(folder: Path, within: Path, **asked: bool) -> list[str]:
    said: list[dict[str, Any]] = []
    channel: Any = SimpleNamespace(tick=lambda: None, send_message=lambda _, **fields: said.append(fields))
    trim(channel, folder=str(folder), within=str(within), **asked)
    results: list[str] = said[-1]["results"]
    return results


def files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())


@pytest.mark.parametrize("own", [True, False])
def test_outputs_and_checkpoints_stay_and_nothing_of_other_runs_is_touched(
    tmp_path: Path, *, own: bool
) -> None:
    run = tmp_path / "runs" / "x"
    results = ["attempts/2/output/model", "checkpoints/a/b"]
    written(run, *results, "attempts/1/note", "work/y")
    (run / "attempts" / "1" / "output").mkdir()
    others = ["data/d/x", "runs/other/checkpoints/c"]
    written(tmp_path, *others)
    (run / "link").symlink_to(tmp_path / "data")
    assert trimmed(run, tmp_path if own else run) == ["checkpoints", "attempts/2/output"]
    assert files(tmp_path) == sorted([*(f"runs/x/{path}" for path in results), *([] if own else others)])


def test_without_checkpoints_an_output_of_metrics_alone_is_no_result(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    written(run, "attempts/1/output/metrics.json", "checkpoints/a", "attempts/2/output/model")
    assert trimmed(run, run, checkpoints=False) == ["attempts/2/output"]
    assert files(run) == ["attempts/2/output/model"]


def test_a_run_whose_training_wrote_nothing_has_no_results(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    written(run, "attempts/1/note")
    (run / "checkpoints").mkdir()
    assert trimmed(run, run) == []
    assert files(tmp_path) == []
