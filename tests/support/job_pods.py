"""States and logs of a job's pods, as the API server of a test serves them."""

from datetime import UTC, datetime
from typing import Any

from support.fake_api_server import ApiServer, Object

from manycpu.pipeline.spec import events

NO_ROOM = "0/2 nodes are available: 2 Insufficient cpu."


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def up(**state: Any) -> Object:
    """Describe a pod that has a node, and its container."""
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": now()}]
    inner = {"name": "trainer", "restartCount": 0, "state": state or {"running": {"startedAt": now()}}}
    return {"phase": "Running", "conditions": conditions, "containerStatuses": [inner]}


def refused() -> Object:
    """Describe a pod for which no node has enough CPU."""
    no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_ROOM}
    return {"phase": "Pending", "conditions": [no]}


def line(rank: int, host: str, event: str, **fields: Any) -> str:
    """Return a line of a pod's log: its time, and an event of a rank; ``host`` is the pod's host name."""
    text = events.encode(event, rank=rank, host="node", hostname=host, **fields)
    return f"{now()[:-1]}.0Z {events.join(rank, 'node', text)}\n"


def meet(server: ApiServer, pods: list[str]) -> None:
    """Give each pod, in the order of the ranks, a log that proves that two ranks have met."""
    for rank, pod in enumerate(pods):
        host = pod.removesuffix("-x7k2p")
        server.logs[pod] = line(rank, host, "proof", world_size=2, round=0, meeting="m")
        server.logs[pod] += line(rank, host, "backend", requested="gloo", observed="gloo", world_size=2)
