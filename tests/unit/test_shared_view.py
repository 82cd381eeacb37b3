"""What those who wait see of the others, where watching them fails."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from manycpu.pipeline.adapters.cluster_watch import Changes
from manycpu.pipeline.targets.kubernetes.following import shared_view


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
    monkeypatch.setattr(shared_view, "AGAIN", 0.01)
    assert asyncio.run(_complete())
    assert "not foreseen" in caplog.text
