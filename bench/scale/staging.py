"""1,000,000 files of 1 KiB to a volume, and files of 1 GiB: staging beside `tar | kubectl exec ... tar x`.

Both use the same pod, volume and API server. Ours hashes the source, verifies what arrives and has it on disk
before it says so; tar does none of it. The volume is a file system of the benchmark's own, on a node of the
test cluster.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from bench.scale._child import child, progress

FILES, SMALL, IN_FOLDER = 1_000_000, 1 << 10, 1000
GIB, LARGE, ROOM = 1 << 30, (10, 4), 50  # files of 1 GiB: so many where the disk has so much room, in GiB
VOLUME, INODES = 40, 2_600_000  # GiB, of which the disk gives what is written
IN_MEMORY = "/dev/shm"  # noqa: S108 - on many a disk, a million files take minutes to delete
NODE = "node-a"
MOUNT = "/tmp/pvc-mount"  # noqa: S108 - in the pod
SECONDS = 1200.0  # for one staging
WORDS = {
    "title": "1,000,000 files, and 100 GB, to a volume",
    "meaning": "Large files go straight to the pod, in a third of the time of tar through `kubectl exec`; "
    "many small ones take half as long again as with tar. Each byte is verified, in bounded memory.",
    "figures": {
        "files": ("Files of 1 KiB", "", ""),
        r"(files|large): manycpu": (r"\1: staging takes", "s", ""),
        r"(files|large): tar": (r"\1: tar through `kubectl exec` takes", "s", ""),
        r"(files|large): ratio": (
            r"\1: manycpu takes so many times as long",
            "x",
            r"at most [limit: \1: ratio]",
        ),
        "files: again": ("files: staging them again, which finds them there, takes", "s", ""),
        r"(files|large): worker": (r"\1: memory of the worker", "MiB", r"at most [limit: \1: worker]"),
        r"(files|large): pod": (r"\1: memory of the pod's program", "MiB", r"at most [limit: \1: pod]"),
        "large": ("Files of 1 GiB", "", ""),
        "large: 100 GB": ("100 GB would take so long, as those did", "minutes", ""),
    },
}
LIMITS = {
    "files: ratio": 2.0,  # of small files tar, in C, is at its best: it neither hashes nor syncs
    "files: worker": 1024.0,
    "files: pod": 1024.0,
    "large: ratio": 1.5,
    "large: worker": 300.0,
    "large: pod": 300.0,
}


def main() -> dict[str, Any]:
    """Measure."""
    from bench._cluster import namespace

    with (
        namespace("scale-staging") as (cluster, space),
        TemporaryDirectory() as folder,
        _volume(cluster, space.name) as storage,
    ):
        return _measure(cluster, space, storage, Path(folder))


def _measure(cluster: Any, space: Any, storage: str, folder: Path) -> dict[str, Any]:
    from bench._cluster import target
    from manycpu.pipeline.targets.kubernetes.volume import claims, helper_pod

    size = f"{VOLUME}Gi"
    config = {
        "target": target(space, storage_class=storage, claim_size=size),
        "name": space.name,
        "folder": str(folder),
    }
    ctx = _context(config)
    ctx.ledger.open(ctx.new_entry(time.time()))
    room = shutil.disk_usage(folder).free >> 30
    large = LARGE[0] if room > ROOM else LARGE[1]
    figures: dict[str, Any] = {"unit": "s, MiB and minutes", "files": FILES}
    with helper_pod.helper(ctx, "stage", claims.ensure_claim(ctx), lambda *_: None) as pod:
        pod.wait_ready()
        tar = _Tar(cluster, space, pod.name)
        sides = _Sides(cluster, config, tar, folder)
        with TemporaryDirectory(dir=IN_MEMORY) as memory:
            figures |= sides.compare("files", _many_files, Path(memory))
        figures["large"] = large
        figures |= sides.compare("large", lambda source: _large_files(source, large), folder)
    figures["large: 100 GB"] = round(figures["large: manycpu"] / large * 1e11 / GIB / 60, 1)
    return {**figures, "limit": LIMITS}


class _Tar:
    """The other side: tar, through kubectl."""

    def __init__(self, cluster: Any, space: Any, pod: str) -> None:
        program = cluster.modules["kubernetes"].program("kubectl")
        self._kubectl = [program, "--kubeconfig", space.kubeconfig, "exec", "--stdin", pod, "--"]

    def stage(self, source: Path) -> None:
        self.run("mkdir", f"{MOUNT}/{source.name}")
        packing = subprocess.Popen(["tar", "-C", source, "-cf", "-", "."], stdout=subprocess.PIPE)
        self.run("tar", "-C", f"{MOUNT}/{source.name}", "-xf", "-", stdin=packing.stdout)
        if packing.wait() != 0:
            raise RuntimeError("tar failed")

    def run(self, *command: str, stdin: Any = subprocess.DEVNULL) -> None:
        subprocess.run([*self._kubectl, *command], check=True, stdin=stdin)


class _Sides:
    def __init__(self, cluster: Any, config: dict[str, Any], tar: _Tar, folder: Path) -> None:
        self._cluster, self._config, self._tar, self._folder = cluster, config, tar, folder

    def compare(self, name: str, make: Callable[[Path], None], folder: Path) -> dict[str, Any]:
        """Stage what `make` writes, with both; what is written is deleted."""
        source = folder / name
        progress(f"{name}: writing them")
        make(source)
        progress(f"{name}: tar")
        theirs = self._seconds(lambda: self._tar.stage(source))
        progress(f"{name}: {theirs:.0f} s; manycpu")
        with _largest_of_pod(self._cluster) as largest:
            ours = self._stage(source)
        figures = {
            f"{name}: manycpu": round(ours["seconds"], 1),
            f"{name}: tar": round(theirs, 1),
            f"{name}: ratio": round(ours["seconds"] / theirs, 2),
            f"{name}: worker": round(ours["memory"]),
            f"{name}: pod": round(max(largest)),
        }
        progress(f"{name}: {ours['seconds']:.0f} s")
        if name == "files":
            figures[f"{name}: again"] = round(self._stage(source)["seconds"], 1)
        shutil.rmtree(source)
        return figures

    def _stage(self, source: Path) -> dict[str, Any]:
        os.sync()
        self._tar.run("sync")
        config = self._config | {"source": str(source)}
        with child("bench.scale.staging", self._folder, config, SECONDS) as one:
            return one.hear("staged")

    def _seconds(self, work: Callable[[], None]) -> float:
        os.sync()
        self._tar.run("sync")
        began = time.monotonic()
        work()
        return time.monotonic() - began


def _context(config: dict[str, Any]) -> Any:
    from manycpu.pipeline.targets.open_run import open_context

    run = {"program": "x", "output": "out"}
    return open_context(run, config["target"], config["name"], base=Path(config["folder"]))


@contextmanager
def _largest_of_pod(cluster: Any) -> Iterator[list[float]]:
    """Note the memory of the helper pod's program, in MiB, again and again."""
    largest, over = [0.0], threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            largest[0] = max(largest[0], _of_pod(cluster) / 2**20)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield largest
    finally:
        over.set()
        thread.join()


