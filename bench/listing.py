"""10,000, 100,000 and 1,000,000 objects of S3 in a list: manycpu's beside that of s3fs.

A real S3 server, versitygw, lists empty files in memory, each with an ETag. Each list is made by a process of
its own. Its seconds are those of its processor time, since the server has the same cores. Memory is the most
that the process held beyond what it had before.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench._measure import rounds

COUNTS = ((10_000, 1000), (100_000, 2000), (1_000_000, 4000))
IN_FOLDER = 1000
IN_MEMORY = "/dev/shm"  # noqa: S108 - on many a disk, a million files take minutes to delete
ETAG = "user.etag"  # where versitygw keeps it
SIDES = ("manycpu", "s3fs")
WORDS = {
    "title": "Lists of many objects",
    "meaning": "A list of a million objects takes little memory: helper pods stage it within theirs. The "
    "time is that of the S3 client, which reads the same pages for both.",
    "figures": {
        r"(.+): manycpu: memory": (r"\1 objects: memory of manycpu's list", "MiB", ""),
        r"(.+): manycpu: seconds": (r"\1 objects: processor time of manycpu's list", "s", ""),
        r"(.+): s3fs: memory": (r"\1 objects: memory of s3fs's list", "MiB", ""),
        r"(.+): s3fs: seconds": (r"\1 objects: processor time of s3fs's list", "s", ""),
        r"(.+): memory": (r"\1 objects: memory of manycpu / memory of s3fs", "x", ""),
        r"(.+): seconds": (r"\1 objects: time of manycpu / time of s3fs", "x", ""),
    },
}


def main() -> dict[str, Any]:
    """Measure each number of objects, from the least."""
    from support import s3_server

    figures: dict[str, Any] = {}
    with TemporaryDirectory(dir=IN_MEMORY) as folder, s3_server.running(Path(folder, "server")) as server:
        written = 0
        for count in [rounds(full, quick) for full, quick in COUNTS]:
            _write(server.folder / "bucket" / "set", range(written, count))
            written = count
            sides = {side: _measured(side, count, server.variables) for side in SIDES}
            ours, theirs = sides.values()
            of_both = {name: round(ours[name] / theirs[name], 3) for name in ours}
            figures[f"{count:,}"] = {**sides, **of_both}
    return figures


def _write(folder: Path, numbers: range) -> None:
    for number in numbers:
        below = folder / f"{number // IN_FOLDER:04}"
        if number % IN_FOLDER == 0:
            below.mkdir(parents=True)
        path = f"{below}/{number:07}.bin"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        os.setxattr(path, ETAG, f"{number:032x}".encode())


def _measured(side: str, count: int, variables: dict[str, str]) -> dict[str, float]:
    """List all objects in a process of its own."""
    command = [sys.executable, "-m", "bench.listing", side]
    root = Path(__file__).parents[1]
    found = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | variables, cwd=root
    )
    figures: dict[str, float] = json.loads(found.stdout)
    assert figures.pop("objects") == count  # noqa: S101 - or it is no race
    return figures


def _list(side: str) -> dict[str, float]:
    """Be that process."""
    from manycpu.pipeline.adapters.storage import Location

    location = Location.of("s3://bucket/set", "run.data")
    location.exists()  # imports what is imported later
    before, began = _most_memory(), time.process_time()
    objects = location.items() if side == "manycpu" else location.fs.find(location.root, detail=True)
    seconds, memory = time.process_time() - began, _most_memory() - before
    return {"objects": len(objects), "memory": round(memory, 1), "seconds": round(seconds, 2)}


def _most_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    print(json.dumps(_list(sys.argv[1])))
