"""Run the training from end to end: images, model, epochs, and what is written to the output."""

import json
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    gather_object,
    set_seed,
)
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Compose, RandomResizedCrop, ToTensor  # type: ignore[import-untyped]

from manycpu.pipeline.node.metrics import metrics
from manycpu.pipeline.recipes import checkpoints
from manycpu.pipeline.recipes.image_classification import images
from manycpu.pipeline.recipes.image_classification import model as models
from manycpu.pipeline.recipes.image_classification.images import Labelled, Split
from manycpu.pipeline.recipes.image_classification.options import ImageOptions, Options
from manycpu.pipeline.recipes.reporting import Pace, say, say_notes, write_results
from manycpu.pipeline.spec.errors import BadInputError

_MAX_WORKERS = 4
"""Processes that load images, as in Accelerate's tutorial."""
_THREADS_PER_WORKER = 4
"""Threads of a rank for each of these processes; with fewer the rank loads images itself."""
_INITIAL_DIVISOR = 25
"""The one cycle begins at its greatest learning rate divided by this."""


def run(options: Options, env: Mapping[str, str]) -> dict[str, Any]:
    """Train and evaluate; write the model and ``all_results.json`` to ``options.output``.

    Returns the results by name.
    """
    chosen = options.images
    say_notes(options.notes, env, bf16=chosen.mixed_precision == "bf16")
    labelled = images.read(chosen.data_dir, chosen.label_pattern)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=chosen.mixed_precision,
        dynamo_backend="inductor" if chosen.torch_compile else "no",
        # Then the order of an epoch depends on the seed and its number only: a resumed training has the same.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True,  # no copy from gradients to buckets
                comm_hook=DDPCommunicationHookType(chosen.gradient_compression),
            )
        ],
    )
    split = _checked_split(labelled, chosen, accelerator)
    set_seed(chosen.seed)
    with accelerator.local_main_process_first():  # it downloads what the others then find in the cache
        model = models.create(chosen, len(labelled.classes), env)
    epochs = _Epochs(options, accelerator, model, _loaders(split, chosen, env))
    start = time.monotonic()
    resumed_step = epochs.resume(
        checkpoints.resume_point(options.checkpoints, chosen.resume_from_checkpoint, env)
    )
    evaluated, seconds = epochs.train(), time.monotonic() - start
    trained_steps = epochs.step - resumed_step  # 0: a retry after the last step, whose speed would be 0
    speed = {"train_samples_per_second": round(trained_steps * epochs.batch / seconds, 3)}
    results = {
        **evaluated,
        "train_steps": epochs.step,
        "train_runtime": round(seconds, 4),
        **(speed if trained_steps else {}),
        **({"resumed_from_step": resumed_step} if resumed_step else {}),
    }
    metrics(results)
    if accelerator.is_main_process:
        models.write(model, Path(options.output), labelled.classes, chosen.image_size)
        write_results(Path(options.output), results)
    accelerator.wait_for_everyone()  # until the main process has written
    return results


def _checked_split(labelled: Labelled, options: ImageOptions, accelerator: Accelerator) -> Split:
    """Split the images for training and evaluation, and check that all of them can be read.

    Each rank reads a part of them; all ranks learn of a fault.

    Raises:
        BadInputError: An image cannot be read, or there are too few.
    """
    split = images.split(labelled, options.seed)
    images.check_sizes(len(split.train.files), options.batch_size, accelerator.num_processes)
    own_files = labelled.files[accelerator.process_index :: accelerator.num_processes]
    faults = [fault for fault in gather_object([images.broken(own_files)]) if fault]
    if faults:
        fix = "Replace it, or take it out of the folder"
        raise BadInputError(f"an image cannot be read: {faults[0]}", field="run.data", fix=fix)
    say(
        f"{len(split.train.files)} images to train on, {len(split.evaluation.files)} to evaluate on, "
        f"{len(labelled.classes)} classes"
    )
    return split


