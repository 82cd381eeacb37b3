"""Watches of a namespace: what is normal is not told as a trouble, and what is a trouble is."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from http.server import BaseHTTPRequestHandler

import pytest
from kubernetes import client
from support.api_objects import pod
from support.fake_api_server import ApiServer
from support.web_server import served

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
    monkeypatch.setattr(cluster_watch, "_SILENCE_TIMEOUT_S", 0.2)
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


def test_a_proxys_password_is_given_to_it_and_told_to_nobody() -> None:
    asked: list[str | None] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            asked.append(self.headers["Proxy-Authorization"])
            self.send_error(502)

        def log_message(self, *_: object) -> None:
            pass

    def connect(host: str) -> client.ApiClient:
        settings = client.Configuration(host="https://cluster.example:6443")
        settings.proxy = f"http://me:s3%40ret@{host}"
        return client.ApiClient(settings)

    async def trouble(host: str) -> str:
        watch = ClusterWatch(lambda: connect(host), "ml")
        try:
            async with aclosing(watch.follow({"Pod": {}})) as changes:
                return (await anext(changes)).trouble
        finally:
            await watch.aclose()

    with served(Proxy) as host:
        told = asyncio.run(trouble(host))
    assert "502" in told
    assert "s3" not in told
    assert asked[0] == "Basic " + b64encode(b"me:s3@ret").decode()
