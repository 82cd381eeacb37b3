"""What every recipe's Trainer adds: gradients in the buckets that are sent, compression, the extension."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DDPCommunicationHookType
from safetensors.torch import load_file

from manycpu.pipeline.observed import observe
from manycpu.pipeline.recipes import trainer as trainers
from manycpu.pipeline.recipes.checkpoints import newest
from manycpu.pipeline.recipes.trainer import CpuTrainer, CpuTrainingOptions, misfit, steps_done, usable
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.event_types import MetricsEvent, ProgressEvent, decode, readable

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")


def trainer(tmp_path: Path, **options: Any) -> CpuTrainer:
    return CpuTrainer(torch.nn.Linear(2, 2), CpuTrainingOptions(str(tmp_path), **options))


@pytest.mark.parametrize(
    ("compression", "hook"),
    [("no", DDPCommunicationHookType.NO), ("bf16", DDPCommunicationHookType.BF16)],
)
def test_gradients_live_in_buckets_compressed_if_asked_for(
    compression: str, hook: DDPCommunicationHookType, tmp_path: Path
) -> None:
    handler = trainer(tmp_path, gradient_compression=compression).accelerator.ddp_handler
    assert (handler.gradient_as_bucket_view, handler.comm_hook) == (True, hook)


def test_the_optimizer_is_fused(tmp_path: Path) -> None:
    optimizer = trainer(tmp_path).create_optimizer()
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["fused"]


class Squared(torch.nn.Linear):
    """A model as the Trainer has them: it computes its own loss."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"loss": super().forward(x).square().mean()}


