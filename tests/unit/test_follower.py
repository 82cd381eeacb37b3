"""Nobody waits for ever for a cluster that does not answer, and what it cannot record changes no end."""

import asyncio
import time
from collections.abc import AsyncGenerator
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
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.kubernetes.following import follower as follower_module
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import AttemptRecorder
from manycpu.pipeline.targets.kubernetes.following.follower import Follower

ENDED = [
    Changes("PyTorchJob", [job("Succeeded")], [], complete=True),
    Changes("Pod", [pod("qa-1-worker-0", phase="Succeeded")], [], complete=True),
]


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
    ctx: Any = SimpleNamespace(
        ledger=ledger, cluster=cluster, claim="data", run=TrainingRun(program="x", output="/out")
    )
    watch: Any = SimpleNamespace(now=time.time)
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
    monkeypatch.setattr(follower_module, "_RECORDED", 0.2)
    following, told = follower(status)
    assert end(following, told, ENDED).state is RunState.SUCCEEDED
    assert "how it ended could not be recorded: no such right." in told


def test_while_the_end_cannot_be_recorded_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "_RECORDED", 0.2)
    following, told = follower(403)
    end(following, told, ENDED)
    assert told[0] == "how it ended could not be recorded so far: no such right."


@pytest.mark.parametrize("known", [[], ENDED[:1], ENDED[1:]])
def test_a_job_of_which_nothing_is_heard_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, known: list[Changes]
) -> None:
    monkeypatch.setattr(follower_module, "_SILENCE", 0.3)
    monkeypatch.setattr(follower_module, "_TICK", 0.1)
    following, told = follower(None)
    trouble = Changes("Pod", [], [], complete=False, trouble="pods is forbidden")
    with pytest.raises(
        ClusterError, match=r"nothing was heard of \w+ objects .* PyTorchJob qa-1 is left as it is"
    ):
        end(following, told, [*known, trouble])
    assert "nothing is known of Pod objects at present: pods is forbidden" in told
