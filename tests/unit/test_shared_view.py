"""What those who wait see of the others, where watching them fails."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from support.api_objects import T0, Object, at, job, pod

from manycpu.pipeline.adapters.cluster_watch import Changes
from manycpu.pipeline.spec.job_kinds import TRAINJOB
from manycpu.pipeline.targets.kubernetes.following import shared_view
from manycpu.pipeline.targets.kubernetes.following.turns import Turns, job_of


class _View(shared_view.SharedView):
    tries = 0

    def selections(self) -> shared_view.Selections:
        self.tries += 1
        if self.tries == 1:
            raise RuntimeError("not foreseen")
        return {"Pod": {}}


class _Watch:
    async def follow(self, _: Any) -> AsyncGenerator[Changes]:
        yield Changes("Pod", [], [], complete=True)
        await asyncio.Event().wait()


async def _complete() -> bool:
    watch, woken = _Watch(), asyncio.Event()
    view = _View(watch, None)  # type: ignore[arg-type]
    view.join(woken.set)
    try:
        await asyncio.wait_for(woken.wait(), 5)
        return view.is_complete
    finally:
        view.leave(woken.set)


def test_a_view_that_failed_is_begun_anew_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_view, "RETRY_INTERVAL_S", 0.01)
    assert asyncio.run(_complete())
    assert "not foreseen" in caplog.text


def trainjob(name: str, number: object, ranks: object, born: float = 0) -> Object:
    found = job(launch="trainjob")
    meta: Object = {"name": name, "uid": name, "annotations": {"manycpu/ranks": json.dumps(ranks)}}
    meta |= {"creationTimestamp": at(born), "labels": {"manycpu/run": name, "manycpu/attempt": "1"}}
    return found | {"metadata": found["metadata"] | meta, "spec": {"trainer": {"numNodes": number}}}


def test_a_job_that_cannot_be_read_is_told_once_and_keeps_nobody_from_a_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sound = {"containers": [{"resources": {"requests": {"cpu": "1"}}}]}
    lots = {"containers": [{"resources": {"requests": {"cpu": "lots"}}}]}
    odd = [lots, {"containers": None}, {}, [1], "x"]
    jobs = [trainjob("mine", 2, sound), trainjob("null", None, sound)]
    jobs += [trainjob(f"odd-{number}", 2, ranks) for number, ranks in enumerate(odd)]
    full = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "Insufficient cpu",
    }
    turns, refused = Turns(), pod("younger-0", placed=None, conditions=[full])
    for now in (5.0, 15.0):
        turns.update({"Pod": [], "TrainJob": jobs}, T0 + now)
        younger = job_of(trainjob("younger", 2, sound, born=1), TRAINJOB, [refused], T0 + now)
        assert younger is not None
        assert turns.waits_for(younger).endswith("; after run mine")
    assert len(caplog.messages) == len(jobs) - 1
    assert "TrainJob odd-0 is left out of the turns" in caplog.text
