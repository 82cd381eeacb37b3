"""Watch objects of a namespace once for several followers, for as long as one of them needs the objects."""

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
AGAIN: Final = 5.0  # seconds between two tries to watch, and until unchanged objects are read again
_SETTLE: Final = 0.3  # seconds for which changes are collected before followers are woken

Selections = Mapping[str, Mapping[str, str]]
Wake = Callable[[], None]
Concerns = Callable[[Changes], bool]


class SharedView:
    """Objects of some kinds, watched once for all followers that join.

    Args:
        watch: The namespace.
        cluster: The same namespace, for single requests.
    """

    def __init__(self, watch: ClusterWatch, cluster: Cluster) -> None:
        self._watch, self._cluster = watch, cluster
        self._wakes: dict[Wake, Concerns] = {}
        self._due: set[Wake] = set()
        self._task: asyncio.Task[None] | None = None
        self._waking: asyncio.TimerHandle | None = None
        self.changes = 0
        """Number of changes so far."""

    @classmethod
    def of(cls, watch: ClusterWatch, cluster: Cluster) -> Self:
        """Return the view that all followers of a watch share; create it for the first one."""
        view = _ALL.setdefault((cls, watch), cls(watch, cluster))
        assert isinstance(view, cls)  # noqa: S101 - the key contains the class
        return view

    def selections(self) -> Selections:
        """Return what to watch, kind -> selectors; called on a thread."""
        raise NotImplementedError

    @property
    def is_complete(self) -> bool:
        """Whether the objects of every kind were listed."""
        return bool(self._kinds) and self._kinds <= self._listed

    def objects(self) -> dict[str, list[KubeObject]]:
        """Return the current objects: kind -> objects."""
        return {change.kind: change.objects for change in self._present.changes()}

    def join(self, wake: Wake, concerns: Concerns = lambda _: True) -> None:
        """Call ``wake`` after every change for which ``concerns`` returns true."""
        self._wakes[wake] = concerns
        if self._task is None:
            self._present, self._kinds, self._listed = ObjectStore(), frozenset[str](), set[str]()
            self._task = asyncio.create_task(self._follow())

    def leave(self, wake: Wake) -> None:
        """Stop calling ``wake``; the watch ends when the last follower leaves."""
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
            except Exception:  # noqa: BLE001 - without a watch, jobs would wait for room for ever
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
