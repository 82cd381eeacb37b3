"""Objects of a namespace besides a job's own: seen for as long as anybody who follows a job wants to."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Final, Self

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_watch import FAILURES, Changes, ClusterWatch
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.kubernetes.following.object_store import ObjectStore

__all__ = ["AGAIN", "Selections", "SharedView"]

_log = logging.getLogger(__name__)
AGAIN: Final = 5.0  # seconds between tries to see them, and between looks while they do not change
_SETTLE: Final = 0.3  # seconds in which changes are put together

Selections = Mapping[str, Mapping[str, str]]
Wake = Callable[[], None]
Concerns = Callable[[Changes], bool]


class SharedView:
    """Objects of some kinds, which are watched once for all who join.

    Args:
        watch: The namespace.
        cluster: The same.
    """

    def __init__(self, watch: ClusterWatch, cluster: Cluster) -> None:
        self._watch, self._cluster = watch, cluster
        self._wakes: dict[Wake, Concerns] = {}
        self._due: set[Wake] = set()
        self._task: asyncio.Task[None] | None = None
        self._waking: asyncio.TimerHandle | None = None
        self.changes = 0
        """How often something has changed."""

    @classmethod
    def of(cls, watch: ClusterWatch, cluster: Cluster) -> Self:
        """Find the view that those share who follow jobs through a watch."""
        view = _ALL.setdefault((cls, watch), cls(watch, cluster))
        assert isinstance(view, cls)  # noqa: S101 - what the key says
        return view

    def selections(self) -> Selections:
        """Find out, on a thread, what to watch: kind -> selectors."""
        raise NotImplementedError

    @property
    def is_complete(self) -> bool:
        """Whether all objects were listed."""
        return bool(self._kinds) and self._kinds <= self._listed

    def objects(self) -> dict[str, list[KubeObject]]:
        """List what is there: kind -> objects."""
        return {change.kind: change.objects for change in self._present.changes()}

    def join(self, wake: Wake, concerns: Concerns = lambda _: True) -> None:
        """Call ``wake`` on every change that concerns whoever joins."""
        self._wakes[wake] = concerns
        if self._task is None:
            self._present, self._kinds, self._listed = ObjectStore(), frozenset[str](), set[str]()
            self._task = asyncio.create_task(self._follow())

    def leave(self, wake: Wake) -> None:
        """Stop to call ``wake``; nothing is watched once nobody is left to call."""
        del self._wakes[wake]
        if not self._wakes and self._task is not None:
            self._task.cancel()
            self._task = None
            _ALL.pop((type(self), self._watch), None)

    async def _follow(self) -> None:
        while True:
            try:
                await self._see()
            except FAILURES:
                pass
            except Exception:  # noqa: BLE001 - whoever waits for room would wait for ever
                _log.exception("the other objects of the namespace are watched anew")
            self._listed.clear()
            await asyncio.sleep(AGAIN)

    async def _see(self) -> None:
        selections = await asyncio.to_thread(self.selections)
        self._kinds = frozenset(selections)
        async with aclosing(self._watch.follow(selections)) as changes:
            async for change in changes:
                self._present.apply(change)
                self._listed |= {change.kind} if change.complete else set()
                self.changes += 1
                self._due |= {wake for wake, concerns in self._wakes.items() if concerns(change)}
                if self._due and self._waking is None:
                    self._waking = asyncio.get_running_loop().call_later(_SETTLE, self._wake)

    def _wake(self) -> None:
        self._waking, due, self._due = None, self._due, set()
        for wake in due & self._wakes.keys():
            wake()


_ALL: Final[dict[tuple[type[SharedView], ClusterWatch], SharedView]] = {}
