"""The trigger for jobs, on the cluster: with the triggerer's shared streams, and without them."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.triggers.base import TriggerEvent
from airflow.triggers.shared_stream import SharedStreamManager
from cluster.command import wait_for
from cluster.fixtures import TestCluster
from support.handmade_jobs import Looker, Waiting, begin

from manycpu.operators import base
from manycpu.operators.job_trigger import JobTrigger
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.kubernetes.context import cluster_of

BY = "task train, try 1 (id)"
COUNT = "for n in range({n}): say(f'line {{n}}'); time.sleep(0.05)"


@pytest.fixture
def job_of(
    target: dict[str, Any], cluster: TestCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Waiting]:
    """Return a function that opens a run by name; its connection is a kubeconfig, not one of Airflow."""
    monkeypatch.setattr(base, "access_of", lambda _: None)
    (tmp_path / "runs").mkdir()

    def make(name: str, **run: Any) -> Waiting:
        folder = tmp_path / "runs" / name
        folder.mkdir()
        return begin(target, cluster.image("base"), folder, **run)

    return make


def trigger(handle: JobHandle, **more: Any) -> JobTrigger:
    """Return a trigger from the serialized form of another, as the triggerer does."""
    given = {"cursor": None, "by": BY, **more}
    path, kwargs = JobTrigger(handle=handle.model_dump(mode="json"), **given).serialize()
    assert path == "manycpu.operators.job_trigger.JobTrigger"
    return JobTrigger(**kwargs)


async def first(events: AsyncIterator[TriggerEvent]) -> TriggerEvent:
    return await anext(aiter(events))


def status(event: TriggerEvent) -> Status:
    return Status.model_validate(event.payload["status"])


def lines(said: str) -> list[int]:
    return [int(number) for number in re.findall(r"\[rank 0 \S+\] line (\d+)", said)]


def test_two_that_wait_share_one_watch_and_the_later_one_sees_what_is_there(
    job_of: Callable[..., Waiting], capfd: pytest.CaptureFixture[str]
) -> None:
    one, other = job_of("one"), job_of("other")
    jobs = [one.create(COUNT.format(n=100)), other.create(COUNT.format(n=20))]

    keys = {trigger(handle).shared_stream_key() for handle in jobs}
    assert len(keys) == 1

    async def both() -> list[TriggerEvent]:
        manager = SharedStreamManager()

        def subscribed(number: int) -> AsyncIterator[TriggerEvent]:
            made = trigger(jobs[number])
            key = made.shared_stream_key()
            return made.filter_shared_stream(manager.subscribe(trigger_id=number, trigger=made, key=key))

        early = asyncio.create_task(first(subscribed(0)))
        done = Looker(other.ctx, jobs[1])
        await asyncio.to_thread(done.to_the_end)  # the job has ended before its trigger subscribes
        done.close()
        late = asyncio.create_task(first(subscribed(1)))
        try:
            return [await early, await late]
        finally:
            await manager.stop_all()

    found = asyncio.run(both())
    assert [status(event).state for event in found] == [RunState.SUCCEEDED] * 2
    told = lines(capfd.readouterr().out)
    assert sorted(told) == sorted([*range(100), *range(20)])


def test_a_trigger_goes_on_where_a_triggerer_that_went_away_had_come_to(
    job_of: Callable[..., Waiting], capfd: pytest.CaptureFixture[str]
) -> None:
    handle = job_of("moves").create(COUNT.format(n=200))
    told: list[int] = []

    def read() -> list[int]:
        told.extend(lines(capfd.readouterr().out))
        return told

    async def interrupted() -> None:
        running = asyncio.create_task(first(trigger(handle).run()))
        await asyncio.to_thread(wait_for, "some lines", lambda: 30 in read(), seconds=60)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(interrupted())
    assert status(asyncio.run(first(trigger(handle).run()))).state is RunState.SUCCEEDED
    assert read() == list(range(200))


def test_a_person_ends_the_job_and_the_record_says_who(job_of: Callable[..., Waiting]) -> None:
    waiting = job_of("killed")
    handle = waiting.create("time.sleep(600)")

    async def killed() -> TriggerEvent:
        following = trigger(handle)
        running = asyncio.create_task(first(following.run()))
        await following.on_kill()
        return await running

    seen = status(asyncio.run(killed()))
    assert (seen.state, seen.reason) == (RunState.CANCELLED, f"ended by {BY}")
    assert waiting.ctx.ledger.read().cancelled == {1: BY}
    assert cluster_of(waiting.ctx).get("PyTorchJob", handle.name) is None


def test_a_deadline_that_is_met_ends_the_job(job_of: Callable[..., Waiting]) -> None:
    waiting = job_of("late")
    handle = waiting.create("time.sleep(600)")
    event = asyncio.run(first(trigger(handle, deadline=1.0).run()))
    assert status(event).state is RunState.CANCELLED
    assert waiting.ctx.ledger.read().cancelled == {1: "execution_timeout"}
