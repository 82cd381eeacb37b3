"""Staging and exporting beside `kubectl cp`, by turns: 1 GB in one file, and 10,000 files of 4 KB.

Both use the same pod, volume and API server. Ours hashes the source, verifies what arrives and has it on disk
before it says so; kubectl does none of it. A ratio is ours by theirs: below 1, ours is faster.
"""

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster.cluster import Cluster
from cluster.space import Space

from bench._cluster import namespace, target
from bench._measure import rounds
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.pod import client
from manycpu.pipeline.targets.context import ClusterContext
from manycpu.pipeline.targets.kubernetes.volume import claims, helper_pod
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.transfer import MANIFEST

ROUNDS = (6, 2)
MOUNT = "/tmp/pvc-mount"  # noqa: S108 - in the pod
LARGE, MANY, SMALL = (1 << 30, 1 << 27), (10_000, 1000), 4096
Figures = dict[str, Any]
WORDS = {
    "title": "Data to a volume, and models from it",
    "meaning": "Staging and exporting take no longer than `kubectl cp`, and have verified each byte when "
    "they end.",
    "figures": {
        "pod_seconds": ("A helper pod starts within", "s", ""),
        r"one_file_(stage|export)_seconds": (r"\1 one file of 1 GB: manycpu", "s", ""),
        r"one_file_(stage|export)_kubectl_seconds": (r"\1 one file of 1 GB: kubectl cp", "s", ""),
        r"one_file_(stage|export)_ratio": (
            r"\1 one file of 1 GB: manycpu takes so many times as long",
            "x",
            "",
        ),
        r"many_files_(stage|export)_seconds": (r"\1 10,000 files of 4 KB: manycpu", "s", ""),
        r"many_files_(stage|export)_kubectl_seconds": (r"\1 10,000 files of 4 KB: kubectl cp", "s", ""),
        r"many_files_(stage|export)_ratio": (
            r"\1 10,000 files of 4 KB: manycpu takes so many times as long",
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
        sides = _Ours(ctx, pod, folder), _Kubectl(cluster, space, pod.name, folder)
        for name, make in (("one_file", _one_file), ("many_files", _many_files)):
            make(source := folder / name)
            figures |= {f"{name}_{key}": value for key, value in _compare(sides, source, space, pod).items()}
            shutil.rmtree(source)
    return figures


def _context(space: Space, folder: Path) -> ClusterContext:
    run = {"program": "x", "output": "out"}
    ctx = open_context(run, target(space, claim_size="6Gi"), space.name, base=folder)
    assert isinstance(ctx, ClusterContext)  # noqa: S101 - for the type checker
    ctx.ledger.open(ctx.new_entry(time.time()))
    return ctx


class _Ours:
    def __init__(self, ctx: ClusterContext, pod: helper_pod.Helper, folder: Path) -> None:
        self._ctx, self._pod, self._folder = ctx, pod, folder
        self._staged = ""

    def stage(self, source: Path) -> None:
        location = Location.of(str(source), "run.data")
        done = self._pod.run("receive", lambda channel: client.push(channel, location, f"{MOUNT}/ours"))
        self._staged = done["path"]

    def export(self) -> Path:
        out = self._folder / "out"
        self._pod.run("send", lambda channel: client.pull(channel, self._staged, out, "key", lambda *_: None))
        return out


class _Kubectl:
    def __init__(self, cluster: Cluster, space: Space, pod: str, folder: Path) -> None:
        program = cluster.modules["kubernetes"].program("kubectl")
        self._command = [program, "--kubeconfig", space.kubeconfig, "cp", "--retries=0"]
        self._pod, self._folder = f"{space.name}/{pod}", folder

    def stage(self, source: Path) -> None:
        subprocess.run([*self._command, source, f"{self._pod}:{MOUNT}/theirs"], check=True)

    def export(self) -> Path:
        out = self._folder / "out"
        command = [*self._command, f"{self._pod}:{MOUNT}/theirs", out]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return out


def _compare(
    sides: tuple[_Ours, _Kubectl], source: Path, space: Space, pod: helper_pod.Helper
) -> dict[str, float]:
    works: dict[str, list[Callable[[], Any]]] = {
        "stage": [lambda side=side: side.stage(source) for side in sides],
        "export": [_exporting(side, source) for side in sides],
    }
    times: dict[str, list[tuple[float, float]]] = {step: [] for step in works}
    for number in range(rounds(*ROUNDS)):
        for step, both in works.items():
            times[step].append(_turn(space, pod, both, first=number % 2))
        space.run(pod.name, "sh", "-c", f"rm -rf {MOUNT}/*")
    figures = {}
    for step, pairs in times.items():
        figures[f"{step}_seconds"] = round(statistics.median(ours for ours, _ in pairs), 2)
        figures[f"{step}_kubectl_seconds"] = round(statistics.median(theirs for _, theirs in pairs), 2)
        figures[f"{step}_ratio"] = round(statistics.median(ours / theirs for ours, theirs in pairs), 3)
    return figures


def _turn(
    space: Space, pod: helper_pod.Helper, works: Sequence[Callable[[], Any]], first: int
) -> tuple[float, float]:
    # Each is the first in half of the rounds: the second finds the caches full.
    seconds = {side: _seconds(space, pod, works[side]) for side in (first, 1 - first)}
    return seconds[0], seconds[1]


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
