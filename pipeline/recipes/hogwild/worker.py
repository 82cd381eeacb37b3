"""What each process does: train a model, its own or everybody's, and report."""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import nn

from manycpu.pipeline.recipes.hogwild.images import Images
from manycpu.pipeline.recipes.hogwild.options import Options
from manycpu.pipeline.recipes.hogwild.reports import Reporter
from manycpu.pipeline.spec import kernel

__all__ = ["Job", "work"]


class Job(NamedTuple):
    """What a process is to do; tensors are in shared memory."""

    options: Options
    number: int
    """Of this process among those of all ranks."""
    threads: int
    bf16: bool
    model: nn.Module
    images: Images
    scale: tuple[float, float]
    tensors: torch.Tensor
    """Those of its reports."""


def work(job: Job, connection: "Connection[Any, Any]") -> None:
    """Train for all epochs."""
    _end_with_parent()
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.options.seed + job.number)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=job.options.lr, momentum=job.options.momentum)
    reporter = Reporter(connection, job.tensors)
    steps = reporter.steps()
    total, done = steps * job.options.epochs, 0
    values = torch.zeros(job.tensors.shape[1])
    job.model.train()
    for epoch in range(1, job.options.epochs + 1):
        for indices in torch.split(torch.randperm(len(job.images)), job.options.batch_size)[:steps]:
            values = _step(job, optimizer, indices)
            done += 1
            if (done - 1) % steps % job.options.log_interval == 0:
                reporter.report("progress", epoch, done, values)
            if job.options.averaged and (done % job.options.average_every == 0 or done == total):
                reporter.report("average", epoch, done, values)
                reporter.wait()
    reporter.report("done", job.options.epochs, done, values)


def _step(job: Job, optimizer: torch.optim.Optimizer, indices: torch.Tensor) -> torch.Tensor:
    """Take a step; the loss and the accuracy of its batch."""
    pixels, labels = job.images.batch(indices, *job.scale)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=job.bf16):
        scores = job.model(pixels)
    loss = F.nll_loss(scores.float(), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return torch.stack([loss.detach(), (scores.argmax(1) == labels).float().mean()])


def _end_with_parent() -> None:
    """End when the parent does, however it does; a terminal's Ctrl-C is for the parent, which ends all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel.end_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it died before the kernel was asked
        os._exit(1)
