"""The two queues between a process that trains and the one that started it.

A report's numbers are a tensor in shared memory, which comes back through the other queue for reuse: however
long the training, there are :data:`TENSORS` of them for each process. A queue has one writer and one reader,
and so needs no lock, which a process that is killed would keep for ever, and no semaphore, which it would
leave in /dev/shm. For the same reason tensors are named by their number: handing over their memory anew each
time takes a thread and a socket of each process.
"""

from multiprocessing.connection import Connection
from typing import Any, Final, Literal, NamedTuple

import torch

__all__ = ["TENSORS", "Kind", "Report", "Reporter", "tensors"]

TENSORS: Final = 4
"""Tensors of a process that may be under way."""
_VALUES: Final = 2  # of a report: the loss and the accuracy of the step's batch

Kind = Literal["ready", "progress", "average", "done"]


class Report(NamedTuple):
    """What a process says."""

    kind: Kind
    epoch: int
    step: int
    """Steps that the process has taken, over all epochs."""
    tensor: int
    """Number of the tensor that has the values; it is the reader's until it comes back."""


def tensors() -> torch.Tensor:
    """Make the tensors of a process, in shared memory: a row is a report's."""
    made = torch.zeros(TENSORS, _VALUES)
    return made.share_memory_()  # type: ignore[no-any-return, no-untyped-call]


class Reporter:
    """The side of the process that trains."""

    def __init__(self, connection: "Connection[Any, Any]", tensors: torch.Tensor) -> None:
        self._connection, self._tensors = connection, tensors
        self._free = list(range(len(tensors)))

    def steps(self) -> int:
        """Wait until all processes are ready; the steps to take in each epoch."""
        self._connection.send(Report("ready", 0, 0, self._free[0]))
        return int(self._connection.recv())

    def report(self, kind: Kind, epoch: int, step: int, values: torch.Tensor) -> None:
        """Report values; waits only where all tensors are under way."""
        if not self._free:
            self._take_back()
        number = self._free.pop()
        self._tensors[number].copy_(values)
        self._connection.send(Report(kind, epoch, step, number))

    def wait(self) -> None:
        """Wait until everything that was reported has been dealt with."""
        while len(self._free) < len(self._tensors):
            self._take_back()

    def _take_back(self) -> None:
        self._free.append(self._connection.recv())
