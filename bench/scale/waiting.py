"""1,000 jobs that wait in one triggerer: idle, through a restart of the API server, and when 100 end at once.

Its requests are counted where it makes them, so that those without an answer count as well.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.scale import _triggerer
from bench.scale._child import Child, child, progress
from bench.scale._seen import watching

JOBS, ENDING = 1000, 100
SECONDS = 1200.0  # in which it must be done
SETTLE = 75.0  # seconds in which each tells why it waits, and records that it does
IDLE = 60.0  # seconds in which CPU is measured
AWAY = 5.0  # seconds that the API server is away, at least
LONGEST = 120.0  # seconds in which all are heard of again
AFTER = 60.0  # seconds after the cluster is back in which requests are counted
LAST = 5.0  # seconds in which all that ended must have been heard of
KINDS = ("pytorchjobs", "pods", "events")
WORDS = {
    "title": "1,000 jobs that wait in one triggerer",
    "meaning": "Deferred tasks cost next to nothing, an API server that comes back gets few requests a "
    "second, and many jobs that end at once are all noticed.",
    "figures": {
        "waiting": ("Jobs that are waited for", "", ""),
        "watches of a kind": ("Watches of each kind of object", "", "[limit: watches of a kind]"),
        "memory": ("Memory of the triggerer for all of them", "MiB", "at most [limit: memory]"),
        "idle": ("Processor time while nothing happens", "% of a core", "at most [limit: idle]"),
        "requests while idle": ("Requests a minute while nothing happens", "", ""),
        "not recovered": (
            "Of them, after a restart of the API server, not heard of again",
            "",
            "[limit: not recovered]",
        ),
        "recovered after": (
            "All are heard of again so long after the API server is back",
            "s",
            "at most [limit: recovered after]",
        ),
        "requests while away": ("Requests while it is away, at most in a second", "", ""),
        "requests after": (
            "Requests after it is back, at most in a second",
            "",
            "at most [limit: requests after]",
        ),
        "requests after in all": ("Requests in the minute or so after it is back", "", ""),
        "ending": ("Of them, jobs that end together", "", ""),
        "operator's ends": ("The operator says so of the first and of the last within", "s", ""),
        "end to event: median": ("From the operator's word to the end of the task's wait", "s", ""),
        "end to event: beyond a second": ("Of these, longer than a second", "", ""),
        "end to event: longest": ("The longest of them", "s", "at most [limit: end to event: longest]"),
        "not succeeded": ("Of them, not heard to have succeeded", "", "[limit: not succeeded]"),
    },
}
LIMITS = {
    "watches of a kind": 1,
    "memory": 300.0,
    "idle": 5.0,
    "not recovered": 0,
    "recovered after": 60.0,
    "requests after": 100,
    "end to event: longest": LAST,
    "not succeeded": 0,
}


def main() -> dict[str, Any]:
    """Measure; nothing else uses the cluster while the API server is restarted."""
    from cluster import cluster as own
    from cluster import hollow, images
    from support.hollow_logs import Ranks, logs

    from bench._cluster import namespace, target

    with (
        namespace("scale-waiting") as (cluster, space),
        TemporaryDirectory() as folder,
        logs(Ranks(1)) as ranks,
        hollow.nodes(cluster, ENDING, ranks.kubelet) as nodes,
    ):
        progress(f"{JOBS} suspended jobs")
        fields = target(space), images.reference("base")
        handles = _jobs(space, *fields, Path(folder), nodes)
        config = {"handles": [handle.model_dump(mode="json") for handle in handles]}
        with child("bench.scale.waiting", Path(folder), config, SECONDS) as process:
            figures = process.hear("idle")["figures"]
            progress(f"all wait: {figures}")
            with own.turn(alone=True):
                figures |= _restart(cluster, process)
            progress(f"the API server was restarted: {figures}")
            figures |= _end(space, nodes, ranks, process, [handle.name for handle in handles[:ENDING]])
    return {"unit": "s, MiB", **figures, "limit": LIMITS}


def _jobs(space: Any, target: dict[str, Any], image: str, folder: Path, nodes: Any) -> list[Any]:
    """Begin runs, and create their jobs, suspended."""
    from support.handmade_jobs import begin, open_namespace

    from manycpu.pipeline.targets.kubernetes.context import sharing

    access = sharing(open_namespace(space))

    def place(job: dict[str, Any]) -> None:
        job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"] |= nodes.place

    def job(number: int) -> Any:
        waiting = begin(target, image, folder, f"run-{number}", access)
        return waiting.create(policy={"suspend": True}, change=place)

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(job, range(JOBS)))


def _restart(cluster: Any, process: Child) -> dict[str, Any]:
    from cluster.faults import Faults

    with ExitStack() as stack:
        with Faults(cluster, alone=True).api_away():
            process.tell("away")
            time.sleep(AWAY)
            back = stack.enter_context(_ready(cluster))
        process.tell("back")
        said = process.hear("recovered")
    after = [count for second, count in said["requests"] if second >= int(back[0])]
    during = [count for second, count in said["requests"] if second < int(back[0])]
    return {
        "not recovered": JOBS - said["heard"],
        "recovered after": round(max(0.0, said["recovered"] - back[0]), 1),
        "requests while away": max(during, default=0),
        "requests after": max(after, default=0),
        "requests after in all": sum(after),
    }


@contextmanager
def _ready(cluster: Any) -> Iterator[list[float]]:
    """Note when the API server is ready: before the controllers are, which are begun after it."""
    from cluster import control_plane

    since: list[float] = []

    def look() -> None:
        while not control_plane.ready(cluster.modules["kubernetes"]):
            time.sleep(0.1)
        since.append(time.time())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield since
    finally:
        thread.join()


def _end(space: Any, nodes: Any, ranks: Any, process: Child, names: list[str]) -> dict[str, Any]:
    """Have jobs run, and end in the same second."""
    from cluster.command import wait_for
    from support.handmade_jobs import open_namespace

    api = open_namespace(space)
    with watching(space) as seen:
        for name in names:
            api.patch("PyTorchJob", name, {"spec": {"runPolicy": {"suspend": False}}})
        progress(f"{len(names)} are resumed")
        process.hear("met")
        progress("their ranks have begun; they end")
        ranks.end()
        nodes.end(space.name, [f"{name}-worker-0" for name in names])
        ends = process.hear_ends(len(names))
        process.hear("done")
        wait_for("the operator's ends", lambda: {*names} <= {*seen.succeeded}, seconds=60)
        late = sorted(ends[name]["time"] - seen.succeeded[name] for name in names)
    operator = sorted(seen.succeeded[name] for name in names)
    return {
        "ending": len(names),
        "operator's ends": round(operator[-1] - operator[0], 2),
        "end to event: median": round(late[len(late) // 2], 2),
        "end to event: longest": round(late[-1], 2),
        "end to event: beyond a second": sum(each > 1.0 for each in late),
        "not succeeded": sum(end["state"] != "succeeded" for end in ends.values()),
    }


async def _follow(meter: _triggerer.Meter, config: dict[str, Any]) -> None:
    before = _triggerer.memory()[0]
    triggerer = _triggerer.Triggerer(config["handles"])
    await _triggerer.until(lambda: meter.suspended() == JOBS)
    await asyncio.sleep(SETTLE)
    _triggerer.say("idle", figures=await _idle(meter, triggerer, before))
    await _recovery(meter)
    await _triggerer.until(lambda: meter.met() == ENDING)
    _triggerer.say("met")
    await _triggerer.until(lambda: triggerer.waiting == JOBS - ENDING)
    _triggerer.say("done")


async def _idle(meter: _triggerer.Meter, triggerer: _triggerer.Triggerer, before: float) -> dict[str, Any]:
    began, cpu, requests = time.monotonic(), _triggerer.cpu(), meter.requests.total()
    await asyncio.sleep(IDLE)
    seconds = time.monotonic() - began
    return {
        "waiting": triggerer.waiting,
        "watches of a kind": max(meter.watches[kind] for kind in KINDS),
        "memory": round(_triggerer.memory()[0] - before, 1),
        "idle": round(100 * (_triggerer.cpu() - cpu) / seconds, 2),
        "requests while idle": round(60 * (meter.requests.total() - requests) / seconds, 1),
    }


async def _recovery(meter: _triggerer.Meter) -> None:
    """Say when all were heard of again, and what was asked for meanwhile and in the minute after."""
    assert await _triggerer.heard() == "away"  # noqa: S101 - or it measures something else
    away, moment = int(time.time()) + 1, time.monotonic()
    back = asyncio.create_task(_triggerer.heard())
    until = time.monotonic() + LONGEST
    while meter.heard_since(moment) < JOBS and time.monotonic() < until:  # noqa: ASYNC110 - the same
        await asyncio.sleep(0.05)
    recovered, heard = time.time(), meter.heard_since(moment)
    assert await back == "back"  # noqa: S101 - the same
    await asyncio.sleep(AFTER)
    requests = [(second, count) for second, count in sorted(meter.requests.items()) if second >= away]
    _triggerer.say("recovered", recovered=recovered, heard=heard, requests=requests)


if __name__ == "__main__":
    _triggerer.main(_follow)
