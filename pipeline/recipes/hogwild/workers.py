"""Start the processes, receive their reports, and end all of them when one dies."""

import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any, NamedTuple, Self

import torch
import torch.multiprocessing as mp

from manycpu.pipeline.recipes.hogwild.worker import Job, Report, work

__all__ = ["DiedError", "Workers"]

_HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory, perhaps)",
    signal.SIGBUS: " (/dev/shm is full, perhaps)",
}


class DiedError(RuntimeError):
    """A process ended before it had trained to the end."""


class _Worker(NamedTuple):
    number: int
    process: Any
    queue: "connection.Connection[Any, Any]"
    tensors: torch.Tensor


class Workers:
    """The processes of this rank; leaving the block ends those that still run."""

    def __init__(self, jobs: Sequence[Job], start_method: str) -> None:
        self._jobs, self._context = jobs, mp.get_context(start_method)
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        try:
            for index, job in enumerate(self._jobs):
                self._workers.append(self._started(index, job))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def ready(self) -> None:
        """Wait until all of them can begin.

        Raises:
            DiedError: One of them has ended.
        """
        waiting = len(self._workers)
        for _, report in self._reports():
            waiting -= report.kind == "ready"
            if not waiting:
                return

    def train(
        self, steps: int, received: Callable[[int, Report, torch.Tensor], None], average: Callable[[], None]
    ) -> None:
        """Have all of them take their steps, and wait for the last one.

        Args:
            steps: Steps in each epoch.
            received: Called with each report: number of the process, report and values.
            average: Called when all of them wait for their weights to be averaged.

        Raises:
            DiedError: One of them ended before.
        """
        for worker in self._workers:
            _send(worker, steps)
        meeting: list[tuple[_Worker, int]] = []
        for worker, report in self._reports():
            received(worker.number, report, worker.tensors[report.tensor])
            if report.kind != "average":
                _send(worker, report.tensor)
                continue
            meeting.append((worker, report.tensor))
            if len(meeting) == len(self._workers):
                average()
                for each, tensor in meeting:
                    _send(each, tensor)
                meeting.clear()

    def _started(self, index: int, job: Job) -> _Worker:
        ours, its = self._context.Pipe()
        process = self._context.Process(target=work, args=(job, its), name=f"hogwild-{index}", daemon=True)  # type: ignore[attr-defined]
        process.start()
        its.close()  # so that its end is the queue's end
        return _Worker(index, process, ours, job.tensors)

    def _reports(self) -> Iterator[tuple[_Worker, Report]]:
        """Yield what the processes report, until all have ended."""
        queues: dict[Any, _Worker] = {worker.queue: worker for worker in self._workers}
        ends: dict[Any, _Worker] = {worker.process.sentinel: worker for worker in self._workers}
        done: set[int] = set()
        while queues or ends:
            for each in connection.wait([*queues, *ends]):
                if worker := ends.pop(each, None):
                    worker.process.join()
                    if worker.process.exitcode:
                        raise self._died(worker)
                elif report := _received(queues[each]):
                    done |= {queues[each].number} if report.kind == "done" else set()
                    yield queues[each], report
                elif (worker := queues.pop(each)).number not in done:
                    worker.process.join()  # only its end closes its queue
                    raise self._died(worker)

    def _died(self, worker: _Worker) -> DiedError:
        code = worker.process.exitcode
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}{_HINTS.get(-code, '')}"
        others = len(self._workers) - 1
        return DiedError(
            f"process {worker.number} (pid {worker.process.pid}) {how}, before it had trained to the end; "
            f"the {others} other(s) of this rank are ended"
        )

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.queue.close()


def _received(worker: _Worker) -> Report | None:
    try:
        report: Report = worker.queue.recv()
    except (EOFError, ConnectionResetError):
        return None
    return report


def _send(worker: _Worker, value: int) -> None:
    try:
        worker.queue.send(value)
    except OSError:  # it has ended, which _reports notices
        return
