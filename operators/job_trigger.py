"""The trigger for a job on Kubernetes; triggers of one launch kind and namespace share a watch."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger

from manycpu.operators import base
from manycpu.operators.triggers import FollowingTrigger
from manycpu.pipeline.spec.errors import LaunchError
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.targets.outcome import outcome

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

    from airflow.triggers.base import TriggerEvent

    from manycpu.pipeline.adapters.cluster import Cluster
    from manycpu.pipeline.adapters.cluster_watch import Changes
    from manycpu.pipeline.spec.state import Status
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext
    from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import AttemptRecorder
    from manycpu.pipeline.targets.kubernetes.following.follower import Follower
    from manycpu.pipeline.targets.kubernetes.following.shared_view import ObjectStore

_PAGE_CHECK_INTERVAL_S = 1.0  # between looks whether the training's page must be written
_SAVE_TIMEOUT_S = 10.0  # to record how far the logs were printed when the triggerer stops
_JOB_LABELS = {"app.kubernetes.io/managed-by": "manycpu"}
_CLUSTERS_LOCK = threading.Lock()
_CLUSTERS: dict[tuple[str, ...], Cluster] = {}
"""Key of a shared stream -> the client that all its triggers share for requests other than the watch."""
_STORES: dict[tuple[str, ...], ObjectStore] = {}
"""Key of a shared stream -> the objects that exist, for triggers that join the stream later."""


class JobTrigger(FollowingTrigger, BaseEventTrigger):
    """Follow a job on Kubernetes, on any triggerer.

    All triggers of a triggerer for one connection, namespace and launch kind share one watch.
    """

    supports_triggerer_queue = True  # tasks defer to it; most event triggers only watch assets

    def shared_stream_key(self) -> tuple[str, ...]:
        """Return the key of jobs that share a watch: connection, namespace and launch kind."""
        names = ("connection", "namespace", "launch")
        return ("manycpu", *(str(self.handle.get(name) or "") for name in names))

    @classmethod
    async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncGenerator[list[Changes]]:
        """Yield every change of the jobs of one launch kind in a namespace, and of their pods, without end.

        Airflow calls this once for all triggers with the same key; ``kwargs`` are those of one of them.
        """
        trigger = cls(**kwargs)
        async for changes in trigger._watch_jobs(keep=True):
            yield changes

    async def filter_shared_stream(
        self, shared_stream: AsyncIterator[list[Changes]]
    ) -> AsyncIterator[TriggerEvent]:
        """Follow the job to its end by the shared changes; then yield one event with its handle and status.

        At the deadline, cancel the training, and wait until it has ended.
        """
        from manycpu.pipeline.adapters.cluster_watch import shared
        from manycpu.pipeline.targets.kubernetes.context import cluster_of
        from manycpu.pipeline.targets.kubernetes.following.follower import Follower

        handle, ctx, recorder = await self._retry_on_thread(self._open_attempt)
        async with (
            self._keeping_alive(ctx),
            shared(self.shared_stream_key(), cluster_of(ctx).connect, handle.namespace) as watch,
        ):
            follower = Follower(ctx, handle, watch, recorder)
            changes = self._existing_and_new(shared_stream)
            # Long logs are written on a thread: other triggers share this event loop.
            follow_to_end = follower.run(changes, lambda lines: asyncio.to_thread(self._deliver, lines))
            following = asyncio.create_task(follow_to_end)
            updating_page = asyncio.create_task(self._keep_page_current(follower, recorder))
            try:
                if self.deadline is not None:
                    await self._cancel_at_deadline(following, self.deadline)
                status = await following  # after a cancellation, this waits until the job has ended
            except asyncio.CancelledError:  # Airflow cancels the trigger
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                with suppress(Exception):  # the next triggerer then repeats no line in the log
                    saving = asyncio.to_thread(recorder.write, recorder.fields())
                    await asyncio.wait_for(saving, _SAVE_TIMEOUT_S)
                raise
            finally:
                updating_page.cancel()
        status = outcome(ctx, status, recorder.state.observed)
        yield await self._final_event(status)

    async def _cancel_at_deadline(self, following: asyncio.Task[Status], deadline: float) -> None:
        """Wait until the job has ended; if it still runs at the deadline, cancel the training.

        ``following`` is the asyncio task that follows the job. ``deadline`` is in seconds since the epoch.
        """
        await asyncio.wait([following], timeout=max(0.0, deadline - time.time()))
        if not following.done():
            try:
                await self._retry_on_thread(self._cancel, "execution_timeout")
            except LaunchError as error:  # the job is being ended, which takes time
                self.log.warning("%s", error)

    async def _keep_page_current(self, follower: Follower, recorder: AttemptRecorder) -> None:
        """Write the training's page whenever that is due, until this coroutine is cancelled."""
        while True:
            await asyncio.sleep(_PAGE_CHECK_INTERVAL_S)
            status, observed = follower.status, recorder.state.observed
            if self._live.is_due(status, observed):
                # A copy: the follower changes `observed` while the thread reads it.
                await asyncio.to_thread(self._live.show, status, observed.model_copy(deep=True))

    async def _follow(self) -> AsyncIterator[TriggerEvent]:
        """Follow the job with a watch of its own."""
        async for event in self.filter_shared_stream(self._watch_jobs(keep=False)):
            yield event

    async def _watch_jobs(self, *, keep: bool) -> AsyncGenerator[list[Changes]]:
        """Yield every change of the jobs with this trigger's key, and of their pods.

        Args:
            keep: Whether to store the objects that exist, for triggers that join the shared stream later.
        """
        from manycpu.pipeline.adapters.cluster_watch import shared
        from manycpu.pipeline.targets.kubernetes.following.follower import selections
        from manycpu.pipeline.targets.kubernetes.following.shared_view import ObjectStore

        key, handle = self.shared_stream_key(), self._handle()
        connect = await self._retry_on_thread(self._connect)
        store = ObjectStore()
        if keep:
            _STORES[key] = store
        try:
            async with shared(key, connect, handle.namespace) as watch:
                async for change in watch.follow(selections(handle.launch, _JOB_LABELS)):
                    store.apply(change)
                    yield [change]
        finally:
            if _STORES.get(key) is store:  # and not the store of a later watch
                del _STORES[key]

    async def _existing_and_new(
        self, shared_stream: AsyncIterator[list[Changes]]
    ) -> AsyncGenerator[list[Changes]]:
        """Yield the objects that exist, then the changes of the shared stream.

        The first are needed because Airflow does not repeat earlier changes to a trigger that joins late.
        If the shared stream fails or ends, this trigger continues with a watch of its own.
        """
        store = _STORES.get(self.shared_stream_key())
        if store is not None:
            yield store.changes()
        try:
            async for changes in shared_stream:
                yield changes
        except Exception:
            self.log.exception("the shared watch failed; this trigger continues with a watch of its own")
        async for changes in self._watch_jobs(keep=False):
            yield changes

    def _open_attempt(self) -> tuple[JobHandle, ClusterContext, AttemptRecorder]:
        """Read the run from its ledger, and make the listeners; returns handle, run and recorder.

        The recorder knows which lines were delivered for this try of the task, also by an earlier trigger.
        """
        from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import AttemptRecorder

        handle, ctx = self._handle(), self._context()
        recorder = AttemptRecorder(ctx, handle, self.cursor, self.by)
        self._make_listeners(ctx, handle, recorder.state.observed)
        return handle, ctx, recorder

    def _context(self) -> ClusterContext:
        """Open the run with the fields of its attempt; all runs of one shared stream use one client."""
        from manycpu.pipeline.adapters.cluster import Cluster
        from manycpu.pipeline.ledger.configmap import ConfigMapLedger
        from manycpu.pipeline.targets.kubernetes.context import sharing
        from manycpu.pipeline.targets.open_run import reopen

        handle, key = self._handle(), self.shared_stream_key()
        with _CLUSTERS_LOCK:
            if key not in _CLUSTERS:
                _CLUSTERS[key] = Cluster(self._connect(), handle.namespace)
            cluster = _CLUSTERS[key]
        entry = ConfigMapLedger(cluster, handle.run).read()
        context: Any = reopen(entry, access=sharing(cluster), attempt=handle.attempt)
        return context  # type: ignore[no-any-return]

    def _connect(self) -> Callable[[], Any]:
        """Return a function that makes a client of the cluster, by the Airflow connection in the handle.

        If the handle names none, the client uses the pod's account or a kubeconfig.
        """
        from manycpu.pipeline.adapters.cluster import connect

        connection = self._handle().connection
        access = base.access_of({"kind": "kubernetes", "connection": connection})
        return (access and access.connect) or partial(connect, connection)

    def _handle(self) -> JobHandle:
        return JobHandle.model_validate(self.handle)
