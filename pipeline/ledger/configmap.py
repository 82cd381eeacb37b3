"""The ledger of a run on Kubernetes: a ConfigMap, which owns everything that the run creates.

Each field of the entry has its own key, and so has each member of its mappings: verbs that run at the same
time (stage and build) change different keys.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random

from manycpu.pipeline.adapters.cluster import RETRY_TIMEOUT_S, Cluster, poll
from manycpu.pipeline.ledger import base
from manycpu.pipeline.ledger.base import (
    LEASE_S,
    RENEW_INTERVAL_S,
    Entry,
    Lease,
    from_annotations,
    to_annotations,
)
from manycpu.pipeline.spec import errors
from manycpu.pipeline.spec.errors import ConflictError, NotFoundError, RunGoneError
from manycpu.pipeline.spec.kube_object import KubeObject, is_being_deleted
from manycpu.pipeline.spec.naming import labels

_MAPPINGS = ("attempts", "cancelled", "digests", "elsewhere", "tasks", "verbs")
_LEDGER = {"manycpu/part": "ledger"}
_DELETION_TIMEOUT_S = 120.0  # for the ledger of an earlier run that is being deleted
_RENEWAL_TIMEOUT_S = 5.0  # short: another renewal follows
_UNSEEN_TIMEOUT_S = 3 * RENEW_INTERVAL_S  # two renewals take at most this time: one of them may fail
_KEY = "manycpu/key"


class ConfigMapLedger(base.Ledger):
    """The ledger in the ConfigMap with the run's name.

    Once a ConfigMap was read, only this one counts: a later one of the same name belongs to another run.

    Args:
        cluster: Its namespace.
        name: The run's name.
        present: The ConfigMap, if it was read already.
    """

    _unseen_timeout_s = _UNSEEN_TIMEOUT_S

    def __init__(self, cluster: Cluster, name: str, present: KubeObject | None = None) -> None:
        self._cluster, self.name = cluster, name
        self._meta: KubeObject = present["metadata"] if present else {}

    def open(self, entry: Entry) -> Entry:
        """Create the ledger, or continue with the one that exists; wait while one is being deleted.

        Raises:
            ClusterError: The deletion does not end in time.
            ForeignRunError: Another living process works on it.
        """
        now = self.now()
        manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": self.name,
                "labels": labels(self.name) | _LEDGER | {_KEY: entry.key},
                "annotations": to_annotations(until=now + LEASE_S, renewed=now),
            },
            "data": _data(entry),
        }
        configmap = poll(
            partial(self._create_or_continue, manifest), done=bool, timeout_s=_DELETION_TIMEOUT_S
        )
        if configmap is None:
            raise errors.ClusterError(
                f"ledger {self._cluster.namespace}/{self.name} of an earlier run is being deleted "
                "and does not go",
                fix=f"See why: kubectl -n {self._cluster.namespace} describe configmap {self.name}",
            )
        self._meta = configmap["metadata"]
        return _entry(configmap)

    def _create_or_continue(self, manifest: KubeObject) -> KubeObject | None:
        """Create the ConfigMap and return it; if it exists, renew its lease, and remove the former holder.

        None: the caller must try again, because the existing one is being removed, or was changed in between.

        Raises:
            ForeignRunError: The holder of the existing one is alive, or may be (``refuse_second_holder``).
        """
        try:
            configmap = self._cluster.create(manifest)  # returns the existing one if there is one
            removed = base.REMOVED_ANNOTATION in (configmap["metadata"].get("annotations") or {})
            if removed or is_being_deleted(configmap):
                return None
            # Equal data, with the time in `created`: this call created it, with its lease.
            if configmap.get("data") == manifest["data"]:
                return configmap
            self.refuse_second_holder(from_annotations(configmap["metadata"]))
            # The API server refuses a patch with another uid (the ConfigMap was replaced since it was read)
            # or with another resourceVersion (it was changed).
            meta = {key: configmap["metadata"][key] for key in ("uid", "resourceVersion")}
            lease = self._renewed(LEASE_S) | to_annotations(holder=None)
            return self._cluster.patch("ConfigMap", self.name, {"metadata": meta | {"annotations": lease}})
        except (NotFoundError, ConflictError):
            return None

    def now(self) -> float:
        """Read the API server's clock, in seconds since the epoch: the workers' clocks may differ."""
        return self._cluster.now()

    def exists(self) -> bool:
        """Whether the run has begun, and has not been cleaned up."""
        return self._unless_gone(self._cluster.get("ConfigMap", self.name)) is not None

    def read(self) -> Entry:
        """Read the entry."""
        return _entry(self._configmap())

    def lease(self) -> Lease:
        """Read the lease of the run."""
        return from_annotations(self._configmap()["metadata"])

    def renew(self, seconds: float = LEASE_S) -> None:
        """Renew the lease: from now on it lasts ``seconds``. A lease that has ended stays ended."""
        if not from_annotations(self._configmap(_RENEWAL_TIMEOUT_S)["metadata"]).ended:
            self.take_up(seconds)

    def change_lease(self, only_if: Callable[[Lease], bool] | None = None, **fields: Any) -> bool:
        """Change fields of the lease, if ``only_if`` allows; returns whether they were changed."""
        annotations = to_annotations(**fields)
        if only_if is None and not fields.get("holder"):  # nothing depends on the present lease
            self._change({"metadata": {"annotations": annotations}})
            return True

        def change() -> bool:
            """Check the present lease, and change it; raises ConflictError if it has changed since."""
            meta = self._configmap()["metadata"]
            lease = from_annotations(meta)
            if fields.get("holder"):
                self.refuse_second_holder(lease)
            if only_if is not None and not only_if(lease):
                return False
            # Refused if another process has changed the lease since: then `change` is called again.
            version = {"resourceVersion": meta["resourceVersion"]}
            self._change({"metadata": version | {"annotations": annotations}})
            return True

        return _after_conflicts(RETRY_TIMEOUT_S)(change)

    def take_up(self, seconds: float = LEASE_S) -> None:
        """Begin a lease that lasts ``seconds`` from now on, also of a run that has ended or is kept."""
        self._change({"metadata": {"annotations": self._renewed(seconds)}}, deadline=_RENEWAL_TIMEOUT_S)

    def _renewed(self, seconds: float) -> dict[str, str | None]:
        """Return the annotations of a lease that lasts ``seconds`` from now on."""
        now = self.now()
        return to_annotations(until=now + seconds, renewed=now, ended=False, kept=False)

    @contextmanager
    def update(self, *unchanged: str) -> Iterator[Entry]:
        """Change the entry in a ``with`` block; only the keys that the block changes are written.

        Changes to other keys, which other processes make meanwhile, are kept.

        Args:
            unchanged: Fields of the metadata that must not have changed meanwhile; else ConflictError.
        """
        configmap = self._configmap()
        entry = _entry(configmap)
        before = _data(entry)
        yield entry
        after = _data(entry)
        # A key that the block removed gets None, by which a patch deletes it.
        changed = {key: after.get(key) for key in before | after if before.get(key) != after.get(key)}
        if changed:
            # The API server refuses a patch whose resourceVersion is not the present one.
            meta = {name: configmap["metadata"][name] for name in unchanged}
            self._change({"metadata": meta, "data": changed})

    def claim(self) -> AbstractContextManager[Entry]:
        """Record what the block changes; raises ConflictError if another process has changed the ledger."""
        return self.update("resourceVersion")

    def owner(self) -> list[dict[str, Any]]:
        """Return the ownerReferences for what the run creates: Kubernetes deletes it with the ledger."""
        return [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "name": self.name,
                "uid": self.uid(),
                "controller": False,
                "blockOwnerDeletion": True,
            }
        ]

    def uid(self) -> str:
        """Return the uid, which distinguishes this ledger from later ones of the same name."""
        return str(self._configmap()["metadata"]["uid"])

    def identity(self) -> str:
        """Return the ledger's uid; once read, also when it is gone."""
        with suppress(RunGoneError):
            return str(self._meta.get("uid") or self.uid())
        return ""

    @property
    def is_marked_removed(self) -> bool:
        """Whether the run is being removed, because its lease was over."""
        return base.REMOVED_ANNOTATION in (self._meta.get("annotations") or {})

    def mark_removed(self, now: float) -> bool:
        """Mark a run as being removed, if its lease is over at ``now`` (seconds since the epoch).

        Returns whether the run was marked; False: its lease is not over, or the ledger is gone or has been
        changed since it was read.
        """
        if not from_annotations(self._meta).over(now):
            return False
        meta = {key: self._meta[key] for key in ("uid", "resourceVersion")}
        try:
            self._change({"metadata": meta | {"annotations": {base.REMOVED_ANNOTATION: "true"}}})
        except (RunGoneError, ConflictError):
            return False
        return True

    def remove(self) -> None:
        """Begin to delete the ledger, if it is still this run's; Kubernetes then deletes all that it owns."""
        with suppress(RunGoneError):
            self._cluster.delete("ConfigMap", self.name, uid=self._meta.get("uid") or self.uid())

    def _change(self, body: KubeObject, deadline: float = RETRY_TIMEOUT_S) -> None:
        """Patch the ledger that was read, and no later one of the same name.

        Raises:
            ConflictError: The body has a resourceVersion, which is not the present one. A patch without one
                is repeated.
            RunGoneError: The ledger that was read is gone.
        """
        meta = {"uid": self._meta["uid"]} if self._meta else {}  # empty: no ConfigMap was read yet
        body = body | {"metadata": meta | body["metadata"]}

        def patch() -> KubeObject:
            """Patch the ConfigMap once; raises RunGoneError if the ledger that was read is gone."""
            try:
                return self._cluster.patch("ConfigMap", self.name, body, deadline=deadline)
            except (NotFoundError, ConflictError, errors.InvalidError):  # InvalidError: such as another uid
                self._configmap()  # raises RunGoneError if that is the reason
                raise

        # The API server gives up after a few conflicts, when many processes write at once. A patch with a
        # resourceVersion is not repeated: the same version would conflict again.
        once = "resourceVersion" in body["metadata"]
        self._remember(patch() if once else _after_conflicts(deadline)(patch))

    def _configmap(self, deadline: float = RETRY_TIMEOUT_S) -> KubeObject:
        """Read the run's ConfigMap; raises RunGoneError if it is gone."""
        return self._remember(self._cluster.get("ConfigMap", self.name, deadline))

    def _unless_gone(self, configmap: KubeObject | None) -> KubeObject | None:
        """Return ``configmap`` if it is this run's; None: it is gone, being deleted, or of a later run."""
        if configmap is None or is_being_deleted(configmap):
            return None
        known_uid = self._meta.get("uid")  # None: no ConfigMap was read before, so this one counts
        is_ours = known_uid is None or known_uid == configmap["metadata"]["uid"]
        return configmap if is_ours else None

    def _remember(self, configmap: KubeObject | None) -> KubeObject:
        """Store the metadata of ``configmap``, and return it; raises RunGoneError if it is not this run's."""
        if own := self._unless_gone(configmap):
            self._meta = own["metadata"]
            return own
        full_name = f"{self._cluster.namespace}/{self.name}"
        if not self._meta:
            raise RunGoneError(f"there is no ledger {full_name}: the run has not begun, or is cleaned up")
        raise RunGoneError(
            f"the run was taken away: somebody deleted its ledger, ConfigMap {full_name}, "
            "and with it all that it owned",
            fix="If another command has finished this run, its report says so; else see who cleans that "
            "namespace, and run again",
        )


