"""A benchmark's second process: its messages and its orders."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

Said = dict[str, Any]


class Child:
    """A program of :mod:`bench.scale._triggerer` that runs."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = process.pid

    def tell(self, word: str) -> None:
        """Say what to do next."""
        assert self._process.stdin is not None  # noqa: S101 - for the type checker
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def hear(self, event: str) -> Said:
        """Wait until something has happened.

        Raises:
            RuntimeError: The program ended before.
        """
        while said := self._next():
            if said["event"] == event:
                return said
        raise RuntimeError(f"the process that was to say {event!r} has ended")

    def hear_ends(self, count: int) -> dict[str, Said]:
        """Wait for the ends of so many jobs: by the job's name."""
        ends = [self.hear("end") for _ in range(count)]
        return {said["name"]: said for said in ends}

    def _next(self) -> Said | None:
        assert self._process.stdout is not None  # noqa: S101 - for the type checker
        line = self._process.stdout.readline()
        while line and not line.startswith('{"event"'):  # a line of a rank: a task's log
            line = self._process.stdout.readline()
        return json.loads(line) if line else None


@contextmanager
def child(module: str, folder: Path, config: Said, seconds: float) -> Iterator[Child]:
    """Run a module as a program of its own, for so many seconds at most."""
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    command = ["timeout", str(seconds), sys.executable, "-m", module, str(file)]
    root = Path(__file__).parents[2]
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=root
        )
    try:
        yield Child(process)
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{(folder / 'stderr').read_text()[-3000:]}") from None
    finally:
        _end(process)


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        for one in psutil.Process(process.pid).children(recursive=True):
            one.kill()
        process.kill()
    process.communicate()


def progress(text: str) -> None:
    """Show what is done now."""
    print(f"  {time.strftime('%H:%M:%S')} {text}", flush=True)
