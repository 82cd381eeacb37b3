"""The processes of a rank: each trains a model, its own or the shared one, and reports to the rank.

Each process has two queues: one to the rank, one back. A report's values are in a tensor in shared memory;
the rank sends the tensor's number back, so that the process can use the tensor again. A process has few
tensors (:data:`TENSORS`), however long the training is. A queue has one writer and one reader, so it needs no
lock or semaphore. A killed process would hold a lock for ever, and leave a semaphore in /dev/shm. Tensors are
sent by number, because sending their memory takes a thread and a socket of each process.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Any, Final, Literal, NamedTuple, Self

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import nn

from manycpu.pipeline.recipes.hogwild.images import Images
from manycpu.pipeline.recipes.hogwild.options import Options
from manycpu.pipeline.spec import kernel

TENSORS: Final = (4, 2)
"""Shape of a process's tensors: reports that may be on their way, and values of each: loss and accuracy."""
_HINTS: Final[dict[int, str]] = {
    signal.SIGKILL: " (out of memory, perhaps)",
    signal.SIGBUS: " (/dev/shm is full, perhaps)",
}


class DiedError(RuntimeError):
    """A process ended before it had trained to the end."""


class Report(NamedTuple):
    """A report of a process."""

    kind: Literal["ready", "progress", "average", "done"]
    epoch: int = 0
    step: int = 0
    """Steps that the process has taken, over all epochs."""
    tensor: int = 0
    """Number of the tensor with the values; the rank owns it until it sends the number back."""


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
    """Number of this process among those of all ranks."""
    threads: int
    bf16: bool
    model: nn.Module
    images: Images
    scale: tuple[float, float]
    tensors: torch.Tensor
    """The values of its reports, in the shape :data:`TENSORS`."""


def _work(job: Job, queue: "connection.Connection[Any, Any]") -> None:
    """Train for all epochs, and report to the rank; the process ends when the rank does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the rank, which ends all
    kernel.end_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():  # it ended before end_with_parent was called
        os._exit(1)
    options = job.options
    torch.set_num_threads(job.threads)
    torch.manual_seed(options.seed + job.number)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=options.lr, momentum=options.momentum)
    free = list(range(len(job.tensors)))  # numbers of the tensors that the rank does not own
    done = 0  # steps taken, over all epochs
    values = torch.zeros(TENSORS[1])  # loss and accuracy of the last step

    def report(kind: Literal["progress", "average", "done"], epoch: int) -> None:
        """Send the last step's ``values`` in a free tensor; if none is free, wait for one from the rank."""
        if not free:
            free.append(queue.recv())
        number = free.pop()
        job.tensors[number].copy_(values)
        queue.send(Report(kind, epoch, step=done, tensor=number))

    queue.send(Report("ready"))
    steps = queue.recv()  # of each epoch, once all processes are ready
    total = steps * options.epochs
    job.model.train()
    for epoch in range(1, options.epochs + 1):
        for indices in torch.split(torch.randperm(len(job.images)), options.batch_size)[:steps]:
            values = _step(job, optimizer, indices)
            done += 1
            step_of_epoch = (done - 1) % steps
            if step_of_epoch % options.log_interval == 0:
                report("progress", epoch)
            if options.averaged and (done % options.average_every == 0 or done == total):
                report("average", epoch)
                while len(free) < len(job.tensors):  # until the rank has handled every report
                    free.append(queue.recv())
    report("done", options.epochs)


def _step(job: Job, optimizer: torch.optim.Optimizer, indices: torch.Tensor) -> torch.Tensor:
    """Take a step; returns the loss and the accuracy of its batch."""
    pixels, labels = job.images.batch(indices, *job.scale)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=job.bf16):
        scores = job.model(pixels)
    loss = F.nll_loss(scores.float(), labels)  # in fp32, also of scores in bf16
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return torch.stack([loss.detach(), (scores.argmax(1) == labels).float().mean()])


