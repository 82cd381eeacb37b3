"""What each process does: train a model, its own or the shared one, and report to its parent.

Two queues lead from and to the parent. A report's numbers are a tensor in shared memory, which comes back
through the other queue for reuse: however long the training, there are :data:`TENSORS` of them for each
process. A queue has one writer and one reader, and so needs no lock, which a killed process would hold for
ever, and no semaphore, which it would leave in /dev/shm. For the same reason tensors are named by their
number: sending their memory each time takes a thread and a socket of each process.
"""

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import nn

from manycpu.pipeline.recipes.hogwild.images import Images
from manycpu.pipeline.recipes.hogwild.options import Options
from manycpu.pipeline.spec import kernel

__all__ = ["TENSORS", "Job", "Kind", "Net", "Report", "tensors", "work"]

TENSORS: Final = 4
"""Tensors of a process, so that as many reports may be on their way."""
_VALUES: Final = 2  # of a report: the loss and the accuracy of the step's batch

Kind = Literal["ready", "progress", "average", "done"]


class Report(NamedTuple):
    """A report of a process."""

    kind: Kind
    epoch: int
    step: int
    """Steps that the process has taken, over all epochs."""
    tensor: int
    """Number of the tensor with the values; the parent owns it until it sends the number back."""


def tensors() -> torch.Tensor:
    """Make the tensors of a process, in shared memory: a row for each report."""
    made = torch.zeros(TENSORS, _VALUES)
    return made.share_memory_()  # type: ignore[no-any-return, no-untyped-call]


class Net(nn.Module):
    """The network of PyTorch's example, with its names, so that their saved models fit each other.

    Two convolutions and two linear layers, with dropout: images of 28 x 28, ten classes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, kernel_size=5), nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 1, 28, 28) to the logarithms of probabilities, (batch, 10)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


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
    """Train for all epochs, and report to the parent; the process ends when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent, which ends all
    kernel.end_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it died before the kernel was asked
        os._exit(1)
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.options.seed + job.number)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=job.options.lr, momentum=job.options.momentum)
    reporter = _Reporter(connection, job.tensors)
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
    """Take a step; returns the loss and the accuracy of its batch."""
    pixels, labels = job.images.batch(indices, *job.scale)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=job.bf16):
        scores = job.model(pixels)
    loss = F.nll_loss(scores.float(), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return torch.stack([loss.detach(), (scores.argmax(1) == labels).float().mean()])


class _Reporter:
    """The queues, as the process that trains uses them."""

    def __init__(self, connection: "Connection[Any, Any]", tensors: torch.Tensor) -> None:
        self._connection, self._tensors = connection, tensors
        self._free = list(range(len(tensors)))

    def steps(self) -> int:
        """Wait until all processes are ready; returns the steps to take in each epoch."""
        self._connection.send(Report("ready", 0, 0, self._free[0]))
        return int(self._connection.recv())

    def report(self, kind: Kind, epoch: int, step: int, values: torch.Tensor) -> None:
        """Report values; waits only if all tensors are on their way."""
        if not self._free:
            self._take_back()
        number = self._free.pop()
        self._tensors[number].copy_(values)
        self._connection.send(Report(kind, epoch, step, number))

    def wait(self) -> None:
        """Wait until the parent has handled every report."""
        while len(self._free) < len(self._tensors):
            self._take_back()

    def _take_back(self) -> None:
        self._free.append(self._connection.recv())
