"""Staging and exporting beside `kubectl cp`, by turns: 1 GB in one file, and 10,000 files of 4 KB.

All use the same pod, volume and API server; ours goes straight to the pod over TLS, and also through the
API server's exec, the way that is left where it cannot. Ours hashes the source, verifies what arrives and has
it on disk before it says so; kubectl does none of it, nor does the bare stream of TLS, which reads and writes
no file. A ratio is ours by theirs: below 1, ours is faster.
"""

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster.cluster import Cluster
from cluster.space import Space

from bench._cluster import namespace, target
from bench._measure import rounds
from manycpu.pipeline.adapters import cluster_exec
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.pod import client, direct
from manycpu.pipeline.pod.direct import make_identity
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.volume import claims, helper_pod
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.transfer import MANIFEST

ROUNDS = (3, 1)
END = b"the end"
# Runs in the pod: takes all that comes, and says so.
SINK = f"""
import os
from manycpu.pipeline.pod import direct
streams = direct.accept(open(0, "rb"), open(os.dup(1), "wb"))
buffer, last = memoryview(bytearray(1 << 18)), b""
while not last.endswith({END!r}):
    count = streams._reading.recv_into(buffer)
    last = bytes(buffer[max(0, count - {len(END)}):count])
streams.writelines(({END!r},))
"""
MOUNT = "/tmp/pvc-mount"  # noqa: S108 - in the pod
LARGE, MANY, SMALL = (1 << 30, 1 << 27), (10_000, 1000), 4096
Figures = dict[str, Any]
WORDS = {
    "title": "Data to a volume, and models from it",
    "meaning": "Directly to the pod, staging and exporting are faster than `kubectl cp`; through the API "
    "server they take no longer than it. Each byte is verified when they end. What staging takes beyond a "
    "bare stream of TLS is hashing at both ends, writing and reading back, on cores that both ends share.",
    "figures": {
        "pod_seconds": ("A helper pod starts within", "s", ""),
        r"one_file_(stage|export)_seconds": (r"\1 one file of 1 GB: manycpu", "s", ""),
        r"one_file_(stage|export)_kubectl_seconds": (r"\1 one file of 1 GB: kubectl cp", "s", ""),
        r"one_file_(stage|export)_ratio": (
            r"\1 one file of 1 GB: time of manycpu / time of kubectl cp",
            "x",
            "",
        ),
        r"one_file_(stage|export)_exec_seconds": (
            r"\1 one file of 1 GB: manycpu through the API server",
            "s",
            "",
        ),
        r"one_file_(stage|export)_exec_ratio": (
            r"\1 one file of 1 GB: time directly / time through the API server",
            "x",
            "",
        ),
        "one_file_bare_seconds": ("1 GB of zeros in one stream of TLS, not hashed and not written", "s", ""),
        "one_file_bare_ratio": ("Stage one file of 1 GB: takes so many times as long as that", "x", ""),
        r"many_files_(stage|export)_seconds": (r"\1 10,000 files of 4 KB: manycpu", "s", ""),
        r"many_files_(stage|export)_kubectl_seconds": (r"\1 10,000 files of 4 KB: kubectl cp", "s", ""),
        r"many_files_(stage|export)_ratio": (
            r"\1 10,000 files of 4 KB: time of manycpu / time of kubectl cp",
            "x",
            "",
        ),
        r"many_files_(stage|export)_exec_seconds": (
            r"\1 10,000 files of 4 KB: manycpu through the API server",
            "s",
            "",
        ),
        r"many_files_(stage|export)_exec_ratio": (
            r"\1 10,000 files of 4 KB: time directly / time through the API server",
            "x",
            "",
        ),
    },
}


def main() -> Figures:
    """Measure; each ratio is the median of pairs that ran one after the other."""
    with namespace("bench-transfer") as (cluster, space), TemporaryDirectory() as folder:
        return _measure(cluster, space, Path(folder))


def _measure(cluster: Cluster, space: Space, folder: Path) -> Figures:
    ctx = _context(space, folder)
    began = time.monotonic()
    with helper_pod.helper(ctx, "stage", claims.ensure_claim(ctx), lambda *_: None) as pod:
        pod.wait_ready()
        figures: Figures = {"pod_seconds": round(time.monotonic() - began, 1)}
        sides = {
            "ours": _Ours(ctx, pod, folder, direct=True),
            "exec": _Ours(ctx, pod, folder, direct=False),
            "kubectl": _Kubectl(cluster, space, pod.name, folder),
        }
        for name, make in (("one_file", _one_file), ("many_files", _many_files)):
            make(source := folder / name)
            figures |= {f"{name}_{key}": value for key, value in _compare(sides, source, space, pod).items()}
            shutil.rmtree(source)
        figures["one_file_bare_seconds"] = round(statistics.median(_bare(ctx, pod) for _ in range(3)), 2)
        ratio = figures["one_file_stage_seconds"] / figures["one_file_bare_seconds"]
        figures["one_file_bare_ratio"] = round(ratio, 2)
    return figures


def _context(space: Space, folder: Path) -> ClusterContext:
    run = {"program": "x", "output": "out"}
    ctx = open_context(run, target(space, claim_size="6Gi"), space.name, base=folder)
    assert is_on_kubernetes(ctx)  # noqa: S101 - for the type checker
    ctx.ledger.open(ctx.new_entry(time.time()))
    return ctx


