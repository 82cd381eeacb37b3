"""The epochs of a training: steps, evaluation, checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR

from manycpu.pipeline.node.metrics import metrics
from manycpu.pipeline.node.step_pace import set_samples_per_step
from manycpu.pipeline.recipes import checkpoints
from manycpu.pipeline.recipes.image_classification import model as models
from manycpu.pipeline.recipes.image_classification.options import Options
from manycpu.pipeline.recipes.reporting import Pace

__all__ = ["Epochs"]

_INITIAL_DIVISOR = 25
"""The one cycle begins at its greatest learning rate divided by this."""


class Epochs:
    """Trains a model, epoch by epoch, and evaluates it after each.

    Args:
        options: All options.
        accelerator: The world.
        model: What to train; only what needs a gradient is.
        loaders: Of training, and of evaluation.
    """

    def __init__(
        self, options: Options, accelerator: Accelerator, model: Any, loaders: tuple[Any, Any]
    ) -> None:
        self._options, self._images, self._accelerator = options, options.images, accelerator
        self._mean, self._std = models.normalization(model)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=self._images.lr / _INITIAL_DIVISOR, fused=True)
        schedule = OneCycleLR(
            optimizer,
            max_lr=self._images.lr,
            epochs=self._images.num_epochs,
            steps_per_epoch=len(loaders[0]),
        )
        self._model, self._optimizer, self._train_loader, self._eval_loader, self._schedule = (
            accelerator.prepare(model, optimizer, *loaders, schedule)
        )
        self.step = 0
        """Steps done."""
        self.batch = self._images.batch_size * accelerator.num_processes
        """Images of a step, of all ranks."""
        self._losses: list[torch.Tensor] = []
        self._pace = Pace()
        _save_bare_models(accelerator)

    def resume(self, checkpoint: str | None) -> int:
        """Resume from a checkpoint, also of a world of another size; returns the step."""
        if checkpoint:
            self._accelerator.load_state(checkpoint)
            state = json.loads(Path(checkpoint, "trainer_state.json").read_text(encoding="utf-8"))
            self.step = round(float(state["epoch"]) * len(self._train_loader))
        return self.step

    def train(self) -> dict[str, float]:
        """Train the epochs that are left; returns the evaluation's accuracy in percent, and its loss."""
        self._pace = Pace(self.step)
        set_samples_per_step(self._images.batch_size)
        results: dict[str, float] = {}
        for epoch in range(self.step // len(self._train_loader), self._images.num_epochs):
            self._epoch(epoch)
            results = self._evaluate()
            self._accelerator.print(f"epoch {epoch}: {results['accuracy']:.2f}", flush=True)
            metrics({**results, "epoch": epoch}, step=self.step)
            if self._options.save_every == "epoch":
                self._save()
        return results or self._evaluate()

    def _epoch(self, epoch: int) -> None:
        self._model.train()
        self._train_loader.set_epoch(epoch)
        done = self.step % len(self._train_loader)
        for batch in self._accelerator.skip_first_batches(self._train_loader, done):
            self._step(batch)
            if self.step % self._images.logging_steps == 0 or self.step == self._total:
                self._report()
            if isinstance(self._options.save_every, int) and self.step % self._options.save_every == 0:
                self._save()

    def _step(self, batch: dict[str, torch.Tensor]) -> None:
        loss = cross_entropy(self._model(self._inputs(batch)), batch["label"])
        self._accelerator.backward(loss)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        self._losses.append(loss.detach())
        self.step += 1

    @property
    def _total(self) -> int:
        return len(self._train_loader) * self._images.num_epochs

    def _inputs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = (batch["image"] - self._mean) / self._std
        return inputs.to(memory_format=torch.channels_last) if self._images.channels_last else inputs

    def _report(self) -> None:
        loss = self._accelerator.reduce(torch.stack(self._losses).mean(), "mean")
        self._losses = []
        self._pace.report(
            self.step,
            self._total,
            self.batch,
            epoch=round(self.step / len(self._train_loader), 3),
            loss=round(float(loss), 4),
            learning_rate=float(self._schedule.get_last_lr()[0]),
        )

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Evaluate on all ranks together; gather drops the samples that only fill up the last batch."""
        self._model.eval()
        right, losses = [], []
        for batch in self._eval_loader:
            scores = self._model(self._inputs(batch))
            found = scores.argmax(dim=-1) == batch["label"]
            own = found, cross_entropy(scores, batch["label"], reduction="none")
            all_found, all_losses = self._accelerator.gather_for_metrics(own)
            right.append(all_found)
            losses.append(all_losses)
        accuracy = 100 * torch.cat(right).double().mean().item()
        return {"accuracy": round(accuracy, 2), "eval_loss": round(torch.cat(losses).mean().item(), 4)}

    def _save(self) -> None:
        """Save a checkpoint, its state last: without a state it is incomplete, and not resumed from."""
        folder = Path(self._options.checkpoints, f"checkpoint-{self.step}")
        state = folder / "trainer_state.json"
        if self._accelerator.is_main_process:
            state.unlink(missing_ok=True)
        self._accelerator.save_state(str(folder))
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            done = {"global_step": self.step, "epoch": self.step / len(self._train_loader)}
            state.write_text(json.dumps(done) + "\n", encoding="utf-8")
            for old in checkpoints.latest_first(folder.parent)[self._images.checkpoints_total_limit :]:
                shutil.rmtree(old)


def _save_bare_models(accelerator: Accelerator) -> None:
    """Have checkpoints hold the bare model, which a world of any size can load."""

    def bare(models: list[Any]) -> list[Any]:
        return [accelerator.unwrap_model(model, keep_torch_compile=False) for model in models]

    def save(models: list[Any], weights: list[Any], _: str) -> None:
        weights[:] = [model.state_dict() for model in bare(models)]

    def load(models: list[Any], _: str) -> None:
        models[:] = bare(models)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
