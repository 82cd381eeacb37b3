"""When the cluster itself had come to a point: as seen by a watch of the benchmark's own."""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Seen:
    """When a watch first saw each pod run, each pod end, and each job succeed; seconds since the epoch."""

    def __init__(self) -> None:
        self.running: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.succeeded: dict[str, float] = {}

    def pod(self, pod: dict[str, Any]) -> None:
        """Note what a pod has come to."""
        phase, name = pod.get("status", {}).get("phase"), pod["metadata"]["name"]
        if phase == "Running":
            self.running.setdefault(name, time.time())
        elif phase in ("Succeeded", "Failed"):
            self.ended.setdefault(name, time.time())

    def job(self, job: dict[str, Any]) -> None:
        """Note what a job has come to."""
        conditions = job.get("status", {}).get("conditions") or []
        if any(each["type"] == "Succeeded" and each["status"] == "True" for each in conditions):
            self.succeeded.setdefault(job["metadata"]["name"], time.time())


@contextmanager
def watching(space: Any) -> Iterator[Seen]:
    """Watch the pods and jobs of a namespace."""
    from cluster import cluster, settings

    running, seen = cluster.running(), Seen()
    assert running is not None  # noqa: S101 - the benchmark uses it
    access = [running.modules["kubernetes"].program("kubectl"), "--kubeconfig", settings.kubeconfig()]
    paths = {
        f"/api/v1/namespaces/{space.name}/pods?watch=1": seen.pod,
        f"/apis/kubeflow.org/v1/namespaces/{space.name}/pytorchjobs?watch=1": seen.job,
    }
    watches = [_Watch([*access, "get", "--raw", path], note) for path, note in paths.items()]
    try:
        yield seen
    finally:
        for watch in watches:
            watch.end()


class _Watch:
    """A watch that starts again when the API server ends it, as it does for slow readers."""

    def __init__(self, command: list[Any], note: Callable[[dict[str, Any]], None]) -> None:
        self.command, self.note, self.ended = command, note, False
        self.lock = threading.Lock()
        self.process = self._start()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)

    def _read(self) -> None:
        while not self.ended:
            assert self.process.stdout is not None  # noqa: S101 - for the type checker
            for line in self.process.stdout:
                if (event := json.loads(line))["type"] in ("ADDED", "MODIFIED"):
                    self.note(event["object"])
            self.process.wait()
            with self.lock:
                if not self.ended:
                    self.process = self._start()

    def end(self) -> None:
        with self.lock:
            self.ended = True
            self.process.kill()
        self.thread.join()
