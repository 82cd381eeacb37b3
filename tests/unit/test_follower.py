"""No wait for a cluster that does not answer is endless; an end that cannot be recorded stays as it is."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.api_objects import T0, handle, job, pod

from manycpu.pipeline.adapters.cluster_watch import Changes
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.errors import ClusterError
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.context import Access
from manycpu.pipeline.targets.kubernetes.following import exit_records
from manycpu.pipeline.targets.kubernetes.following import follower as follower_module
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import (
    AttemptRecorder,
    Line,
    LogBatch,
)
from manycpu.pipeline.targets.kubernetes.following.follower import Follower

ENDED = [
    Changes("PyTorchJob", [job("Succeeded")], [], complete=True),
    Changes("Pod", [pod("qa-1-worker-0", phase="Succeeded")], [], complete=True),
]


class _Watch:
    now = staticmethod(time.time)


@pytest.fixture(autouse=True)
def _no_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_records, "read", lambda *_: [])


def follower(status: int | None) -> tuple[Follower, list[str]]:
    """Make a follower of a job whose ledger can be read, and not be written; and what it tells."""
    entry = Entry(key="k", name="qa", created=T0, run={}, target={}, attempt=1)

    @contextmanager
    def update() -> Any:
        yield entry
        if status is not None:
            raise ClusterError.of_status(status, "no such right")

    ledger = SimpleNamespace(read=lambda: entry, update=update)
    cluster = SimpleNamespace(
        get=lambda *_: ENDED[0].objects[0], list=lambda *_: ENDED[1].objects, delete=lambda *_, **__: True
    )
    target = Kubernetes(namespace="ml", claim="data")
    run, access = TrainingRun(program="x", output="/out"), Access(opened={"ml": cluster})
    ctx: Any = SimpleNamespace(ledger=ledger, target=target, access=access, run=run)
    watch: Any = _Watch()
    return Follower(ctx, handle(), watch, AttemptRecorder(ctx, handle(), None, "me")), []


def end(following: Follower, told: list[str], changes: list[Changes]) -> Status:
    """Follow to the end, which must come by itself."""

    async def stream() -> AsyncGenerator[list[Changes]]:
        yield changes
        await asyncio.Event().wait()

    async def tell(lines: list[RankLine]) -> None:
        told.extend(line.text for line in lines)

    async def run() -> Status:
        async with asyncio.timeout(30):
            return await following.run(stream(), tell)

    return asyncio.run(run())


@pytest.mark.parametrize("status", [0, 401, 403, 413, 422, 500])
def test_an_end_that_cannot_be_recorded_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(follower_module, "_RECORDING_TIMEOUT_S", 0.2)
    following, told = follower(status)
    assert end(following, told, ENDED).state is RunState.SUCCEEDED
    assert "how it ended could not be recorded: no such right." in told


def test_while_the_end_cannot_be_recorded_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_RECORDING_TIMEOUT_S", 0.2)
    following, told = follower(403)
    end(following, told, ENDED)
    assert told[0] == "how it ended could not be recorded so far: no such right."


@pytest.mark.parametrize("known", [[], ENDED[:1], ENDED[1:]])
def test_a_job_of_which_nothing_is_heard_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, known: list[Changes]
) -> None:
    monkeypatch.setattr(follower_module, "_SILENCE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(follower_module, "_TICK_S", 0.1)
    following, told = follower(None)
    trouble = Changes("Pod", [], [], complete=False, trouble="pods is forbidden")
    with pytest.raises(
        ClusterError, match=r"nothing was heard of \w+ objects .* PyTorchJob qa-1 is left as it is"
    ):
        end(following, told, [*known, trouble])
    assert "nothing is known of Pod objects at present: pods is forbidden" in told


class Log:
    """A log of a container that has ended: it comes in blocks, each of which takes its time."""

    def __init__(self, blocks: int, lines: int, pause: float) -> None:
        self.blocks, self.lines, self.pause = blocks, lines, pause

    async def __call__(self, *_: object) -> AsyncGenerator[list[bytes]]:
        for block in range(self.blocks):
            await asyncio.sleep(self.pause)
            stamp = f"2026-01-01T00:00:{block:02}Z"
            yield [f"{stamp} [rank 0 a] line {block * self.lines + n}".encode() for n in range(self.lines)]


def finished(log: Log) -> tuple[Follower, list[str], list[Changes]]:
    """Make a follower of a job that has ended, with a log that was not read."""
    statuses = [{"name": "pytorch", "restartCount": 0, "state": {"terminated": {"exitCode": 0}}}]
    pods = [pod("qa-1-worker-0", phase="Succeeded", containerStatuses=statuses)]
    following, told = follower(None)
    vars(following)["_ctx"].access.opened["ml"].list = lambda *_: pods
    vars(following)["_watch"].log = log
    return following, told, [ENDED[0], Changes("Pod", pods, [], complete=True)]


def test_the_last_lines_are_waited_for_as_long_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_DRAIN_S", 0.3)
    following, told, changes = finished(Log(blocks=6, lines=1, pause=0.15))
    assert end(following, told, changes).state is RunState.SUCCEEDED
    assert [text for text in told if text.startswith("line")] == [f"line {n}" for n in range(6)]


def test_lines_that_come_for_ever_end_no_wait_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_DRAIN_TIMEOUT_S", 0.5)
    following, told, changes = finished(Log(blocks=1000, lines=1, pause=0.1))
    assert end(following, told, changes).state is RunState.SUCCEEDED


def test_many_lines_are_heard_by_and_by_and_all_that_are_dropped_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    following, told, changes = finished(Log(blocks=40, lines=500, pause=0.0))
    heard: list[int] = []
    hear = AttemptRecorder.record_delivered

    def counted(self: AttemptRecorder, batches: list[LogBatch]) -> None:
        heard.append(sum(len(batch.lines) for batch in batches))
        hear(self, batches)

    monkeypatch.setattr(AttemptRecorder, "record_delivered", counted)
    end(following, told, changes)
    assert sum(heard) == 20_000
    assert max(heard) < 1200  # what is one part of a block beyond a thousand
    shown = [text for text in told if text.startswith("line")]
    dropped = sum(int(text.split()[0]) for text in told if "lines were dropped here" in text)
    assert len(shown) + dropped == 20_000


def test_what_is_said_of_the_job_itself_is_never_dropped_however_much_its_ranks_write() -> None:
    following, _ = follower(None)
    told: list[RankLine] = []

    async def tell(lines: list[RankLine]) -> None:
        told.extend(lines)

    for _ in range(5000):
        following._limit.admit([RankLine(0, "a", "noise")], following._watch.now())  # noqa: SLF001 - it is full
    following._notes.add("it was preempted")  # noqa: SLF001
    asyncio.run(following._deliver_read_lines(tell))  # noqa: SLF001
    assert "it was preempted" in [line.text for line in told]


@pytest.mark.parametrize("insists", [False, True])
def test_no_line_is_passed_over_that_was_not_told_when_its_triggerer_went_while_all_threads_were_busy(
    *, insists: bool
) -> None:
    following, told = follower(None)
    recorder: AttemptRecorder = vars(following)["_recorder"]
    free, telling = threading.Event(), asyncio.Event()

    async def tell(lines: list[RankLine]) -> None:
        telling.set()
        await asyncio.to_thread(told.extend, [line.text for line in lines])

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        loop.run_in_executor(None, free.wait)
        line = Line(RankLine(0, "a", "line"), time.time(), "p")
        await following._put(LogBatch("uid/c/0", [line], [1]))  # noqa: SLF001 - as its readers do
        passing = asyncio.create_task(following._deliver_read_lines(tell))  # noqa: SLF001
        await telling.wait()
        passing.cancel()
        await asyncio.sleep(0)  # it takes notice
        passing.cancel() if insists else free.set()
        await asyncio.wait([passing])
        assert passing.cancelled()
        free.set()

    asyncio.run(run())
    assert told == ([] if insists else ["line"])
    assert recorder.fields().get("cursor", {}) == ({} if insists else {"uid/c/0": [1]})
