"""What the triggerer runs for a job on Kubernetes: a trigger that shares one watch with all of its kind."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger

from manycpu.operators.base_trigger import FollowingTrigger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from airflow.triggers.base import TriggerEvent

    from manycpu.pipeline.adapters.cluster import Cluster
    from manycpu.pipeline.adapters.cluster_watch import Changes
    from manycpu.pipeline.spec.events import RankLine
    from manycpu.pipeline.spec.handle import JobHandle
    from manycpu.pipeline.spec.state import Status
    from manycpu.pipeline.targets.context import ClusterContext
    from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import AttemptRecorder
    from manycpu.pipeline.targets.kubernetes.following.object_store import ObjectStore

__all__ = ["JobTrigger"]

_AGAIN = 5.0  # seconds between tries to reach a cluster that does not answer
_PATIENCE = 3600.0  # seconds for which that is tried
_FAREWELL = 10.0  # seconds to note how far the logs were told, when the triggerer goes


class JobTrigger(FollowingTrigger, BaseEventTrigger):
    """Follow a job on Kubernetes, on any triggerer.

    All triggers of a triggerer for one connection, namespace and launch kind share one watch.
    """

    supports_triggerer_queue = True  # a task defers with it, as with any other

    def shared_stream_key(self) -> tuple[str, ...]:
        """Tell whose jobs are watched together: those of one connection, namespace and launch kind."""
        names = ("connection", "namespace", "launch")
        return ("manycpu", *(str(self.handle.get(name) or "") for name in names))

    @classmethod
    async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncGenerator[list[Changes]]:
        """Watch all of our jobs of one launch kind in a namespace, with their pods, for ever."""
        trigger = cls(**kwargs)
        async for told in trigger._watching(keep=True):
            yield told

    async def filter_shared_stream(
        self, shared_stream: AsyncIterator[list[Changes]]
    ) -> AsyncIterator[TriggerEvent]:
        """Follow; the one event carries the handle, the final status, and whether the deadline was met."""
        from manycpu.pipeline.adapters.cluster_watch import shared
        from manycpu.pipeline.targets.kubernetes.following.follower import Follower
        from manycpu.pipeline.targets.outcome import outcome

        handle, ctx, recorder = await self._patiently(self._open)
        async with (
            self._keeping_alive(ctx),
            shared(self.shared_stream_key(), ctx.cluster.connect, handle.namespace) as watch,
        ):
            follower = Follower(ctx, handle, watch, recorder)
            following = asyncio.create_task(follower.run(self._seen(shared_stream), self._tell))
            try:
                timed_out = await self._exceeds(following)
                seen = await following
            except asyncio.CancelledError:
                await self._say_farewell(following, recorder)
                raise
        seen = outcome(ctx, seen, recorder.state.observed)
        yield await self._event(seen, timed_out=timed_out)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow alone, with a watch of its own."""
        async for event in self.filter_shared_stream(self._watching(keep=False)):
            yield event

    async def _watching(self, *, keep: bool) -> AsyncGenerator[list[Changes]]:
        """Watch what this trigger's key stands for.

        Args:
            keep: Whether to keep what is there for those that come later.
        """
        from manycpu.pipeline.adapters.cluster_watch import shared
        from manycpu.pipeline.targets.kubernetes.following.follower import selections
        from manycpu.pipeline.targets.kubernetes.following.object_store import ObjectStore

        key, handle = self.shared_stream_key(), self._handle()
        connect = await asyncio.to_thread(self._connect)
        present = ObjectStore()
        if keep:
            _PRESENT[key] = present
        try:
            async with shared(key, connect, handle.namespace) as watch:
                async for change in watch.follow(selections(handle.launch, _OURS)):
                    present.apply(change)
                    yield [change]
        finally:
            if _PRESENT.get(key) is present:
                del _PRESENT[key]

    async def _seen(self, shared_stream: AsyncIterator[list[Changes]]) -> AsyncGenerator[list[Changes]]:
        """Begin with what is there, and go on alone where the shared stream fails."""
        present = _PRESENT.get(self.shared_stream_key())
        if present is not None:
            yield present.changes()
        try:
            async for told in shared_stream:
                yield told
        except Exception:
            self.log.exception("the shared watch failed; this trigger goes on with one of its own")
        async for told in self._watching(keep=False):
            yield told

    async def _exceeds(self, following: asyncio.Task[Status]) -> bool:
        """Wait for the end, or for the deadline, which ends the training; whether it was the deadline."""
        if self.deadline is None:
            await asyncio.wait([following])
            return False
        await asyncio.wait([following], timeout=max(0.0, self.deadline - time.time()))
        if following.done():
            return False
        await self._patiently(self._cancel, "execution_timeout")
        return True

    async def _patiently(self, act: Callable[..., Any], *given: Any) -> Any:
        """Do it on a thread, again while the cluster does not answer, for an hour.

        Raises:
            ClusterError: It has not answered; the job is left as it is.
        """
        from manycpu.pipeline.spec.errors import ClusterError, LaunchError

        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return await asyncio.to_thread(act, *given)
            except LaunchError as error:
                self.log.warning("%s", error)  # it is being ended, and takes its time
                return None
            except ClusterError as error:
                if time.monotonic() > until:
                    raise
                self.log.warning("%s", error)
                await asyncio.sleep(_AGAIN)

    async def _say_farewell(self, following: asyncio.Task[Status], recorder: AttemptRecorder) -> None:
        """Note how far the logs were told, so that the next triggerer repeats nothing."""
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        with suppress(Exception):
            await asyncio.wait_for(asyncio.to_thread(recorder.write, recorder.fields()), _FAREWELL)

    async def _tell(self, lines: list[RankLine]) -> None:
        # Long logs are written on a thread: other triggers share this event loop.
        await asyncio.to_thread(self._pass_on, lines)

    def _open(self) -> tuple[JobHandle, ClusterContext, AttemptRecorder]:
        from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import AttemptRecorder

        handle, ctx = self._handle(), self._context()
        return handle, ctx, AttemptRecorder(ctx, handle, self.cursor, self.by)

    def _context(self) -> ClusterContext:
        from manycpu.pipeline.ledger.configmap import ConfigMapLedger
        from manycpu.pipeline.targets.context import Access, reopen

        cluster, handle = self._cluster(), self._handle()
        entry = ConfigMapLedger(cluster, handle.run).read()
        context: Any = reopen(entry, access=Access(cluster=cluster), attempt=handle.attempt)
        return context  # type: ignore[no-any-return]

    def _cluster(self) -> Cluster:
        """Open the namespace, once for all triggers of this process."""
        from manycpu.pipeline.adapters.cluster import Cluster

        with _OPENING:
            key = self.shared_stream_key()
            if key not in _OPEN:
                _OPEN[key] = Cluster(self._connect(), self._handle().namespace)
            return _OPEN[key]

    def _connect(self) -> Callable[[], Any]:
        from manycpu.operators.access import access_of
        from manycpu.pipeline.adapters.cluster import connect

        connection = self._handle().connection
        access = access_of({"kind": "kubernetes", "connection": connection})
        return (access and access.connect) or partial(connect, connection)

    def _handle(self) -> JobHandle:
        from manycpu.pipeline.spec.handle import JobHandle

        return JobHandle.model_validate(self.handle)


_OURS = {"app.kubernetes.io/managed-by": "manycpu"}
_OPENING = threading.Lock()
_OPEN: dict[tuple[str, ...], Cluster] = {}
"""Key of a shared stream -> its namespace, for what is not watched: ledgers, and the end of jobs."""
_PRESENT: dict[tuple[str, ...], ObjectStore] = {}
"""Key of a shared stream -> what is there, for triggers that join it."""
