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

from manycpu.pipeline.node.metrics import metrics
from manycpu.pipeline.recipes.checkpoints import resume_point
from manycpu.pipeline.recipes.image_classification import images, loading, model
from manycpu.pipeline.recipes.image_classification.epochs import Epochs
from manycpu.pipeline.recipes.image_classification.images import Labelled, Split
from manycpu.pipeline.recipes.image_classification.options import ImageOptions, Options
from manycpu.pipeline.recipes.reporting import bf16_notes, say
from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["run"]


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
    epochs = Epochs(options, accelerator, network, loading.loaders(split, chosen, _workers(chosen, env)))
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


def _workers(options: ImageOptions, env: Mapping[str, str]) -> int:
    threads = loading.threads(env)
    workers = loading.workers(options.num_workers, threads)
    torch.set_num_threads(threads - workers)
    say(f"each rank has {threads} threads: {workers} to load images, {threads - workers} to compute")
    return workers


def _write(network: Any, options: Options, classes: tuple[str, ...], results: dict[str, Any]) -> None:
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    model.write(network, output, classes, options.images.image_size)
    text = json.dumps(results, indent=2, sort_keys=True)
    (output / "all_results.json").write_text(text + "\n", encoding="utf-8")
