"""A triggerer of a benchmark's own: follows jobs as Airflow's does, and measures itself meanwhile.

As a program it is given a file with the handles, and speaks JSON: a line for each thing that happens, on
stdout; a line on stdin says what to do next.
"""

import asyncio
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil


class Meter:
    """What this process does: turns of its event loop, requests, bytes that it reads."""

    def __init__(self) -> None:
        self.turns: list[float] = []
        """Seconds of CPU time of each turn of the event loop that took any."""
        self.requests: Counter[int] = Counter()
        """Second since the epoch -> requests begun, answered or not."""
        self.watches: Counter[str] = Counter()
        """What is watched -> how many watches of it are open."""
        self.watched = self.logged = 0
        """Bytes of watches, and of logs."""
        self.followers: list[Any] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure what is done in the block."""
        from manycpu.pipeline.adapters.cluster import Cluster
        from manycpu.pipeline.adapters.cluster_stream import ClusterStream, Lines
        from manycpu.pipeline.targets.kubernetes.following.follower import Follower

        with (
            mock.patch.object(asyncio.BaseEventLoop, "_run_once", self._timed(asyncio.BaseEventLoop)),
            mock.patch.object(ClusterStream, "answer", self._asked(ClusterStream.answer)),
            mock.patch.object(Cluster, "_call", self._called(vars(Cluster)["_call"])),
            mock.patch.object(Lines, "feed", self._read(Lines.feed)),
            mock.patch.object(Follower, "run", self._noted(Follower.run)),
        ):
            yield

    def _timed(self, loop: Any) -> Callable[..., None]:
        once = vars(loop)["_run_once"]

        def turn(self_: Any) -> None:
            began = time.thread_time()
            once(self_)
            self.turns.append(time.thread_time() - began)

        return turn

    def _asked(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        @asynccontextmanager
        async def asked(stream: Any, path: str, query: Any, silence: float) -> AsyncIterator[Any]:
            self.requests[int(time.time())] += 1
            async with answer(stream, path, query, silence) as got:
                self.watches[path.rpartition("/")[2]] += "watch" in query
                try:
                    yield got
                finally:
                    self.watches[path.rpartition("/")[2]] -= "watch" in query

        return asked

    def _called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any) -> Any:
            self.requests[int(time.time())] += 1
            return call(*given)

        return called

    def _read(self, feed: Callable[..., Any]) -> Callable[..., Any]:
        def read(lines: Any, block: bytes) -> Any:
            if vars(lines)["_limit"] is None:
                self.watched += len(block)
            else:
                self.logged += len(block)
            return feed(lines, block)

        return read

    def _noted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        async def noted(follower: Any, *given: Any) -> Any:
            self.followers.append(follower)
            return await run(follower, *given)

        return noted

    def met(self) -> int:
        """How many ranks have introduced themselves, of all jobs."""
        return sum(len(vars(one)["_recorder"].state.observed.ranks) for one in self.followers)

    def heard_since(self, moment: float) -> int:
        """How many followers have heard of job and pods since a moment of the monotonic clock."""
        return sum(min(vars(one)["_last_change"].values()) > moment for one in self.followers)

    def suspended(self) -> int:
        """How many followers know that their job waits."""
        return sum("suspended" in one.status.reason for one in self.followers)


def say(event: str, **fields: Any) -> None:
    """Tell the other process."""
    sys.stdout.write(json.dumps({"event": event, "time": time.time(), **fields}) + "\n")
    sys.stdout.flush()


async def heard() -> str:
    """Wait for the next word of the other process."""
    return (await asyncio.to_thread(sys.stdin.readline)).strip()


async def until(there: Callable[[], object]) -> None:
    """Wait for a condition: the process that started this one gives up first."""
    while not there():  # noqa: ASYNC110 - no event is set for it
        await asyncio.sleep(0.05)


class Triggerer:
    """Follows jobs, and says of each how it ended, and when.

    Args:
        handles: Of the jobs.
    """

    def __init__(self, handles: list[dict[str, Any]]) -> None:
        from airflow.triggers.shared_stream import SharedStreamManager

        self._manager = SharedStreamManager()
        self._tasks = [
            asyncio.create_task(self._follow(number, handle)) for number, handle in enumerate(handles)
        ]

    async def _follow(self, number: int, handle: dict[str, Any]) -> None:
        from manycpu.operators.job_trigger import JobTrigger

        place = {"dag_id": "bench", "run_id": str(number), "task_id": "train", "map_index": -1}
        trigger = JobTrigger(handle=handle, cursor=None, by="bench", place=place)
        key = trigger.shared_stream_key()
        stream = self._manager.subscribe(trigger_id=number, trigger=trigger, key=key)
        async with aclosing(trigger.filter_shared_stream(stream)) as events:  # type: ignore[type-var]
            status = (await anext(events)).payload["status"]
        say("end", name=handle["name"], state=status["state"], reason=status["reason"])

    @property
    def waiting(self) -> int:
        """How many have not ended."""
        return sum(not task.done() for task in self._tasks)

    async def join(self) -> None:
        """Wait until all have ended."""
        await asyncio.gather(*self._tasks)

    async def aclose(self) -> None:
        """End them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._manager.stop_all()


class Pages:
    """Takes what triggers send to Airflow: documents of their pages."""

    def __init__(self) -> None:
        self.documents = 0

    def send(self, message: Any) -> None:
        """Count it, once it is what goes over the wire."""
        message.model_dump_json()
        self.documents += 1


def memory() -> tuple[float, float]:
    """Return this process's memory now and at most, in MiB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return psutil.Process().memory_info().rss / 2**20, most


def cpu() -> float:
    """Return the CPU seconds that this process has used."""
    return float(sum(psutil.Process().cpu_times()[:2]))


def main(script: Callable[[Meter, Any], Any]) -> None:
    """Be the program: run a script with what the file says that is named first."""
    import logging

    from airflow.providers.cncf.kubernetes.triggers import job as _job  # noqa: F401 - imported before the count
    from airflow.sdk.execution_time import task_runner

    import manycpu.operators.base
    import manycpu.operators.job_trigger
    import manycpu.pipeline.targets.kubernetes.wait

    manycpu.operators.base.access_of = lambda _: None  # a kubeconfig's path, and no connection of Airflow's
    task_runner.SUPERVISOR_COMMS = Pages()  # type: ignore[assignment]
    logging.disable(logging.CRITICAL)
    meter = Meter()
    with meter.running():
        asyncio.run(script(meter, json.loads(Path(sys.argv[1]).read_text())))
    sys.stdout.flush()
    os._exit(0)