def _after_conflicts(deadline: float) -> Retrying:
    """Make a caller of functions, which repeats a function while that raises ConflictError.

    It returns the function's result; after ``deadline`` seconds it raises the last ConflictError.
    """
    return Retrying(
        retry=retry_if_exception_type(ConflictError),
        stop=stop_after_delay(deadline),
        wait=wait_random(max=1.0),
        reraise=True,
    )


def ledgers(cluster: Cluster) -> list[ConfigMapLedger]:
    """List the ledgers of a namespace, oldest first."""
    configmaps = cluster.list("ConfigMap", _LEDGER)
    configmaps.sort(key=lambda item: item["metadata"]["creationTimestamp"])
    return [ConfigMapLedger(cluster, item["metadata"]["name"], item) for item in configmaps]


def names(cluster: Cluster, key: str) -> list[str]:
    """List the ledger's name of the run with this key; empty: there is none, or it is being deleted."""
    configmaps = cluster.list("ConfigMap", _LEDGER | {_KEY: key})
    return [item["metadata"]["name"] for item in configmaps if not is_being_deleted(item)]


def expired(cluster: Cluster, now: float) -> list[ConfigMapLedger]:
    """List the ledgers of runs whose lease is over at ``now``, in seconds since the epoch."""
    return [
        ConfigMapLedger(cluster, item["metadata"]["name"], item)
        for item in cluster.list("ConfigMap", _LEDGER)
        if not is_being_deleted(item) and from_annotations(item["metadata"]).over(now)
    ]


