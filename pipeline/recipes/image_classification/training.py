"""Run the training from end to end: images, model, epochs, and what is written to the output."""

import json
import time
from collections.abc import Mapping
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
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import Compose, RandomResizedCrop, ToTensor  # type: ignore[import-untyped]

from manycpu.pipeline.node.metrics import metrics
from manycpu.pipeline.recipes.checkpoints import resume_point
from manycpu.pipeline.recipes.image_classification import images, model
from manycpu.pipeline.recipes.image_classification.epochs import Epochs
from manycpu.pipeline.recipes.image_classification.images import Labelled, Split
from manycpu.pipeline.recipes.image_classification.options import ImageOptions, Options
from manycpu.pipeline.recipes.reporting import bf16_notes, say
from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["loader_processes", "run"]

_MAX_WORKERS = 4
"""Processes that load images, as in Accelerate's tutorial."""
_THREADS_PER_WORKER = 4
"""Threads of a rank for each of these processes; with fewer the rank loads images itself."""


def run(options: Options, env: Mapping[str, str]) -> dict[str, Any]:
    """Train and evaluate; write the model and ``all_results.json`` to ``options.output``.

    Returns:
        The metrics, the same on every rank but for speed.

    Raises:
        BadInputError: Images, model or options cannot be used.
    """
    chosen = options.images
    for note in (*options.notes, *bf16_notes(env, bf16=chosen.mixed_precision == "bf16")):
        say(note)
    labelled = images.read(chosen.data_dir, chosen.label_pattern)
    accelerator = _accelerator(chosen)
    split = _checked(labelled, chosen, accelerator)
    set_seed(chosen.seed)
    with accelerator.local_main_process_first():  # it downloads what the others then find in the cache
        network = _network(chosen, len(labelled.classes), env)
    epochs = Epochs(options, accelerator, network, _loaders(split, chosen, _share_threads(chosen, env)))
    began = time.monotonic()
    resumed = epochs.resume(resume_point(options.checkpoints, chosen.resume_from_checkpoint, env))
    evaluated, seconds = epochs.train(), time.monotonic() - began
    results = {
        **evaluated,
        "train_steps": epochs.step,
        "train_runtime": round(seconds, 4),
        "train_samples_per_second": round((epochs.step - resumed) * epochs.batch / seconds, 3),
        **({"resumed_from_step": resumed} if resumed else {}),
    }
    metrics(results)
    if accelerator.is_main_process:
        _write(network, options, labelled.classes, results)
    accelerator.wait_for_everyone()
    return results


def _accelerator(options: ImageOptions) -> Accelerator:
    return Accelerator(
        cpu=True,
        mixed_precision=options.mixed_precision,
        dynamo_backend="inductor" if options.torch_compile else "no",
        # Then the order of an epoch depends on the seed and its number only: a resumed training has the same.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                gradient_as_bucket_view=True,  # no copy from gradients to buckets
                comm_hook=DDPCommunicationHookType(options.gradient_compression),
            )
        ],
    )


def _checked(labelled: Labelled, options: ImageOptions, accelerator: Accelerator) -> Split:
    """Split the images, and check that they can be read, each rank a part of them."""
    split = images.split(labelled, options.seed)
    images.check_sizes(split, options.batch_size, accelerator.num_processes)
    own = labelled.files[accelerator.process_index :: accelerator.num_processes]
    faults = [fault for fault in gather_object([images.broken(own)]) if fault]
    if faults:
        fix = "Replace it, or take it out of the folder"
        raise BadInputError(f"an image cannot be read: {faults[0]}", field="run.data", fix=fix)
    say(
        f"{len(split.train.files)} images to train on, {len(split.evaluation.files)} to evaluate on, "
        f"{len(labelled.classes)} classes"
    )
    return split


def _network(options: ImageOptions, classes: int, env: Mapping[str, str]) -> Any:
    network = model.create(options, classes, env)
    model.check_size(network, options.image_size)
    if not options.unfreeze:
        model.freeze(network)
    if options.channels_last:
        network.to(memory_format=torch.channels_last)
    return network


def _share_threads(options: ImageOptions, env: Mapping[str, str]) -> int:
    """Share the rank's threads between loading and computing; returns the number of processes that load."""
    threads = int(env.get("MANYCPU_THREADS") or torch.get_num_threads())
    workers = loader_processes(options.num_workers, threads)
    torch.set_num_threads(threads - workers)
    say(f"each rank has {threads} threads: {workers} to load images, {threads - workers} to compute")
    return workers


def loader_processes(asked: int | None, threads: int) -> int:
    """Choose how many processes load images; each replaces one of the rank's threads (docs/speed.md).

    >>> [loader_processes(None, threads) for threads in (1, 3, 4, 16, 56)]
    [0, 0, 1, 4, 4]
    >>> [loader_processes(4, threads) for threads in (1, 3, 4, 16)]
    [0, 2, 3, 4]
    """
    return min(threads // _THREADS_PER_WORKER, _MAX_WORKERS) if asked is None else min(asked, threads - 1)


class _ImageDataset(Dataset[dict[str, Any]]):
    """Images as tensors, made by a transform, and the numbers of their classes."""

    def __init__(self, images: Labelled, transform: Any) -> None:
        self._images, self._transform = images, transform

    def __len__(self) -> int:
        return len(self._images.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with Image.open(self._images.files[index]) as image:
            return {"image": self._transform(image.convert("RGB")), "label": self._images.labels[index]}


def _loaders(split: Split, options: ImageOptions, workers: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Make the loaders: for training with random crops, for evaluation with batches twice as large."""
    size, batch = options.image_size, options.batch_size
    crop = Compose([RandomResizedCrop(size, scale=(0.5, 1.0)), ToTensor()])
    train, evaluation = (
        _ImageDataset(split.train, crop),
        _ImageDataset(split.evaluation, model.evaluation_transform(size)),
    )
    return (
        DataLoader(train, batch_size=batch, shuffle=True, num_workers=workers),
        DataLoader(evaluation, batch_size=2 * batch, num_workers=workers),
    )


def _write(network: Any, options: Options, classes: tuple[str, ...], results: dict[str, Any]) -> None:
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    model.write(network, output, classes, options.images.image_size)
    text = json.dumps(results, indent=2, sort_keys=True)
    (output / "all_results.json").write_text(text + "\n", encoding="utf-8")
