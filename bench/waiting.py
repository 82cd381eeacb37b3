"""200 jobs that wait in one triggerer and share a watch: memory over the imports, idle CPU, connections."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from bench._measure import rounds

JOBS = 200
SETTLE = 20.0  # seconds until all have begun
IDLE = (30, 10)  # seconds in which CPU is measured
LAUNCH = {"launch": "pytorchjob", "kind": "kubernetes"}
WORDS = {
    "title": "Waiting for 200 jobs",
    "meaning": "Deferred tasks cost next to nothing: 200 of them share one watch of the cluster.",
    "figures": {
        ".+: memory_mib": ("Memory of the triggerer for all of them", "MiB", ""),
        ".+: cpu_percent": ("Processor time while nothing happens", "% of a core", ""),
        ".+: connections": ("Connections to the cluster", "", ""),
        ".+: waiting": ("Jobs that are waited for", "", ""),
        ".+: documents": ("Documents written for the runs' pages, all before that", "", ""),
        ".+: threads": ("Threads of the triggerer", "", ""),
    },
}


def main() -> dict[str, object]:
    """Compare both sides."""
    from cluster import settings

    from bench._cluster import namespace

    with namespace("bench-waiting") as (_, space), TemporaryDirectory() as folder:
        return _compare(str(settings.kubeconfig()), space.name, Path(folder))


def _compare(kubeconfig: str, namespace: str, folder: Path) -> dict[str, object]:
    from manycpu.pipeline.adapters.cluster import Cluster, connect

    cluster = Cluster(partial(connect, kubeconfig), namespace)
    handles = [_suspended(cluster, kubeconfig, folder, number) for number in range(JOBS)]
    (folder / "handles.json").write_text(json.dumps(handles))
    return {f"{JOBS} jobs in one triggerer": _side(kubeconfig, folder)}


def _side(kubeconfig: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.waiting", kubeconfig, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode or done.stderr:
        raise RuntimeError(done.stderr[-2000:])
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _suspended(cluster: Any, kubeconfig: str, folder: Path, number: int) -> dict[str, Any]:
    from manycpu.pipeline.spec.handle import JobHandle
    from manycpu.pipeline.spec.naming import labels
    from manycpu.pipeline.targets.context import Access
    from manycpu.pipeline.targets.open_run import open_context

    target = LAUNCH | {"namespace": cluster.namespace, "connection": kubeconfig}
    run = {"program": "question_answering", "output": str(folder / str(number))}
    access = Access(connect=lambda: cluster.api)
    ctx: Any = open_context(run, target, "bench", number, base=folder, access=access)
    ctx.ledger.open(ctx.new_entry(time.time()))
    job_labels = labels(ctx.name, attempt="1", role="rank")
    pod = {"containers": [{"name": "pytorch", "image": "none", "command": ["true"]}]}
    worker = {"replicas": 1, "template": {"metadata": {"labels": job_labels}, "spec": pod}}
    job = cluster.create(
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": f"{ctx.name}-1", "labels": job_labels},
            "spec": {"runPolicy": {"suspend": True}, "pytorchReplicaSpecs": {"Worker": worker}},
        }
    )
    with ctx.ledger.update() as entry:
        entry.attempt = 1
    meta = job["metadata"]
    handle = JobHandle(
        run=ctx.name,
        attempt=1,
        launch="pytorchjob",
        namespace=cluster.namespace,
        name=meta["name"],
        uid=meta["uid"],
        created=time.time(),
        connection=kubeconfig,
    )
    return handle.model_dump(mode="json")


@contextmanager
def _quiet() -> Iterator[None]:
    import logging

    logging.disable(logging.CRITICAL)
    yield


async def _measure(begin: Callable[[], list[AsyncIterator[Any]]], kubeconfig: str) -> dict[str, Any]:
    port = _port(kubeconfig)
    process = psutil.Process()
    before = process.memory_info().rss
    tasks = [asyncio.create_task(anext(aiter(events))) for events in begin()]  # type: ignore[arg-type]
    await asyncio.sleep(SETTLE)
    began, cpu = time.monotonic(), sum(process.cpu_times()[:2])
    await asyncio.sleep(rounds(*IDLE))
    spent = (sum(process.cpu_times()[:2]) - cpu) / (time.monotonic() - began)
    connections = [c for c in process.net_connections("tcp") if c.raddr and c.raddr.port == port]
    figures = {
        "memory_mib": round((process.memory_info().rss - before) / 2**20, 1),
        "cpu_percent": round(100 * spent, 2),
        "connections": len([c for c in connections if c.status == psutil.CONN_ESTABLISHED]),
        "waiting": sum(not task.done() for task in tasks),
        "threads": process.num_threads(),
    }
    for task in tasks[:1]:
        if task.done():
            sys.stderr.write(repr(task.exception() or task.result()) + "\n")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures


def _port(kubeconfig: str) -> int:
    import yaml

    document = yaml.safe_load(Path(kubeconfig).read_text())
    return int(document["clusters"][0]["cluster"]["server"].rpartition(":")[2])


def _ours(folder: Path) -> list[AsyncIterator[Any]]:
    from airflow.triggers.shared_stream import SharedStreamManager

    from manycpu.operators.job_trigger import JobTrigger

    manager = SharedStreamManager()
    streams = []
    for number, handle in enumerate(json.loads((folder / "handles.json").read_text())):
        place = {"dag_id": "bench", "run_id": str(number), "task_id": "train", "map_index": -1}
        trigger = JobTrigger(handle=handle, cursor=None, by="bench", place=place)
        key = trigger.shared_stream_key()
        stream = manager.subscribe(trigger_id=number, trigger=trigger, key=key)
        streams.append(trigger.filter_shared_stream(stream))
    return streams


class _Counted:
    """Takes what triggers send to Airflow: documents of their pages."""

    def __init__(self) -> None:
        self.documents = 0

    def send(self, message: Any) -> None:
        """Count it, once it is what goes over the wire."""
        message.model_dump_json()
        self.documents += 1


def _child(kubeconfig: str, folder: Path) -> None:
    from airflow.providers.cncf.kubernetes.triggers import job as _job  # noqa: F401 - imported before the count
    from airflow.sdk.execution_time import task_runner

    import manycpu.operators.base
    import manycpu.operators.job_trigger
    import manycpu.pipeline.targets.kubernetes.wait

    manycpu.operators.base.access_of = lambda _: None  # a kubeconfig's path, and no connection of Airflow's
    task_runner.SUPERVISOR_COMMS = counted = _Counted()  # type: ignore[assignment]
    with _quiet():
        figures = asyncio.run(_measure(partial(_ours, folder), kubeconfig))
    figures["documents"] = counted.documents
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _child(sys.argv[1], Path(sys.argv[2]))