def _of_pod(cluster: Any) -> float:
    from cluster import namespace

    return max((_memory(one) for one in namespace.processes(cluster.namespace)), default=0.0)


def _memory(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        if "manycpu.pipeline.pod" in process.cmdline() and "idle" not in process.cmdline():
            return float(process.memory_info().rss)
    return 0.0


@contextmanager
def _volume(cluster: Any, name: str) -> Iterator[str]:
    """Have a file system on a node, as a volume; the name of its storage class."""
    from cluster.settings import INNER, VOLUMES

    image, folder, inside = INNER / f"{name}.ext4", VOLUMES / name, cluster.namespace
    make = f'truncate -s {VOLUME}G "$0" && mkfs.ext4 -q -m 0 -N {INODES} "$0" && mkdir "$1" && '
    make += 'mount -o loop "$0" "$1" && chmod 777 "$1"'
    try:
        inside.run("sh", "-c", make, image, folder, node=NODE, seconds=120)
        cluster.kubectl("create", "--filename", "-", stdin=json.dumps(_persistent_volume(name, folder)))
        yield name
    finally:
        cluster.kubectl("delete", "persistentvolume", name, "--ignore-not-found", "--wait=false")
        remove = 'umount --lazy "$1"; rm -rf "$1" "$0"'
        inside.run("sh", "-c", remove, image, folder, node=NODE, seconds=120)


def _persistent_volume(name: str, folder: Path) -> dict[str, Any]:
    on_node = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "storageClassName": name,
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "capacity": {"storage": f"{VOLUME}Gi"},
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(folder)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [on_node]}]}},
        },
    }


def _many_files(source: Path) -> None:
    content = bytearray(os.urandom(SMALL))
    for number in range(FILES):
        folder = source / f"{number // IN_FOLDER:04}"
        if number % IN_FOLDER == 0:
            folder.mkdir(parents=True)
        content[:8] = number.to_bytes(8, "big")
        with open(f"{folder}/{number:07}.bin", "wb", buffering=0) as file:  # noqa: PTH123 - a million of them
            file.write(content)


def _large_files(source: Path, count: int) -> None:
    source.mkdir()
    block = bytearray(os.urandom(1 << 20))
    for number in range(count):
        with (source / f"{number:02}.bin").open("wb") as file:
            for part in range(GIB >> 20):
                block[:8] = (number << 32 | part).to_bytes(8, "big")
                file.write(block)


def _stage(config: dict[str, Any]) -> None:
    """Be the worker."""
    from manycpu.pipeline.adapters.storage import Location
    from manycpu.pipeline.pod import client
    from manycpu.pipeline.targets.kubernetes.volume import claims, helper_pod

    ctx = _context(config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pod = helper_pod.Helper(ctx, "stage", claims.ensure_claim(ctx), lambda *_: None)  # the one that is there
    location = Location.of(config["source"], "run.data")
    began = time.monotonic()
    pod.run("receive", lambda channel: client.push(channel, location, f"{MOUNT}/ours"))
    seconds = time.monotonic() - began
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"event": "staged", "seconds": seconds, "memory": (most - before) / 2**10}), flush=True)


if __name__ == "__main__":
    _stage(json.loads(Path(sys.argv[1]).read_text()))
