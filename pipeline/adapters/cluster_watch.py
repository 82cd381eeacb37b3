"""Watch a namespace of a Kubernetes cluster: changes of objects, and logs.

Watches retry for ever: their callers have deadlines.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Hashable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import aiohttp

from manycpu.pipeline.adapters.cluster import Connect
from manycpu.pipeline.adapters.cluster_stream import ClusterStream, Lines
from manycpu.pipeline.spec.errors import ClusterError, InvalidError, NotFoundError
from manycpu.pipeline.spec.job_kinds import resource_of
from manycpu.pipeline.spec.kube_object import KubeObject

RELIST: Final = 240  # seconds after which a watch starts again, from a list
_SILENCE_TIMEOUT_S: Final = 100.0  # without a byte, not even a bookmark: the connection is presumed dead
_WITHOUT_BOOKMARKS: Final = frozenset({"Event"})  # the API server does not cache these
_BROKEN: Final = (aiohttp.ClientError, OSError, TimeoutError)
_PAGE: Final = 500  # objects of a list in one answer
_LINE_LIMIT_BYTES: Final = 1 << 18  # of a log's line
_HEALTHY_AFTER_S: Final = 5.0  # of success, after which the back-off starts again
FAILURES: Final = (aiohttp.ClientError, OSError, TimeoutError, ValueError, ClusterError)
"""Errors that may be transient: callers retry."""


class NoLogError(Exception):
    """There is no such log: the container has not started, or is gone."""


class Changes(NamedTuple):
    """Changes of objects of one kind."""

    kind: str
    objects: list[KubeObject]
    deleted: list[KubeObject]
    """Their last state."""
    complete: bool
    """Whether ``objects`` is the complete list."""
    trouble: str = ""
    """Why changes cannot be seen at present; empty: they can."""


class LogPart(NamedTuple):
    """The part of a container's log to read."""

    follow: bool
    """Whether to follow until the container ends; if not, a last line without newline counts too."""
    previous: bool = False
    """Whether to read the log of the container before its last restart."""
    since: int | None = None
    """Seconds since the epoch of the first lines; None: from the beginning."""
    tail: int | None = None
    """Number of last lines; None: all."""


