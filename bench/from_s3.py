"""10 files of 1 GiB, and 10,000 of 100 KiB, from S3 to a disk: beside s5cmd and the AWS CLI, by turns.

A real S3 server, versitygw, has them on the same disk and shares the cores. All ends when the files are on
disk: ours syncs them itself, those of the others are synced afterwards. Ours also reads back and hashes what
it has written. A ratio is the rate of manycpu by the rate of the other. What is not on PATH is left out.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench._measure import SkippedError, by_turns, ratio, rounds, spread

SETS = {"large": ((10, 2), (1 << 30, 1 << 26)), "small": ((10_000, 500), (100 << 10, 100 << 10))}
"""Name -> how many files, and their size: in full, and when quick."""
TARGET = 0.8
OTHERS = {
    "s5cmd": ("cp", "s3://bucket/{name}/*", "{to}/"),
    "aws": ("s3", "cp", "--quiet", "--recursive", "s3://bucket/{name}", "{to}"),
}
WORDS = {
    "title": "Data from S3",
    "meaning": "manycpu takes about as long as the AWS CLI. s5cmd, a program in Go, takes half of it for "
    "large files and a third for small ones: it neither reads back nor hashes, and two cores do all, the "
    "server's work too.",
    "figures": {
        "large": ("Size of the large files", "GiB", ""),
        "small": ("Size of the small files", "GiB", ""),
        r"(large|small): manycpu": (r"\1 files: manycpu", "s", ""),
        r"(large|small): (s5cmd|aws)": (r"\1 files: \2", "s", ""),
        r"(large|small): rate by (s5cmd|aws)": (
            r"\1 files: rate of manycpu / rate of \2",
            "x",
            "at least [target]",
        ),
    },
}


def main() -> dict[str, Any]:
    """Measure each set of files."""
    from support import s3_server

    others = [name for name in OTHERS if shutil.which(name)]
    if not others:
        raise SkippedError("neither s5cmd nor aws is on PATH")
    figures: dict[str, Any] = {"target": TARGET}
    with TemporaryDirectory() as folder, s3_server.running(Path(folder, "server")) as server:
        for name, (counts, sizes) in SETS.items():
            count, size = rounds(*counts), rounds(*sizes)
            source = server.folder / "bucket" / name
            _write(source, count, size)
            sides = {
                side: _timed(side, name, Path(folder, "copy"), server.variables)
                for side in ("manycpu", *others)
            }
            times = by_turns(sides, rounds(3, 1)).times
            figures[name] = round(count * size / 2**30, 2)
            figures |= {f"{name}: {side}": spread(seconds) for side, seconds in times.items()}
            figures |= {f"{name}: rate by {side}": ratio(times[side], times["manycpu"]) for side in others}
            shutil.rmtree(source)
    return figures


def _write(folder: Path, count: int, size: int) -> None:
    folder.mkdir(parents=True)
    block = bytearray(os.urandom(min(size, 1 << 20)))
    for number in range(count):
        with (folder / f"{number:05}.bin").open("wb") as file:
            for part in range(0, size, len(block)):
                block[:16] = number.to_bytes(8) + part.to_bytes(8)
                file.write(block)


def _timed(side: str, name: str, to: Path, variables: dict[str, str]) -> Any:
    """Return a function that copies a set with one side, in a process of its own; it returns the seconds."""
    words = [sys.executable, "-m", "bench.from_s3", name, str(to)]
    if side in OTHERS:
        words = [side, *(word.format(name=name, to=to) for word in OTHERS[side])]
    env = (
        os.environ | variables | {"S3_ENDPOINT_URL": variables["AWS_ENDPOINT_URL"], "AWS_REGION": "us-east-1"}
    )

    def copy() -> float:
        os.sync()  # what another has written is not this side's to wait for
        to.mkdir()
        began = time.monotonic()
        subprocess.run(words, check=True, env=env, cwd=Path(__file__).parents[1], stdout=subprocess.DEVNULL)
        if side in OTHERS:
            subprocess.run(["sync", "--file-system", to], check=True)  # as ours does
        seconds = time.monotonic() - began
        shutil.rmtree(to)
        return seconds

    return copy


def _fetch(name: str, to: str) -> None:
    """Be the process of manycpu's side."""
    from manycpu.pipeline import transfer
    from manycpu.pipeline.adapters.storage import Location

    transfer.fetch(Location.of(f"s3://bucket/{name}", "run.data"), Path(to, "copy"))


if __name__ == "__main__":
    _fetch(*sys.argv[1:])