class _ImageDataset(Dataset[dict[str, Any]]):
    """Images as tensors, each with the number of its class; files are read when an item is asked for."""

    def __init__(self, images: Labelled, transform: Any) -> None:
        self._images, self._transform = images, transform

    def __len__(self) -> int:
        return len(self._images.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = models.pixels(self._images.files[index], self._transform)
        return {"image": pixels, "label": self._images.labels[index]}


def _loaders(
    split: Split, options: ImageOptions, env: Mapping[str, str]
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Make the loaders for training and evaluation, and leave torch the threads that they do not take.

    Training has random crops; evaluation has batches twice as large, as it keeps no gradients.
    """
    threads = int(env.get("MANYCPU_THREADS") or torch.get_num_threads())
    workers = loader_processes(options.num_workers, threads)
    torch.set_num_threads(threads - workers)
    say(f"each rank has {threads} threads: {workers} to load images, {threads - workers} to compute")
    size, batch = options.image_size, options.batch_size
    train = _ImageDataset(split.train, Compose([RandomResizedCrop(size, scale=(0.5, 1.0)), ToTensor()]))
    evaluation = _ImageDataset(split.evaluation, models.evaluation_transform(size))
    return (
        DataLoader(train, batch_size=batch, shuffle=True, num_workers=workers),
        DataLoader(evaluation, batch_size=2 * batch, num_workers=workers),
    )


def loader_processes(asked: int | None, threads: int) -> int:
    """Choose how many processes load images; each replaces one of the rank's threads (docs/speed.md).

    ``asked`` is ``--num_workers``; None: one for each four threads, 4 at most. One thread stays to compute.

    >>> [loader_processes(None, threads) for threads in (1, 3, 4, 16, 56)]
    [0, 0, 1, 4, 4]
    >>> [loader_processes(4, threads) for threads in (1, 3, 4, 16)]
    [0, 2, 3, 4]
    """
    return min(threads // _THREADS_PER_WORKER, _MAX_WORKERS) if asked is None else min(asked, threads - 1)


class _Epochs:
    """Trains a model, epoch by epoch, and evaluates it after each."""

    def __init__(
        self, options: Options, accelerator: Accelerator, model: Any, loaders: tuple[Any, Any]
    ) -> None:
        # `_images` are the recipe's own options, of the images and of the training.
        self._options, self._images, self._accelerator = options, options.images, accelerator
        self._mean, self._std = models.normalization(model)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        lr = self._images.lr
        # Before `prepare` deals the batches to the ranks: Accelerate steps the scheduler once per rank.
        steps = self._images.num_epochs * len(loaders[0])
        optimizer = torch.optim.Adam(trainable, lr=lr / _INITIAL_DIVISOR, fused=True)
        self._one_cycle = partial(OneCycleLR, optimizer, max_lr=lr, total_steps=steps)
        self._model, self._optimizer, self._train_loader, self._eval_loader, self._schedule = (
            accelerator.prepare(model, optimizer, *loaders, self._one_cycle())
        )
        self._epoch_steps = len(self._train_loader)
        self.step = 0
        """Steps done."""
        self.batch = self._images.batch_size * accelerator.num_processes
        """Images of a step, of all ranks."""
        self._losses: list[torch.Tensor] = []  # since the last report
        _register_unwrapping_hooks(accelerator)

    def resume(self, checkpoint: str | None) -> int:
        """Resume from a checkpoint, and set the learning rate for the step; returns the step.

        The checkpoint may be of another number of ranks; its step may then have another number here.
        ``checkpoint`` None: there is none, and the step is 0.
        """
        if checkpoint:
            self._accelerator.load_state(checkpoint)
            state = json.loads(Path(checkpoint, "trainer_state.json").read_text(encoding="utf-8"))
            # The number of steps of an epoch depends on the number of ranks.
            self.step = round(float(state["epoch"]) * self._epoch_steps)
            # The checkpoint's cycle may be of other epochs, or of another rate or size of a batch.
            cycle = self._one_cycle()
            # In each step, Accelerate steps the scheduler once per rank; `total_steps` counts so too. A cycle
            # with fewer steps than are done is at its end.
            done = min(self.step * self._accelerator.num_processes, cycle.total_steps)
            cycle.load_state_dict(cycle.state_dict() | {"last_epoch": done - 1, "_step_count": done})
            cycle.step()  # computes the learning rate of this step
            self._schedule.scheduler = cycle
        return self.step

    def train(self) -> dict[str, float]:
        """Train the epochs that are left; returns the evaluation's accuracy in percent, and its loss."""
        pace = Pace(self.step, self._images.batch_size, self._accelerator.num_processes)
        results: dict[str, float] = {}
        for epoch in range(self.step // self._epoch_steps, self._images.num_epochs):
            self._epoch(epoch, pace)
            results = self._evaluate()
            self._accelerator.print(f"epoch {epoch}: {results['accuracy']:.2f}", flush=True)
            metrics({**results, "epoch": epoch}, step=self.step)
            if self._options.save_every == "epoch":
                self._save()
        return results or self._evaluate()  # no epoch was left, as all were done before a resume

    def _epoch(self, epoch: int, pace: Pace) -> None:
        """Train the steps of an epoch that are left; report progress, and save checkpoints when due."""
        self._model.train()
        self._train_loader.set_epoch(epoch)
        total, every = self._epoch_steps * self._images.num_epochs, self._options.save_every
        # After a resume, the first epoch begins at the step that follows those already done.
        for batch in self._accelerator.skip_first_batches(self._train_loader, self.step % self._epoch_steps):
            loss = cross_entropy(self._model(self._inputs(batch)), batch["label"])
            self._accelerator.backward(loss)
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
            self._losses.append(loss.detach())
            self.step += 1
            if self.step % self._images.logging_steps == 0 or self.step == total:
                mean = self._accelerator.reduce(torch.stack(self._losses).mean(), "mean")
                self._losses = []
                pace.report(
                    self.step,
                    total,
                    epoch=round(self.step / self._epoch_steps, 3),
                    loss=round(float(mean), 4),
                    learning_rate=float(self._schedule.get_last_lr()[0]),
                )
            if isinstance(every, int) and self.step % every == 0:
                self._save()

    def _inputs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a batch's images, normalised and laid out in memory for the model."""
        inputs = (batch["image"] - self._mean) / self._std
        return inputs.to(memory_format=torch.channels_last) if self._images.channels_last else inputs

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        """Evaluate on all ranks together; returns the accuracy in percent, and the mean loss.

        The samples that only fill up the last batch do not count: gather_for_metrics drops them.
        """
        self._model.eval()
        is_right_by_batch, losses_by_batch = [], []
        for batch in self._eval_loader:
            scores = self._model(self._inputs(batch))
            is_right = scores.argmax(dim=-1) == batch["label"]
            rank_results = is_right, cross_entropy(scores, batch["label"], reduction="none")
            all_is_right, all_losses = self._accelerator.gather_for_metrics(rank_results)
            is_right_by_batch.append(all_is_right)
            losses_by_batch.append(all_losses)
        accuracy = 100 * torch.cat(is_right_by_batch).double().mean().item()
        return {
            "accuracy": round(accuracy, 2),
            "eval_loss": round(torch.cat(losses_by_batch).mean().item(), 4),
        }

    def _save(self) -> None:
        """Save a checkpoint, and delete the oldest ones beyond ``--checkpoints_total_limit``.

        Its trainer_state.json is written last. A checkpoint without that file is incomplete, and no training
        resumes from it.
        """
        folder = Path(self._options.checkpoints, f"checkpoint-{self.step}")
        state = folder / "trainer_state.json"
        if self._accelerator.is_main_process:
            # An earlier save of this step may have left it: half-replaced files would then pass for whole.
            state.unlink(missing_ok=True)
        self._accelerator.save_state(str(folder))
        self._accelerator.wait_for_everyone()  # until each rank has written its files
        if self._accelerator.is_main_process:
            done = {"global_step": self.step, "epoch": self.step / self._epoch_steps}
            state.write_text(json.dumps(done) + "\n", encoding="utf-8")
            for old in checkpoints.latest_first(folder.parent)[self._images.checkpoints_total_limit :]:
                shutil.rmtree(old)


def _register_unwrapping_hooks(accelerator: Accelerator) -> None:
    """Make checkpoints hold the model without its wrappers, so that any number of ranks can load it."""
    unwrap = partial(accelerator.unwrap_model, keep_torch_compile=False)

    def save(models: list[Any], weights: list[Any], _: str) -> None:
        # Replaced in place: accelerate writes this list after the hook.
        weights[:] = [unwrap(model).state_dict() for model in models]

    def load(models: list[Any], _: str) -> None:
        models[:] = map(unwrap, models)  # in place as well: accelerate loads into these after the hook

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
