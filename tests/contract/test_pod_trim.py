"""A pod deletes all of a run on its volume but what its training wrote."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.pod.commands import remove, trim


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


@pytest.mark.parametrize("error", [PermissionError, OSError])
@pytest.mark.parametrize(
    ("unlisted", "answer"),
    [
        ("checkpoints", ["checkpoints", "attempts/1/output"]),
        ("checkpoints/step-1", ["checkpoints", "attempts/1/output"]),
        ("attempts/1/output", ["checkpoints", "attempts/1/output"]),
        ("attempts", None),
    ],
)
def test_nothing_is_deleted_because_a_folder_cannot_be_listed_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unlisted: str,
    answer: list[str] | None,
    error: type[OSError],
) -> None:
    run, scandir = tmp_path / "runs" / "x", os.scandir
    results = ["attempts/1/output/model", "checkpoints/step-1/model"]
    written(run, *results)

    refused: list[Path] = []

    def refuse_one(folder: Any) -> Iterator[os.DirEntry[str]]:
        if Path(folder) == run / unlisted and not refused:
            refused.append(folder)
            raise error(5, "the volume does not answer", str(folder))
        return scandir(folder)

    with monkeypatch.context() as patched:
        patched.setattr("os.scandir", refuse_one)
        if answer is None:  # the worker then keeps the whole folder
            with pytest.raises(OSError, match="the volume does not answer"):
                trimmed(run, run)
        else:
            assert trimmed(run, run) == answer
    assert files(run) == results


def test_what_an_attempt_links_to_is_not_touched(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "x"
    written(run, "attempts/1/output/model")
    written(tmp_path, "other/output/model", "other/notes")
    (run / "attempts" / "2").symlink_to(tmp_path / "other")
    assert trimmed(run, run) == ["attempts/1/output"]
    assert files(tmp_path) == ["other/notes", "other/output/model", "runs/x/attempts/1/output/model"]


def test_of_a_run_whose_removal_was_killed_no_part_is_left_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "x"
    channel: Any = SimpleNamespace(tick=lambda: None, send_message=lambda *_, **__: None)
    written(run, "attempts/1/output/a", "attempts/1/output/b")
    written(tmp_path, "runs/other/a")

    def killed(*_: object) -> None:
        (run.parent / ".x.removed" / "attempts" / "1" / "output" / "a").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(disk, "remove", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(channel, str(run))
    assert not run.exists()
    assert files(tmp_path) == ["runs/.x.removed/attempts/1/output/b", "runs/other/a"]
    written(run, "attempts/2/output/a")
    remove(channel, str(run))
    assert [path.name for path in run.parent.iterdir()] == ["other"]