class ClusterWatch:
    """One namespace, as one account may see it, in an event loop; ``connect`` is called on a thread."""

    def __init__(self, connect: Connect, namespace: str) -> None:
        self._stream, self._namespace = ClusterStream(connect), namespace

    def now(self) -> float:
        """Read the API server's clock, in seconds since the epoch."""
        return self._stream.now()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._stream.aclose()

    async def follow(self, selections: Mapping[str, Mapping[str, str]]) -> AsyncGenerator[Changes]:
        """Yield the changes of objects of several kinds as they come, for ever; a task watches each kind.

        Args:
            selections: Kind -> ``labelSelector`` and ``fieldSelector``.
        """
        queue: asyncio.Queue[Changes] = asyncio.Queue(maxsize=64)

        async def put_changes(kind: str, query: Mapping[str, str]) -> None:
            """Put the changes of one kind into the queue; wait while it is full."""
            async with aclosing(self.changes(kind, query)) as changes:
                async for change in changes:
                    await queue.put(change)

        tasks = [asyncio.create_task(put_changes(kind, query)) for kind, query in selections.items()]
        try:
            while True:
                yield await _next(queue, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def changes(self, kind: str, query: Mapping[str, str]) -> AsyncGenerator[Changes]:
        """Yield all objects of a kind, and then each change, for ever.

        After every break of the watch, all objects are yielded again. If they cannot be listed, Changes
        without objects say why in their ``trouble``.
        """
        backoff = Backoff()
        while True:
            try:
                async with aclosing(self._until_broken(kind, query)) as changes:
                    async for change in changes:
                        backoff.worked()
                        yield change
            except FAILURES as error:
                reason = str(error) or type(error).__name__  # some errors have no text
                yield Changes(kind, objects=[], deleted=[], complete=False, trouble=reason)
            await asyncio.sleep(backoff.next())

    async def log(self, pod: str, container: str, part: LogPart) -> AsyncGenerator[list[bytes]]:
        """Yield lists of lines of a container's log as they come; each line begins with its time.

        Raises:
            NoLogError: There is none.
            ClusterError: The cluster refuses it.
            aiohttp.ClientError: The connection broke; or OSError, TimeoutError.
        """
        query = {"container": container, "timestamps": "true"}
        if part.follow:
            query["follow"] = "true"
        if part.previous:
            query["previous"] = "true"
        if part.tail is not None:
            query["tailLines"] = str(part.tail)
        if part.since is not None:
            query["sinceTime"] = datetime.fromtimestamp(part.since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines = Lines(_LINE_LIMIT_BYTES)
        try:
            async with self._answer(f"{await self._path('Pod')}/{pod}/log", query) as answer:
                async for block in answer.content.iter_any():
                    if complete := lines.feed(block):
                        yield complete
        except (InvalidError, NotFoundError) as error:
            raise NoLogError(error.message) from error
        if not part.follow and lines.rest:
            yield [lines.rest]

    async def _until_broken(self, kind: str, query: Mapping[str, str]) -> AsyncGenerator[Changes]:
        """Yield all objects of a kind, and then each change, until the watch ends or breaks.

        Raises:
            Exception: One of ``FAILURES``: the objects cannot be listed, or the watch cannot begin.
        """
        objects, version = await self._list(kind, query)
        yield Changes(kind, objects, deleted=[], complete=True)
        seconds = random.uniform(RELIST, RELIST * 1.25)  # noqa: S311 - many watches must not list at once
        parameters = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(int(seconds)),
        }
        lines = Lines(limit=None)
        # Without bookmarks, a healthy watch may be silent until it ends.
        silence = _SILENCE_TIMEOUT_S + (seconds if kind in _WITHOUT_BOOKMARKS else 0.0)
        async with self._answer(await self._path(kind), parameters, silence) as answer:
            # A break or silence is no trouble yet: the next list shows whether changes can be seen.
            with suppress(*_BROKEN):
                async for block in answer.content.iter_any():
                    events = [json.loads(line) for line in lines.feed(block)]
                    if any(event["type"] == "ERROR" for event in events):
                        return  # mostly 410 Gone: the resource version is too old
                    if change := _change(kind, events):
                        yield change

    async def _list(self, kind: str, query: Mapping[str, str]) -> tuple[list[KubeObject], str]:
        """List all objects of a kind, page by page; returns them and the list's resource version."""
        path, objects = await self._path(kind), list[KubeObject]()
        continuation = ""
        while True:
            parameters = {**query, "limit": str(_PAGE)}
            if continuation:
                parameters["continue"] = continuation
            async with self._answer(path, parameters) as answer:
                page = json.loads(await answer.read())
            objects += [_without_managed_fields(item) for item in page["items"]]
            continuation = page["metadata"].get("continue", "")
            if not continuation:
                return objects, page["metadata"]["resourceVersion"]

    def _answer(
        self, path: str, query: Mapping[str, str], silence: float | None = None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a GET request, and yield the answer to read it as it comes.

        ``silence``: seconds without a byte after which the connection is presumed dead; None: 100.
        """
        return self._stream.answer(path, query, silence or _SILENCE_TIMEOUT_S)

    async def _path(self, kind: str) -> str:
        """Build the API path of a kind's objects in this namespace."""
        resource = resource_of(kind)
        if not resource.version:  # the cluster names the version that it prefers
            async with self._answer(f"/apis/{resource.group}", {}) as answer:
                preferred = json.loads(await answer.read())["preferredVersion"]
            resource = resource._replace(version=preferred["version"])
        return f"{resource.path}/namespaces/{self._namespace}/{resource.plural}"


_SHARED: dict[tuple[Hashable, ...], list[Any]] = {}
"""Event loop, key and namespace -> the watch, and how many callers use it."""


@asynccontextmanager
async def shared(key: Hashable, connect: Connect, namespace: str) -> AsyncIterator[ClusterWatch]:
    """Yield a watch of a namespace, which callers with the same key share; the last caller closes it."""
    identity = (asyncio.get_running_loop(), key, namespace)
    entry = _SHARED.setdefault(identity, [ClusterWatch(connect, namespace), 0])  # the watch, its callers
    entry[1] += 1
    try:
        yield entry[0]
    finally:
        entry[1] -= 1
        if not entry[1]:
            del _SHARED[identity]
            await entry[0].aclose()


class Backoff:
    """Exponential back-off with jitter, for retries without end; starts again after a time of success."""

    def __init__(self) -> None:
        self._failures, self._next_try_at = 0, time.monotonic()

    def worked(self) -> None:
        """Record a success; five seconds after the last pause, the next pause is short again."""
        if time.monotonic() - self._next_try_at > _HEALTHY_AFTER_S:
            self._failures = 0

    def next(self) -> float:
        """Count a failure, and return the seconds to wait before the next try."""
        # 0.2 s, 0.4 s and so on, up to 5 s; each up to 20 % shorter or longer, at random.
        seconds: float = min(0.2 * 2.0**self._failures, 5.0) * random.uniform(0.8, 1.2)  # noqa: S311 - spreads many
        # 10: the pause has long reached its limit by then, and the power stays small.
        self._failures, self._next_try_at = min(self._failures + 1, 10), time.monotonic() + seconds
        return seconds


def _change(kind: str, events: list[dict[str, Any]]) -> Changes | None:
    """Merge the events of one block of a watch; None: no object has changed."""
    # uid -> type and object of its last event: earlier ones are out of date.
    latest: dict[str, tuple[str, KubeObject]] = {}
    for event in events:
        if event["type"] != "BOOKMARK":
            latest[event["object"]["metadata"]["uid"]] = (
                event["type"],
                _without_managed_fields(event["object"]),
            )
    if not latest:
        return None
    gone = [item for action, item in latest.values() if action == "DELETED"]
    changed = [item for action, item in latest.values() if action != "DELETED"]
    return Changes(kind, changed, gone, complete=False)


def _without_managed_fields(item: KubeObject) -> KubeObject:
    """Drop ``managedFields`` from an object, which is large and which nothing reads."""
    item["metadata"].pop("managedFields", None)
    return item


async def _next(queue: "asyncio.Queue[Changes]", tasks: "list[asyncio.Task[None]]") -> Changes:
    """Return the next changes, or raise the error of a task that has failed."""
    getting = asyncio.ensure_future(queue.get())
    try:
        await asyncio.wait([getting, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return getting.result()
        for task in tasks:
            if task.done():
                task.result()  # raises its error
        raise RuntimeError("a watch ended, which none should")
    finally:
        getting.cancel()