class _Ours:
    def __init__(self, ctx: ClusterContext, pod: helper_pod.Helper, folder: Path, *, direct: bool) -> None:
        self._ctx, self._pod, self._folder, self._direct = ctx, pod, folder, direct
        self._staged = ""

    def stage(self, source: Path) -> None:
        self._choose()
        location = Location.of(str(source), "run.data")
        done = self._pod.run("receive", lambda channel: client.push(channel, location, self._folder_there))
        self._staged = done["path"]

    def export(self) -> Path:
        self._choose()
        out = self._folder / "out"
        self._pod.run("send", lambda channel: client.pull(channel, self._staged, out, "key", lambda *_: None))
        return out

    @property
    def _folder_there(self) -> str:
        return f"{MOUNT}/{'direct' if self._direct else 'exec'}"

    def _choose(self) -> None:
        self._pod._way._direct = self._direct  # noqa: SLF001 - which a target says once


class _Kubectl:
    def __init__(self, cluster: Cluster, space: Space, pod: str, folder: Path) -> None:
        program = cluster.modules["kubernetes"].program("kubectl")
        self._command = [
            program,
            "--kubeconfig",
            space.kubeconfig,
            "cp",
            "--retries=3",
        ]  # its streams end early now and then
        self._pod, self._folder = f"{space.name}/{pod}", folder

    def stage(self, source: Path) -> None:
        subprocess.run([*self._command, source, f"{self._pod}:{MOUNT}/theirs"], check=True)

    def export(self) -> Path:
        out = self._folder / "out"
        command = [*self._command, f"{self._pod}:{MOUNT}/theirs", out]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return out


def _compare(
    sides: Mapping[str, "_Ours | _Kubectl"], source: Path, space: Space, pod: helper_pod.Helper
) -> dict[str, float]:
    works: dict[str, dict[str, Callable[[], Any]]] = {
        "stage": {name: partial(side.stage, source) for name, side in sides.items()},
        "export": {name: _exporting(side, source) for name, side in sides.items()},
    }
    turns: dict[str, list[dict[str, float]]] = {step: [] for step in works}
    for number in range(rounds(*ROUNDS)):
        for step, all_sides in works.items():
            turns[step].append(_turn(space, pod, all_sides, first=number % len(sides)))
        space.run(pod.name, "sh", "-c", f"rm -rf {MOUNT}/*")
    figures = {}
    for step, seconds in turns.items():
        figures[f"{step}_seconds"] = round(statistics.median(turn["ours"] for turn in seconds), 2)
        for name in ("exec", "kubectl"):
            ratios = [turn["ours"] / turn[name] for turn in seconds]
            figures[f"{step}_{name}_seconds"] = round(statistics.median(turn[name] for turn in seconds), 2)
            figures[f"{step}_{name}_ratio" if name == "exec" else f"{step}_ratio"] = round(
                statistics.median(ratios), 3
            )
    return figures


def _turn(
    space: Space, pod: helper_pod.Helper, works: Mapping[str, Callable[[], Any]], first: int
) -> dict[str, float]:
    # Each is the first in some of the rounds: those that follow find the caches full.
    names = [*works]
    return {name: _seconds(space, pod, works[name]) for name in [*names[first:], *names[:first]]}


def _bare(ctx: ClusterContext, pod: helper_pod.Helper) -> float:
    """Time one stream of TLS to the pod, as the product opens it, of which nothing is made."""
    running = cluster_exec.start(cluster_of(ctx), pod.name, helper_pod.CONTAINER, ["python3", "-c", SINK])
    identity = make_identity("bench")
    port = direct.offer(running, identity)
    address = (cluster_of(ctx).get("Pod", pod.name) or {})["status"]["podIP"]
    streams = direct.connect(address, port, identity)
    direct.choose(running, straight=True)
    block, began = bytes(1 << 18), time.monotonic()
    for _ in range(rounds(*LARGE) // len(block)):
        streams.writelines((block,))
    streams.writelines((END,))
    assert bytes(streams.read(len(END))) == END  # noqa: S101 - or it is no race
    seconds = time.monotonic() - began
    for each in (streams, running):
        each.close()
        each.release()
    return seconds


def _seconds(space: Space, pod: helper_pod.Helper, work: Callable[[], Any]) -> float:
    # What another has written and not synced is not ours to wait for.
    os.sync()
    space.run(pod.name, "sync")
    began = time.monotonic()
    copy = work()
    seconds = time.monotonic() - began
    if copy is not None:
        shutil.rmtree(copy)
    return seconds


def _exporting(side: _Ours | _Kubectl, source: Path) -> Callable[[], Path]:
    def work() -> Path:
        out = side.export()
        count = sum(1 for path in out.rglob("*") if path.is_file() and path.name != MANIFEST)
        assert count == sum(1 for path in source.rglob("*") if path.is_file())  # noqa: S101 - or it is no race
        return out

    return work


def _one_file(folder: Path) -> None:
    folder.mkdir()
    with (folder / "weights.bin").open("wb") as file:
        for _ in range(rounds(*LARGE) >> 20):
            file.write(os.urandom(1 << 20))


def _many_files(folder: Path) -> None:
    for number in range(rounds(*MANY)):
        path = folder / f"{number // 100:03}" / f"{number:05}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(SMALL))
