"""Watch objects of a namespace once for several followers, for as long as one of them needs the objects.

A follower follows one job (``follower.py``); many of them run in one process.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Final, Self

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_watch import FAILURES, Changes, ClusterWatch
from manycpu.pipeline.spec.kube_object import KubeObject

_log = logging.getLogger(__name__)
RETRY_INTERVAL_S: Final = 5.0  # between two tries to watch, and between two reads of unchanged objects
_WAKE_DELAY_S: Final = 0.3  # changes are collected for this time before followers are woken

Selections = Mapping[str, Mapping[str, str]]
"""Kind of object -> its ``labelSelector`` and ``fieldSelector``, if it has them."""
Wake = Callable[[], None]
"""A function that makes one follower look at the objects again; it also identifies the follower."""


class ObjectStore:
    """The current objects of some kinds, so that a follower that joins a watch later gets a complete list."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, KubeObject]] = {}

    def apply(self, change: Changes) -> None:
        """Store the objects of a change; drop it if the complete list of its kind has not arrived yet."""
        by_uid = {item["metadata"]["uid"]: item for item in change.objects}
        if change.complete:
            self._objects[change.kind] = by_uid
        elif change.kind in self._objects:
            self._objects[change.kind] |= by_uid
            for item in change.deleted:
                self._objects[change.kind].pop(item["metadata"]["uid"], None)

    def changes(self) -> list[Changes]:
        """Return all current objects as changes, one complete list for each kind."""
        return [Changes(kind, [*items.values()], [], complete=True) for kind, items in self._objects.items()]


class SharedView:
    """Objects of some kinds, watched once for all followers that join."""

    def __init__(self, watch: ClusterWatch, cluster: Cluster) -> None:
        self._watch, self._cluster = watch, cluster
        self._wakes: dict[Wake, Callable[[Changes], bool]] = {}  # follower -> whether a change concerns it
        self._due: set[Wake] = set()  # the followers to wake when the timer ends
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._present = ObjectStore()
        self._kinds = frozenset[str]()  # the kinds that are watched; empty until the first selection
        self._listed = set[str]()  # the kinds whose complete list has arrived
        self.changes = 0
        """Number of changes so far."""

    @classmethod
    def of(cls, watch: ClusterWatch, cluster: Cluster) -> Self:
        """Return the view that all followers of ``watch`` share; it starts when the first follower joins."""
        view = _ALL.get((cls, watch)) or cls(watch, cluster)
        assert isinstance(view, cls)  # noqa: S101 - the key contains the class
        return view

    def join(self, wake: Wake, concerns: Callable[[Changes], bool] = lambda _: True) -> None:
        """Let a follower join: call its ``wake`` soon after each change for which ``concerns`` returns true.

        The first follower that joins starts the watch. A follower may join again, which changes nothing.
        """
        self._wakes[wake] = concerns
        if self._task is None:
            _ALL[type(self), self._watch] = self
            self._task = asyncio.create_task(self._follow())

    def leave(self, wake: Wake) -> None:
        """Stop calling the ``wake`` of a follower; the watch ends when the last follower leaves."""
        had_joined = self._wakes.pop(wake, None) is not None
        if had_joined and not self._wakes and self._task is not None:
            self._task.cancel()
            del _ALL[type(self), self._watch]

    def selections(self) -> Selections:
        """Return what to watch, kind -> selectors. It is called on a thread, and may call the cluster."""
        raise NotImplementedError

    @property
    def is_complete(self) -> bool:
        """Whether the complete list of every kind has arrived."""
        return bool(self._kinds) and self._kinds <= self._listed

    def objects(self) -> dict[str, list[KubeObject]]:
        """Return the current objects: kind -> objects."""
        return {change.kind: change.objects for change in self._present.changes()}

    async def _follow(self) -> None:
        """Watch the objects until the task is cancelled; after an error, start again."""
        while True:
            try:
                selections = await asyncio.to_thread(self.selections)
                self._kinds = frozenset(selections)
                async with aclosing(self._watch.follow(selections)) as changes:
                    async for change in changes:
                        self._apply(change)
            except FAILURES:
                pass
            except Exception:  # noqa: BLE001 - without a watch, jobs would wait for room for ever
                _log.exception("the watch of the namespace's other objects failed and starts again")
            self._listed.clear()  # not complete until every kind is listed again
            await asyncio.sleep(RETRY_INTERVAL_S)

    def _apply(self, change: Changes) -> None:
        """Store a change, and wake the followers that it concerns after a short delay."""
        self._present.apply(change)
        if change.complete:
            self._listed.add(change.kind)
        self.changes += 1
        self._due |= {wake for wake, concerns in self._wakes.items() if concerns(change)}
        if self._due and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WAKE_DELAY_S, self._wake)

    def _wake(self) -> None:
        """Wake the followers that are due; the next change starts another timer."""
        due = self._due
        self._due = set()
        self._timer = None
        for wake in due & self._wakes.keys():  # leaves out followers that have left meanwhile
            wake()


_ALL: Final[dict[tuple[type[SharedView], ClusterWatch], SharedView]] = {}
"""The views that have a follower, in this process."""
