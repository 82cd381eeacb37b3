"""Run the training from end to end: data, processes, averages, the test, and what is written."""

import copy
import math
import shutil
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import nn

from manycpu.pipeline.node.metrics import metrics, progress
from manycpu.pipeline.recipes.hogwild import images, options
from manycpu.pipeline.recipes.hogwild.images import Images
from manycpu.pipeline.recipes.hogwild.options import Options
from manycpu.pipeline.recipes.hogwild.workers import TENSORS, Job, Net, Workers
from manycpu.pipeline.recipes.reporting import say, say_notes, write_results
from manycpu.pipeline.spec.errors import BadInputError

_MODEL: Final = "MNIST_hogwild.pt"  # the name and the content that PyTorch's example gives it
_SHARED: Final = Path("/dev/shm")  # noqa: S108 - where shared memory is


def run(chosen: Options, env: Mapping[str, str]) -> dict[str, Any]:
    """Train and test; write model and results to the run's output, and return the results by name.

    Each process of a rank has one job. At the end, all models have the same weights, whether the processes
    share one or have one each. So rank 0 tests the first model only.
    """
    say_notes(chosen.notes, env, bf16=False)
    torch_threads, ranks = torch.get_num_threads(), int(env.get("WORLD_SIZE") or 1)
    threads = options.threads(chosen, env, default=torch_threads)
    torch.set_num_threads(1)  # OpenMP's threads must not exist when processes are forked
    train_images, test_images = images.load(env)
    jobs = _jobs(chosen, env, train_images, threads)
    say(
        f"{ranks * len(jobs)} processes, {'a model each' if chosen.averaged else 'one model'}; "
        f"{len(train_images)} images; threads of each process: {threads}"
    )
    results = _train(chosen, jobs, ranks)
    torch.set_num_threads(threads * len(jobs))  # the processes have ended: the test takes their threads
    if env.get("RANK", "0") == "0":
        results |= _test(jobs[0], test_images, chosen.test_batch_size)
        _write_outputs(jobs[0].model, results, chosen, env)
    if ranks > 1:
        dist.barrier()  # until rank 0 has written
        dist.destroy_process_group()
    return results


def _average(models: list[nn.Module], ranks: int) -> None:
    """Set all models, also those of other ranks, to the mean of their weights."""
    states = [list(model.state_dict().values()) for model in models]
    # All weights of a model in one tensor: the ranks reduce it in one call.
    mean = torch.stack([torch.cat([tensor.flatten() for tensor in state]) for state in states]).mean(0)
    if ranks > 1:
        dist.all_reduce(mean)
        mean /= ranks
    for state in states:
        parts = torch.split(mean, [tensor.numel() for tensor in state])
        for tensor, part in zip(state, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _jobs(chosen: Options, env: Mapping[str, str], trained: Images, threads: int) -> list[Job]:
    """Return a job for each process of this rank, with models and images in shared memory.

    Raises:
        BadInputError: The shared memory has not enough room for the images.
    """
    needed = trained.pixels.nbytes + trained.labels.nbytes
    if _SHARED.is_dir():
        free = shutil.disk_usage(_SHARED).free
        if needed > free:  # a process that fills it up dies of SIGBUS
            raise BadInputError(
                f"the images take {needed >> 20} MiB of shared memory, "
                f"and {_SHARED} has {free >> 20} MiB left",
                field="run.data",
                fix="Mount a memory-backed volume there, or run the container with --shm-size",
            )
    torch.manual_seed(chosen.seed)
    model, count = Net(), chosen.num_processes
    if chosen.start_method == "fork":
        torch.optim.SGD(model.parameters())  # imports modules once, for all forks
    models = [copy.deepcopy(model) if chosen.averaged else model for _ in range(count)]
    for tensor in trained:
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    return [
        Job(
            options=chosen,
            number=int(env.get("RANK") or 0) * count + index,
            threads=threads,
            bf16=env.get("MANYCPU_DTYPE") == "bf16",
            model=models[index].share_memory(),
            images=trained,
            scale=trained.scale(),
            tensors=torch.zeros(TENSORS).share_memory_(),  # type: ignore[no-untyped-call]
        )
        for index in range(count)
    ]


def _train(chosen: Options, jobs: list[Job], ranks: int) -> dict[str, Any]:
    """Start a process for each job, train all epochs, and report progress; returns the results by name.

    All processes of all ranks take the same number of steps, so that they meet for each average.
    """
    image_count = len(jobs[0].images)
    last_losses: dict[int, float] = {}  # number of a process -> its last loss
    averages = 0  # of all processes of this rank: each reports each average
    # Processes are started first: a process group has threads, whose locks would stay held in a fork.
    with Workers(jobs, chosen.start_method) as workers:
        if ranks > 1:
            dist.init_process_group()
        workers.ready()
        # Steps of an epoch: as many as the rank with the least data can take.
        epoch_steps = torch.tensor(1 if chosen.dry_run else math.ceil(image_count / chosen.batch_size))
        if ranks > 1:
            dist.all_reduce(epoch_steps, dist.ReduceOp.MIN)
        steps = int(epoch_steps)
        total = steps * chosen.epochs
        start = time.monotonic()
        for index, report, values in workers.train(
            steps, partial(_average, [job.model for job in jobs], ranks)
        ):
            last_losses[index], accuracy = values.tolist()
            if report.kind == "average":
                averages += 1
            if report.kind == "progress":
                say(
                    f"process {index}: epoch {report.epoch}, step {report.step} of {total}, "
                    f"loss {last_losses[index]:.4f}, accuracy {accuracy:.2f}"
                )
                if index == 0:  # it stands for all processes
                    progress(step=report.step, total_steps=total, epoch=report.epoch, loss=last_losses[index])
        seconds = time.monotonic() - start
    processes = len(jobs) * ranks
    samples = min(steps * chosen.batch_size, image_count) * chosen.epochs * processes
    return {
        "averages": averages // len(jobs),
        "processes": processes,
        "threads_per_process": jobs[0].threads,
        "train_loss": sum(last_losses.values()) / len(last_losses),
        "train_runtime": seconds,
        "train_samples_per_second": samples / seconds,
        "train_steps": total * processes,
    }


@torch.no_grad()
def _test(job: Job, tested: Images, size: int) -> dict[str, Any]:
    """Test the job's model on images, ``size`` at a time; returns the results by name."""
    job.model.eval()
    loss, right = 0.0, 0
    for indices in torch.split(torch.arange(len(tested)), size):
        pixels, labels = tested.batch(indices, *job.scale)
        scores = job.model(pixels)
        loss += float(F.nll_loss(scores, labels, reduction="sum"))
        right += int((scores.argmax(1) == labels).sum())
    say(f"test: {right} of {len(tested)} images are recognised")
    return {
        "accuracy": right / len(tested),
        "pixel_mean": job.scale[0],
        "pixel_std": job.scale[1],
        "test_loss": loss / len(tested),
    }


def _write_outputs(
    model: nn.Module, results: dict[str, Any], chosen: Options, env: Mapping[str, str]
) -> None:
    """Report the results as metrics, and write them and the model to the run's output.

    Without an output, they go to the working directory if ``--save_model`` is given; else nothing is written.
    """
    metrics(results)
    output_folder = env.get("MANYCPU_OUTPUT") or ("." if chosen.save_model else None)
    if output_folder is None:
        say("the model is not kept: add --save_model")
        return
    # JSON has no infinity or NaN.
    json_results = {name: value if math.isfinite(value) else None for name, value in results.items()}
    write_results(Path(output_folder), json_results)
    torch.save(model.state_dict(), Path(output_folder, _MODEL))
