"""Watches of a namespace: what is normal is not told as a trouble, and what is a trouble is."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

import pytest
from support.api_objects import pod
from support.fake_api_server import ApiServer

from manycpu.pipeline.adapters import cluster_watch
from manycpu.pipeline.adapters.cluster_watch import Changes, ClusterWatch


@asynccontextmanager
async def following(server: ApiServer, *kinds: str) -> AsyncGenerator[AsyncGenerator[Changes]]:
    watch = ClusterWatch(server.connect, "ml")
    try:
        async with aclosing(watch.follow({kind: {} for kind in kinds})) as changes:
            yield changes
    finally:
        await watch.aclose()


def test_a_silent_watch_is_begun_anew_without_a_word_and_one_on_events_is_left_alone(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_watch, "_SILENCE", 0.2)
    told: list[Changes] = []

    async def quiet() -> None:
        async with following(server, "Pod", "Event") as changes:
            async for change in changes:
                told.append(change)
                if server.calls["list Pod"] == 3:
                    return

    asyncio.run(quiet())
    assert [change.trouble for change in told if change.trouble] == []
    assert (server.calls["list Event"], server.calls["watch Event"]) == (1, 1)


def test_what_cannot_be_listed_is_told(server: ApiServer) -> None:
    server.objects["Pod"] = [pod("a")]
    server.refuses = {"Event"}

    async def first_two() -> dict[str, Changes]:
        async with following(server, "Pod", "Event") as changes:
            return {found.kind: found for found in [await anext(changes), await anext(changes)]}

    found = asyncio.run(first_two())
    assert [one["metadata"]["name"] for one in found["Pod"].objects] == ["a"]
    assert "403 no events at present" in found["Event"].trouble
