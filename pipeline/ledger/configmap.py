"""The ledger of a run on Kubernetes: a ConfigMap, which owns everything that the run creates.

Each field of the entry has a key of its own, and each member of its mappings too, so that verbs that run side
by side (stage and build) change different keys.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from manycpu.pipeline.adapters.cluster import Cluster, Manifest
from manycpu.pipeline.ledger.base import Ledger
from manycpu.pipeline.ledger.entry import Entry
from manycpu.pipeline.spec.naming import labels

__all__ = ["ConfigMapLedger", "expired", "ledgers", "names"]

_MAPPINGS = ("attempts", "cancelled", "digests", "elsewhere", "tasks", "verbs")
_LEDGER = {"manycpu/part": "ledger"}
_KEPT = "manycpu/kept-until"
_KEY = "manycpu/key"


class ConfigMapLedger(Ledger):
    """The ConfigMap with the run's name."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self.name = cluster, name

    def open(self, entry: Entry) -> Entry:
        """Begin the ledger, or go on with the one that is there."""
        manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": self.name, "labels": labels(self.name) | _LEDGER | {_KEY: entry.key}},
            "data": _data(entry),
        }
        return _entry(self._cluster.create(manifest))

    def exists(self) -> bool:
        """Whether the run has begun, and has not been cleaned up."""
        found = self._cluster.get("ConfigMap", self.name)
        return found is not None and "deletionTimestamp" not in found["metadata"]

    def read(self) -> Entry:
        """Read what is recorded.

        Raises:
            FileNotFoundError: The run has not begun, or is cleaned up.
        """
        return _entry(self._present())

    @contextmanager
    def update(self) -> Iterator[Entry]:
        """Record what the block changes, and nothing else: who changes other keys meanwhile is not undone."""
        entry = self.read()
        before = _data(entry)
        yield entry
        self._patch(before, entry, {})

    @contextmanager
    def claim(self) -> Iterator[Entry]:
        """Record what the block changes, unless anybody has changed the ledger meanwhile.

        Raises:
            ClusterError: With status 409 where somebody has.
        """
        present = self._present()
        entry = _entry(present)
        before = _data(entry)
        yield entry
        self._patch(before, entry, {"resourceVersion": present["metadata"]["resourceVersion"]})

    def owner(self) -> list[dict[str, Any]]:
        """Make the ownerReferences of what the run creates."""
        uid = self._present()["metadata"]["uid"]
        return [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "name": self.name,
                "uid": uid,
                "controller": False,
                "blockOwnerDeletion": True,
            }
        ]

    def keep_until(self, moment: float) -> None:
        """Note until when, in seconds since the epoch, what the run made is kept."""
        self._cluster.patch("ConfigMap", self.name, {"metadata": {"annotations": {_KEPT: f"{moment:.0f}"}}})

    def remove(self) -> None:
        """Begin the deletion of the ledger, and with it of all that it owns."""
        self._cluster.delete("ConfigMap", self.name)

    def _patch(self, before: dict[str, str], entry: Entry, metadata: dict[str, str]) -> None:
        after = _data(entry)
        changed = {key: after.get(key) for key in before | after if before.get(key) != after.get(key)}
        if changed:
            self._cluster.patch("ConfigMap", self.name, {"metadata": metadata, "data": changed})

    def _present(self) -> Manifest:
        found = self._cluster.get("ConfigMap", self.name)
        if found is None:
            raise FileNotFoundError(f"there is no ledger {self._cluster.namespace}/{self.name}")
        return found


def ledgers(cluster: Cluster) -> list[ConfigMapLedger]:
    """List the ledgers of a namespace, oldest first."""
    found = cluster.list("ConfigMap", _LEDGER)
    found.sort(key=lambda item: item["metadata"]["creationTimestamp"])
    return [ConfigMapLedger(cluster, item["metadata"]["name"]) for item in found]


def names(cluster: Cluster, key: str) -> list[str]:
    """List the names under which a run has begun and is not being cleaned up: one, or none."""
    found = cluster.list("ConfigMap", _LEDGER | {_KEY: key})
    return [item["metadata"]["name"] for item in found if "deletionTimestamp" not in item["metadata"]]


def expired(cluster: Cluster, now: float) -> list[ConfigMapLedger]:
    """List the ledgers of kept runs whose time is over at ``now``, in seconds since the epoch."""
    found = cluster.list("ConfigMap", _LEDGER)
    over = [item for item in found if float(_annotations(item).get(_KEPT, "inf")) <= now]
    return [ConfigMapLedger(cluster, item["metadata"]["name"]) for item in over]


def _annotations(item: Manifest) -> dict[str, str]:
    return item["metadata"].get("annotations") or {}


def _data(entry: Entry) -> dict[str, str]:
    fields = entry.model_dump(mode="json", exclude_none=True)
    flat = {name: value for name, value in fields.items() if name not in _MAPPINGS}
    for name in _MAPPINGS:
        # A ConfigMap's keys are of letters, digits and -_. only: a member's name stands in its value.
        members = fields[name].items()
        flat |= {f"{name}.{_key(member)}": [member, value] for member, value in members}
    return {key: json.dumps(value, sort_keys=True) for key, value in flat.items()}


def _key(member: Any) -> str:
    return str(member).replace("/", ".")


def _entry(found: Manifest) -> Entry:
    fields: dict[str, Any] = {}
    for key, text in found["data"].items():
        name, dot, _ = key.partition(".")
        value = json.loads(text)
        if dot:
            member, content = value
            fields.setdefault(name, {})[member] = content
        else:
            fields[name] = value
    return Entry.model_validate(fields)
