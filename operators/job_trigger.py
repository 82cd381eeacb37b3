"""The trigger for a job on Kubernetes; triggers of one launch kind and namespace share a watch."""

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
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext
    from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import AttemptRecorder
    from manycpu.pipeline.targets.kubernetes.following.follower import Follower
    from manycpu.pipeline.targets.kubernetes.following.object_store import ObjectStore

__all__ = ["JobTrigger"]

_AGAIN = 5.0  # seconds between tries to reach a cluster that does not answer
_PATIENCE = 3600.0  # seconds for which that is tried
_SHOW_EVERY = 1.0  # seconds between looks whether the page is due
_FAREWELL = 10.0  # seconds to note how far the logs were told, when the triggerer goes


class JobTrigger(FollowingTrigger, BaseEventTrigger):
    """Follow a job on Kubernetes, on any triggerer.

    All triggers of a triggerer for one connection, namespace and launch kind share one watch.
    """

    supports_triggerer_queue = True  # a task defers with it, as with any other

    def shared_stream_key(self) -> tuple[str, ...]:
        """Return the key of jobs that share a watch: connection, namespace and launch kind."""
        names = ("connection", "namespace", "launch")
        return ("manycpu", *(str(self.handle.get(name) or "") for name in names))

    @classmethod
    async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncGenerator[list[Changes]]:
        """Watch all of our jobs of one launch kind in a namespace, with their pods, for ever."""
        trigger = cls(**kwargs)
        async for changes in trigger._watching(keep=True):
            yield changes

    async def filter_shared_stream(
        self, shared_stream: AsyncIterator[list[Changes]]
    ) -> AsyncIterator[TriggerEvent]:
        """Follow the job; the one event carries handle, status, and whether the deadline passed."""
        from manycpu.pipeline.adapters.cluster_watch import shared
        from manycpu.pipeline.targets.kubernetes.following.follower import Follower
        from manycpu.pipeline.targets.outcome import outcome

        handle, ctx, recorder = await self._with_patience(self._open)
        async with (
            self._keeping_alive(ctx),
            shared(self.shared_stream_key(), ctx.cluster.connect, handle.namespace) as watch,
        ):
            follower = Follower(ctx, handle, watch, recorder)
            following = asyncio.create_task(
                follower.run(self._all_changes(shared_stream), self._log_on_thread)
            )
            showing = asyncio.create_task(self._keep_showing(follower, recorder))
            try:
                timed_out = await self._exceeds(following)
                status = await following
            except asyncio.CancelledError:
                await self._save_progress(following, recorder)
                raise
            finally:
                showing.cancel()
        status = outcome(ctx, status, recorder.state.observed)
        yield await self._event(status, timed_out=timed_out)

    async def _keep_showing(self, follower: Follower, recorder: AttemptRecorder) -> None:
        """Keep the training's page up to date."""
        while True:
            await asyncio.sleep(_SHOW_EVERY)
            status, observed = follower.status, recorder.state.observed
            if self._live is not None and self._live.is_due(status, observed):
                # A copy: lines are heard meanwhile.
                await asyncio.to_thread(self._show, status, observed.model_copy(deep=True))

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow the job with a watch of its own."""
        async for event in self.filter_shared_stream(self._watching(keep=False)):
            yield event

    async def _watching(self, *, keep: bool) -> AsyncGenerator[list[Changes]]:
        """Watch the jobs that this trigger's key stands for.

        Args:
            keep: Whether to keep what is there for those that come later.
        """
        from manycpu.pipeline.adapters.cluster_watch import shared
        from manycpu.pipeline.targets.kubernetes.following.follower import selections
        from manycpu.pipeline.targets.kubernetes.following.object_store import ObjectStore

        key, handle = self.shared_stream_key(), self._handle()
        connect = await self._with_patience(self._connect)
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

    async def _all_changes(
        self, shared_stream: AsyncIterator[list[Changes]]
    ) -> AsyncGenerator[list[Changes]]:
        """Yield what exists, then the shared stream; where that fails, a stream of its own."""
        present = _PRESENT.get(self.shared_stream_key())
        if present is not None:
            yield present.changes()
        try:
            async for changes in shared_stream:
                yield changes
        except Exception:
            self.log.exception("the shared watch failed; this trigger goes on with one of its own")
        async for changes in self._watching(keep=False):
            yield changes

    async def _exceeds(self, following: asyncio.Task[Status]) -> bool:
        """Wait for the end, or for the deadline, which cancels; True where it was the deadline."""
        if self.deadline is None:
            await asyncio.wait([following])
            return False
        await asyncio.wait([following], timeout=max(0.0, self.deadline - time.time()))
        if following.done():
            return False
        await self._with_patience(self._cancel, "execution_timeout")
        return True

    async def _with_patience(self, act: Callable[..., Any], *args: Any) -> Any:
        """Call a function on a thread, again and again for an hour while the cluster does not answer.

        Raises:
            ClusterError: It has not answered; the job is left as it is.
        """
        from manycpu.pipeline.spec.errors import ClusterError, LaunchError

        until = time.monotonic() + _PATIENCE
        while True:
            try:
                return await asyncio.to_thread(act, *args)
            except LaunchError as error:
                self.log.warning("%s", error)  # it is being ended, and takes its time
                return None
            except ClusterError as error:
                if time.monotonic() > until:
                    raise
                self.log.warning("%s", error)
                await asyncio.sleep(_AGAIN)

    async def _save_progress(self, following: asyncio.Task[Status], recorder: AttemptRecorder) -> None:
        """Record how far the logs were printed, so that the next triggerer repeats nothing."""
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        with suppress(Exception):
            await asyncio.wait_for(asyncio.to_thread(recorder.write, recorder.fields()), _FAREWELL)

    async def _log_on_thread(self, lines: list[RankLine]) -> None:
        # Long logs are written on a thread: other triggers share this event loop.
        await asyncio.to_thread(self._pass_on, lines)

    def _open(self) -> tuple[JobHandle, ClusterContext, AttemptRecorder]:
        from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import AttemptRecorder

        handle, ctx = self._handle(), self._context()
        recorder = AttemptRecorder(ctx, handle, self.cursor, self.by)
        self._listen(ctx, handle, recorder.state.observed)
        return handle, ctx, recorder

    def _context(self) -> ClusterContext:
        from manycpu.pipeline.ledger.configmap import ConfigMapLedger
        from manycpu.pipeline.targets.kubernetes.context import sharing
        from manycpu.pipeline.targets.open_run import reopen

        cluster, handle = self._cluster(), self._handle()
        entry = ConfigMapLedger(cluster, handle.run).read()
        context: Any = reopen(entry, access=sharing(cluster), attempt=handle.attempt)
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
