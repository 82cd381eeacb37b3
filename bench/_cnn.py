"""The small convolutional network of torch's mnist_hogwild example, and a process that trains it."""

import os
import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import nn

BATCH = 64


class Net(nn.Module):
    """Two convolutions, two linear layers; images of 28 x 28, ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 1, 28, 28) to (batch, 10)."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def model() -> Net:
    """Create the model, with the same weights each time."""
    torch.manual_seed(0)
    return Net()


def free_port() -> int:
    """Find a port for ranks to meet at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Job(NamedTuple):
    """What all processes of a training share."""

    kind: str
    """``hogwild``: one model for all; ``ddp``: each its own, in step."""
    count: int
    threads: int | None
    pins: list[set[int]]
    port: int
    model: nn.Module
    ready: Any
    go: Any
    stop: Any
    steps: Any


def work(rank: int, job: Job) -> None:
    """Train until the job's stop event is set."""
    if job.threads:
        torch.set_num_threads(job.threads)
    if job.pins:
        os.sched_setaffinity(0, job.pins[rank])
    trained = job.model
    if job.kind == "ddp":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{job.port}", rank=rank, world_size=job.count)
        trained = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=0.5)
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(trained(images), labels).backward()
        optimizer.step()

    step()  # the first one allocates
    job.ready.wait()
    job.go.wait()
    done = 0
    while not _all_stop(job):
        step()
        done += 1
    job.steps.put(done)
    if job.kind == "ddp":
        dist.destroy_process_group()


def _all_stop(job: Job) -> bool:
    """Agree with all ranks to stop: one that left early would have the others wait for ever."""
    if job.kind == "hogwild":
        return bool(job.stop.is_set())
    vote = torch.tensor([int(job.stop.is_set())])
    dist.all_reduce(vote, dist.ReduceOp.MAX)
    return bool(vote.item())