class Logs(CpuTrainer):
    """A Trainer that logs something of its own."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(logs | {"own": 7.0}, start_time)


def train(tmp_path: Path, **more: Any) -> None:
    options = CpuTrainingOptions(
        str(tmp_path), max_steps=5, logging_steps=2, per_device_train_batch_size=2, report_to=[],
        save_strategy="no", disable_tqdm=True, **more,
    )  # fmt: skip
    rows = [{"x": torch.ones(2)}] * 10
    Logs(Squared(2, 2), options, train_dataset=rows, eval_dataset=rows).train()


def test_in_a_run_each_step_has_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANYCPU_RUN", "qa-0123456789")
    train(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    progress = [event for event in map(decode, lines) if isinstance(event, ProgressEvent)]
    assert [event.step for event in progress] == [2, 4, 5]
    for event in progress[:2]:
        assert min(event.loss or 0, event.grad_norm or 0, event.learning_rate or 0) > 0
    assert "gradient norm" in readable(events.split(lines[0]))
    others = [line for line in lines if decode(line) is None]
    assert len(others) == 1
    assert "train_runtime" in others[0]


def test_all_that_is_logged_while_it_trains_is_reported_and_the_last_of_each_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANYCPU_RUN", "qa-0123456789")
    train(tmp_path, eval_strategy="steps", eval_steps=2)
    lines = capsys.readouterr().out.splitlines()
    metrics = [event for event in map(decode, lines) if isinstance(event, MetricsEvent)]
    assert [event.step for event in metrics if "eval_runtime" in event.values] == [2, 4, 5]
    assert [event.step for event in metrics if "train_runtime" in event.values] == [5]
    assert [event.step for event in metrics if {*event.values} == {"own"}] == [2, 4]
    kept = observe(events.join(0, "a", line) for line in lines).metrics
    assert {"epoch", "loss", "grad_norm", "learning_rate", "samples_per_second", "train_loss"} <= {*kept}
    assert kept["epoch"] == 1.0


def test_without_a_run_the_trainer_prints_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MANYCPU_RUN", raising=False)
    train(tmp_path)
    assert capsys.readouterr().out.count("'loss': ") == 2


@pytest.mark.parametrize(
    ("extension", "version", "fits"),
    [
        ("2.8.0", "2.8.0+cpu", True),
        ("2.8.0+git1", "2.8.1", True),
        ("2.8.0", "2.15.0", False),
        ("1.12.100", "1.13.0", False),
    ],
)
def test_the_extension_fits_the_torch_of_its_number(extension: str, version: str, *, fits: bool) -> None:
    said = misfit(extension, version)
    assert (said is None) is fits
    assert said is None or f"needs torch {extension[: extension.rindex('.')]}" in said


def test_without_the_extension_the_option_is_left_out_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers, "why_no_ipex", lambda: "it ended")
    options = CpuTrainingOptions(str(tmp_path), use_ipex=True)
    assert usable(options) == ["--use_ipex is left out: it ended"]
    assert not options.use_ipex
    monkeypatch.setattr(trainers, "why_no_ipex", lambda: None)
    options = CpuTrainingOptions(str(tmp_path), use_ipex=True)
    assert usable(options) == []
    assert options.use_ipex


@pytest.mark.parametrize(("batches", "accumulated"), [(9, 8), (17, 8), (1001, 8), (101, 8), (50, 1), (7, 7)])
def test_every_step_of_an_unchanged_training_is_resumed_at_itself(batches: int, accumulated: int) -> None:
    per_epoch = math.ceil(batches / accumulated)
    for step in range(3 * per_epoch):
        epochs, steps = divmod(step, per_epoch)
        epoch = epochs + steps * accumulated / batches
        assert steps_done(epoch, batches, accumulated) == step


@pytest.mark.parametrize(
    ("epoch", "batches", "accumulated", "step"), [(4.0, 25, 1, 100), (2.5, 10, 4, 7), (0.0, 5, 1, 0)]
)
def test_a_checkpoint_of_other_ranks_is_resumed_at_its_epoch(
    epoch: float, batches: int, accumulated: int, step: int
) -> None:
    assert steps_done(epoch, batches, accumulated) == step


class Evaluated(CpuTrainer):
    """A Trainer whose evaluations give the next of these losses."""

    losses: Iterator[float]

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        return {"eval_loss": next(self.losses)}


def evaluated(folder: Path, batch: int, epochs: int, *losses: float, **env: str) -> Evaluated:
    """Train 8 rows to this epoch, with steps of this batch and a loss for each epoch; return the Trainer."""
    options = CpuTrainingOptions(
        str(folder), num_train_epochs=epochs, per_device_train_batch_size=batch, report_to=[],
        save_strategy="epoch", eval_strategy="epoch", load_best_model_at_end=True, disable_tqdm=True,
    )  # fmt: skip
    rows = [{"x": torch.tensor([float(n), 1.0])} for n in range(8)]
    made = Evaluated(Squared(2, 2), options, train_dataset=rows, eval_dataset=rows)
    made.losses = iter(losses)
    made.train(resume_from_checkpoint=made.resume_point(env))
    return made


def test_a_retry_after_the_last_step_reports_no_loss_and_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MANYCPU_RUN", "qa-0123456789")
    of_steps = {"train_loss", "train_samples_per_second", "train_steps_per_second"}
    for losses, reported in (((2.0,), of_steps), ((), set())):
        evaluated(tmp_path, 2, 1, *losses)
        lines = capsys.readouterr().out.splitlines()
        kept = observe(events.join(0, "a", line) for line in lines).metrics
        assert "train_runtime" in kept
        assert of_steps & kept.keys() == reported


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ((2.0, 3.0), "checkpoint-8 of epoch 1"),
        ((0.5, 3.0), "checkpoint-8 of epoch 2"),
        ((2.0, 0.5), "checkpoint-12 of epoch 3"),
    ],
)
def test_after_a_resume_with_larger_steps_the_best_model_is_the_one_that_was_evaluated_best(
    tmp_path: Path, losses: tuple[float, ...], best: str
) -> None:
    """As with more ranks: step 8 ends epoch 1 of the first training, and epoch 2 of the resumed one."""
    first = evaluated(tmp_path, 1, 1, 1.0).model.weight
    resumed = evaluated(tmp_path, 2, 3, *losses)
    kept = Path(str(resumed.state.best_model_checkpoint))
    epoch = json.loads((kept / "trainer_state.json").read_text())["epoch"]
    assert f"{kept.name} of epoch {epoch:g}" == best
    torch.testing.assert_close(resumed.model.weight, load_file(kept / "model.safetensors")["weight"])
    assert torch.equal(resumed.model.weight, first) is best.endswith("epoch 1")


def test_the_best_model_is_one_of_this_training_though_that_of_another_was_better(tmp_path: Path) -> None:
    other = evaluated(tmp_path / "other", 2, 1, 1.0).state.best_model_checkpoint
    resumed = evaluated(tmp_path / "own", 2, 3, 2.0, 3.0, MANYCPU_RESUME_FROM=str(other))
    best = tmp_path / "own" / "checkpoint-8"
    assert (resumed.state.best_metric, resumed.state.best_model_checkpoint) == (2.0, str(best))
    torch.testing.assert_close(resumed.model.weight, load_file(best / "model.safetensors")["weight"])


def test_a_save_that_is_cut_in_the_folder_of_an_earlier_step_leaves_no_checkpoint_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    evaluated(tmp_path, 1, 1, 3.0)
    monkeypatch.setattr(Evaluated, "_save_optimizer_and_scheduler", interrupt)
    with pytest.raises(KeyboardInterrupt):
        evaluated(tmp_path, 2, 2, 2.0)
    assert newest(tmp_path)[0] is None
