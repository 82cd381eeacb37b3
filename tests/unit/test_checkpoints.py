"""Which checkpoint is gone on from, on files as torch and safetensors write them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from manycpu.pipeline.recipes import checkpoints
from manycpu.pipeline.targets.open_run import open_context


def checkpoint(folder: Path, step: int, *, sharded: bool = False) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    names = ("model-00001-of-00002", "model-00002-of-00002") if sharded else ("model",)
    for name in names:
        save_file({"weight": torch.ones(8, 8)}, path / f"{name}.safetensors", metadata={"format": "pt"})
    for name in ("optimizer", "scheduler"):
        torch.save({"state": torch.ones(64)}, path / f"{name}.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def test_the_greatest_step_is_the_newest(tmp_path: Path) -> None:
    for step in (90, 100, 9):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-200.txt").touch()
    assert checkpoints.newest(tmp_path) == (tmp_path / "checkpoint-100", [])
    assert checkpoints.newest(tmp_path / "nowhere") == (None, [])


@pytest.mark.parametrize("content", [b"", b"cut"])
def test_a_random_state_that_another_rank_did_not_write_to_its_end_counts(
    tmp_path: Path, content: bytes
) -> None:
    path = checkpoint(tmp_path, 100)
    torch.save({"cpu": torch.ones(4)}, path / "rng_state_0.pth")
    assert checkpoints.fault(path) is None
    (path / "rng_state_1.pth").write_bytes(content)
    assert checkpoints.fault(path) == "rng_state_1.pth is cut short or damaged"


def test_of_other_numbers_of_ranks_the_greatest_epoch_is_the_newest_unless_steps_are_counted(
    tmp_path: Path,
) -> None:
    for step, epoch in ((60, 2.3), (40, 3.1), (20, 1.5)):
        state = {"global_step": step, "epoch": epoch}
        (checkpoint(tmp_path, step) / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "checkpoint-80").mkdir()
    names = [path.name for path in checkpoints.latest_first(tmp_path)]
    assert names == ["checkpoint-40", "checkpoint-60", "checkpoint-20", "checkpoint-80"]
    names = [path.name for path in checkpoints.latest_first(tmp_path, by_step=True)]
    assert names == ["checkpoint-60", "checkpoint-40", "checkpoint-20", "checkpoint-80"]
    found, (skipped,) = checkpoints.newest(tmp_path)
    assert found == tmp_path / "checkpoint-40"
    assert "checkpoint-80 is skipped" in skipped


def test_shards_are_looked_at_one_by_one(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5, sharded=True)
    assert checkpoints.fault(path) is None
    cut(path / "model-00002-of-00002.safetensors")
    assert checkpoints.fault(path) == "model-00002-of-00002.safetensors is cut short or damaged"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("trainer_state.json", Path.unlink, "no readable trainer_state.json"),
        ("trainer_state.json", cut, "no readable trainer_state.json"),
        ("model.safetensors", Path.unlink, "it has no model*.safetensors"),
        ("model.safetensors", cut, "model.safetensors is cut short or damaged"),
        ("model.safetensors", empty, "model.safetensors is cut short or damaged"),
        ("optimizer.pt", Path.unlink, "it has no optimizer.pt"),
        ("optimizer.pt", cut, "optimizer.pt is cut short or damaged"),
        ("scheduler.pt", empty, "scheduler.pt is cut short or damaged"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(
    tmp_path: Path, name: str, damage: Callable[[Path], None], said: str
) -> None:
    whole = checkpoint(tmp_path, 10)
    damage(checkpoint(tmp_path, 20) / name)
    found, (skipped,) = checkpoints.newest(tmp_path)
    assert found == whole
    assert skipped.startswith(f"{tmp_path / 'checkpoint-20'} is skipped: ")
    assert said in skipped


def test_accelerates_names_of_the_same_files_are_known(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 1)
    for file in path.glob("*.pt"):
        file.rename(file.with_suffix(".bin"))
    assert checkpoints.fault(path) is None
    cut(path / "scheduler.bin")
    assert checkpoints.fault(path) == "scheduler.bin is cut short or damaged"


def test_zeros_in_place_of_a_header_are_damage(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 1)
    weights = path / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert checkpoints.fault(path) == "model.safetensors is cut short or damaged"


@pytest.mark.parametrize("target", [{}, {"kind": "kubernetes", "image": "r/x:1"}])
@pytest.mark.usefixtures("home")
def test_runs_that_share_a_folder_have_their_checkpoints_apart(
    target: dict[str, str], tmp_path: Path
) -> None:
    given = {"program": "-m x", "output": "out", "checkpoints": "points", "args": ["{checkpoints}"]}
    first, again, other = (open_context(given, target, key, base=tmp_path) for key in ("a", "a", "b"))
    assert first.driver.objects(first) == again.driver.objects(again)
    for ctx in (first, other):
        assert f"{ctx.run.checkpoints}/{ctx.name}" in str(ctx.driver.objects(ctx))


def test_checkpoints_of_other_runs_are_counted(tmp_path: Path) -> None:
    for run in ("", "mine", "theirs"):
        checkpoint(tmp_path / run, 10)
    assert checkpoints.count_foreign(tmp_path / "mine", "mine") == 2
    assert checkpoints.count_foreign(tmp_path / "mine-20261128T060133.500000", "mine") == 3
    assert checkpoints.count_foreign(tmp_path / "mine", "") == 0