class _Worker(NamedTuple):
    """A process, as its rank knows it."""

    number: int
    process: Any
    queue: "connection.Connection[Any, Any]"
    tensors: torch.Tensor

    def send(self, value: int) -> None:
        """Send the number of steps of an epoch, or that of a tensor that is free again."""
        with suppress(OSError):  # the process has ended, which Workers._reports notices
            self.queue.send(value)


class Workers:
    """The processes of this rank; leaving the block ends those that still run."""

    def __init__(self, jobs: Sequence[Job], start_method: str) -> None:
        self._jobs, self._context = jobs, mp.get_context(start_method)
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        """Start the processes; if one cannot be started, end those that run."""
        try:
            for index, job in enumerate(self._jobs):
                queue, process_queue = self._context.Pipe()
                process = self._context.Process(  # type: ignore[attr-defined]
                    target=_work, args=(job, process_queue), name=f"hogwild-{index}", daemon=True
                )
                process.start()
                process_queue.close()  # else the queue would stay open when the process has ended
                self._workers.append(_Worker(index, process, queue, job.tensors))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the processes that still run, and wait until all have ended."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.queue.close()

    def ready(self) -> None:
        """Wait until every process has reported that it can begin; raises DiedError if one has ended."""
        ready_count = 0
        for _, report in self._reports():
            if report.kind == "ready":
                ready_count += 1
            if ready_count == len(self._workers):
                return

    def train(self, steps: int, average: Callable[[], None]) -> Iterator[tuple[int, Report, torch.Tensor]]:
        """Have all processes take their steps; yield each report: number of the process, report, and values.

        The values are the loss and the accuracy of a batch, valid until the next report is requested.

        Args:
            steps: Steps in each epoch.
            average: Sets all models to their mean; called whenever all processes wait for it.

        Raises:
            DiedError: A process has ended too early.
        """
        for worker in self._workers:
            worker.send(steps)
        waiting: list[tuple[_Worker, int]] = []
        for worker, report in self._reports():
            yield worker.number, report, worker.tensors[report.tensor]
            if report.kind != "average":
                worker.send(report.tensor)
                continue
            waiting.append((worker, report.tensor))
            if len(waiting) == len(self._workers):
                average()
                for waiting_worker, tensor in waiting:
                    waiting_worker.send(tensor)
                waiting.clear()

    def _reports(self) -> Iterator[tuple[_Worker, Report]]:
        """Yield each report with its process, until all processes have ended.

        Raises:
            DiedError: A process has failed, or has ended without the report ``done``.
        """
        by_queue: dict[Any, _Worker] = {worker.queue: worker for worker in self._workers}
        by_sentinel: dict[Any, _Worker] = {worker.process.sentinel: worker for worker in self._workers}
        done_numbers: set[int] = set()
        while by_queue or by_sentinel:
            for ready_object in connection.wait([*by_queue, *by_sentinel]):
                # A sentinel becomes ready when its process ends.
                if worker := by_sentinel.pop(ready_object, None):
                    worker.process.join()
                    if worker.process.exitcode:
                        raise self._died_error(worker)
                    continue
                worker = by_queue[ready_object]
                try:
                    report: Report = worker.queue.recv()
                except (EOFError, ConnectionResetError):
                    del by_queue[ready_object]
                    if worker.number not in done_numbers:
                        worker.process.join()  # only its end closes its queue
                        raise self._died_error(worker) from None
                else:
                    if report.kind == "done":
                        done_numbers.add(worker.number)
                    yield worker, report

    def _died_error(self, worker: _Worker) -> DiedError:
        """Make the error for a process that has ended too early."""
        code = worker.process.exitcode
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}{_HINTS.get(-code, '')}"
        other_count = len(self._workers) - 1
        return DiedError(
            f"process {worker.number} (pid {worker.process.pid}) {how}, before it had trained to the end; "
            f"the {other_count} other(s) of this rank are ended"
        )
