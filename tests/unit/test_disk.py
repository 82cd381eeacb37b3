"""Trials of a disk leave nothing behind, also where one was killed."""

import fcntl
import os
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from manycpu.pipeline.adapters import disk


def trial(above: Path, name: str, age_s: float) -> Path:
    """Make what a process that was killed leaves of its trial."""
    left = above / f".manycpu-trial.{name}"
    (left / "deep" / "er").mkdir(parents=True)
    os.utime(left, times=(time.time() - age_s,) * 2)
    return left


def test_a_trial_leaves_nothing(tmp_path: Path) -> None:
    disk.try_out(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        disk.try_out(tmp_path / "file" / "x")


def test_what_a_killed_trial_left_goes_with_the_next_one_and_no_file_ever(tmp_path: Path) -> None:
    old, young, full, used = (
        trial(tmp_path, *left) for left in (("old", 1e4), ("young", 0), ("full", 1e4), ("used", 0))
    )
    lock = os.open(used, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (full / "deep" / "er" / "file").write_text("somebody's")
    os.utime(full, times=(time.time() - 1e4,) * 2)
    (tmp_path / ".manycpu-trial.file").touch()
    os.utime(tmp_path / ".manycpu-trial.file", times=(0, 0))
    disk.try_out(tmp_path / "out")
    os.close(lock)
    assert not old.exists()
    assert not young.exists()
    assert (used / "deep" / "er").exists()
    assert (full / "deep" / "er" / "file").exists()
    assert (tmp_path / ".manycpu-trial.file").exists()


def test_what_cannot_be_listed_may_hold_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    (tmp_path / "file").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "away").symlink_to(tmp_path / "empty")
    (tmp_path / "gone").symlink_to("nowhere")
    held = {
        name
        for name in ("empty", "file", "linked", "gone", "none", "none/x", "file/x")
        if disk.may_hold_files(tmp_path / name)
    }
    assert held == {"file", "linked", "gone"}

    def refuse(path: object) -> NoReturn:
        raise PermissionError(path)

    monkeypatch.setattr("os.scandir", refuse)
    assert disk.may_hold_files(tmp_path / "empty")
    monkeypatch.setattr("os.lstat", refuse)  # the whole volume does not answer
    assert disk.may_hold_files(tmp_path / "empty")


def test_a_trial_that_another_process_deletes_before_it_is_locked_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def delete_first(path: Path, *args: Any, **more: Any) -> int:
        monkeypatch.undo()
        Path(path).rmdir()
        return opened(path, *args, **more)

    monkeypatch.setattr(os, "open", delete_first)
    disk.try_out(tmp_path / "deep" / "out")
    assert list(tmp_path.iterdir()) == []