def _data(entry: Entry) -> dict[str, str]:
    """Write an entry as the data of a ConfigMap: a key for each field, and for each member of mappings."""
    fields = entry.model_dump(mode="json", exclude_none=True)
    flat = {name: value for name, value in fields.items() if name not in _MAPPINGS}
    for name in _MAPPINGS:
        for member, value in fields[name].items():
            # A ConfigMap's keys have only letters, digits and -_. : a member's full name is in its value.
            flat[f"{name}.{str(member).replace('/', '.')}"] = [member, value]
    return {key: json.dumps(value, sort_keys=True) for key, value in flat.items()}


def _entry(configmap: KubeObject) -> Entry:
    """Read the entry from a ConfigMap; raises LedgerError if another version wrote it."""
    fields: dict[str, Any] = {}
    try:
        for key, text in configmap["data"].items():
            name, dot, _ = key.partition(".")
            value = json.loads(text)
            if dot:  # a member of a mapping, as _data writes it
                member, content = value
                fields.setdefault(name, {})[member] = content
            else:
                fields[name] = value
        return Entry.model_validate(fields)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        namespace, name = (configmap["metadata"][key] for key in ("namespace", "name"))
        raise errors.LedgerError(
            f"ledger {namespace}/{name} cannot be read, another version of manycpu wrote it perhaps: "
            f"{str(error).splitlines()[0]}",
            fix=f"Use that version; or remove the run, its model too: kubectl -n {namespace} "
            f"delete configmap {name}",
        ) from error
