"""Keep the current objects of a watch, so that a follower that joins later gets a complete list."""

from manycpu.pipeline.adapters.cluster_watch import Changes
from manycpu.pipeline.spec.kube_object import KubeObject

__all__ = ["ObjectStore"]


class ObjectStore:
    """The current objects of some kinds."""

    def __init__(self) -> None:
        self._objects: dict[str, dict[str, KubeObject]] = {}

    def apply(self, change: Changes) -> None:
        """Apply a change; a change of a kind that was not listed yet is dropped."""
        by_uid = {item["metadata"]["uid"]: item for item in change.objects}
        if change.complete:
            self._objects[change.kind] = by_uid
        elif change.kind in self._objects:
            self._objects[change.kind] |= by_uid
            for item in change.deleted:
                self._objects[change.kind].pop(item["metadata"]["uid"], None)

    def changes(self) -> list[Changes]:
        """Return all current objects as changes, one complete list for each kind."""
        return [
            Changes(kind, list(objects.values()), [], complete=True)
            for kind, objects in self._objects.items()
        ]
