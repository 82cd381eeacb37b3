"""Objects as the Kubernetes API returns them, as test data."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.job_kinds import JOB_KINDS, Role
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot

T0 = 1_700_000_000
Object = dict[str, Any]
_OURS = labels("qa", attempt="1")


def at(seconds: float) -> str:
    """Return the time `seconds` after the job's creation, in the API's format."""
    return datetime.fromtimestamp(T0 + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def handle(launch: str = "pytorchjob") -> JobHandle:
    return JobHandle(
        run="qa", attempt=1, launch=launch, namespace="ml", name="qa-1", uid="job", created=float(T0)
    )


def job(*conditions: str, launch: str = "pytorchjob", seconds: float = 0, **spec: Any) -> Object:
    """Return a job with these conditions, all true since ``seconds`` after its creation."""
    held = [
        {"type": c, "status": "True", "lastTransitionTime": at(seconds), "message": c} for c in conditions
    ]
    return {
        "kind": JOB_KINDS[launch].kind,
        "metadata": {"name": "qa-1", "uid": "job", "creationTimestamp": at(0), "labels": _OURS},
        "spec": {"runPolicy": spec},
        "status": {"conditions": held} if held else {},
    }


def pod(
    name: str, *, role: Role = "rank", born: float = 1, placed: float | None = 2, **status: Any
) -> Object:
    """Return a pod of the job; ``status`` adds to its status, or replaces parts of it.

    ``born`` and ``placed`` are in seconds after the job's creation: when the pod was created, and when it got
    a node. None: it has no node.
    """
    conditions = [] if placed is None else [_true("PodScheduled", placed)]
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}-{born}",
            "creationTimestamp": at(born),
            "labels": {**_OURS, "manycpu/role": role},
        },
        "spec": {"containers": [{"name": "pytorch", "image": "reg/train:1"}]},
        "status": {"phase": "Pending", "conditions": conditions} | status,
    }


def container(name: str = "pytorch", restarts: int = 0, **state: Any) -> Object:
    """Return a container status; ``state`` is its state, and ``last`` in it the state before."""
    last = state.pop("last", {})
    return {"name": name, "restartCount": restarts, "state": state, "lastState": last}


def with_sidecar(made: Object, **state: Any) -> Object:
    """Add a container to a pod, as a webhook of a cluster may; ``state`` is the container's state."""
    made["spec"]["containers"].append({"name": "log-shipper", "image": "shipper:1"})
    made["status"].setdefault("containerStatuses", []).append(container("log-shipper", **state))
    return made


def event(reason: str, message: str, about: Object | tuple[str, str], seconds: float = 5) -> Object:
    """Return a warning event about an object, or about a kind and a name."""
    if isinstance(about, tuple):
        kind, name, uid = *about, f"uid-{about[1]}"
    else:
        kind, meta = about.get("kind", "Pod"), about["metadata"]
        name, uid = meta["name"], meta["uid"]
    return {
        "metadata": {"uid": f"{reason}-{name}-{seconds}", "creationTimestamp": at(seconds)},
        "involvedObject": {"kind": kind, "name": name, "uid": uid},
        "reason": reason,
        "message": message,
        "type": "Warning",
        "lastTimestamp": at(seconds),
    }


def snapshot(
    found: Object | None, pods: Sequence[Object] = (), events: Sequence[Object] = (), launch: str = ""
) -> JobSnapshot:
    """Return a snapshot of a job with its pods and events; None as job: there is none.

    ``launch`` is the launch kind; empty: that of the job, or ``pytorchjob``.
    """
    launch = launch or next(
        (name for name, kind in JOB_KINDS.items() if found and found["kind"] == kind.kind), "pytorchjob"
    )
    made = JobSnapshot(handle(launch), ["data"])
    made.apply(made.kind, [found] if found else [], [], complete=True)
    made.apply("Pod", list(pods), [], complete=True)
    made.apply("Event", list(events), [], complete=True)
    return made


def _true(kind: str, seconds: float) -> Object:
    return {"type": kind, "status": "True", "lastTransitionTime": at(seconds)}
