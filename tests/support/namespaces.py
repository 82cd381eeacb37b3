"""Isolated environments on this machine: a changed clock, another container or host name, a small disk."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from support.killable_programs import Program

CONTAINER: Final = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Prefix of a command that sees only its own processes, as in another container of this host."""
HOST: Final = ["unshare", "--uts", "sh", "-ec", 'hostname elsewhere; exec "$@"', "sh"]
"""Prefix of a command that runs under another host name."""
_DISK: Final = 'mount -t tmpfs -o "size=$1" tmpfs "$2"; echo; exec sleep infinity'
_CLOCK: Final = 'mount --bind "$1" /proc/stat; shift; exec "$@"'


def missing() -> str | None:
    """Return why this machine cannot isolate commands, or None if it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("unshare"):
        return "namespaces need Linux, root and unshare"
    probe = subprocess.run([*CONTAINER, *HOST, "unshare", "--mount", "true"], check=False)
    return None if probe.returncode == 0 else "this kernel or container allows no namespaces"


def with_clock(stat: Path) -> list[str]:
    """Return the prefix of a command whose /proc/stat is the file ``stat``; :func:`step_clock` changes it."""
    stat.write_bytes(Path("/proc/stat").read_bytes())
    return ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _CLOCK, "sh", str(stat)]


def step_clock(stat: Path, seconds: int) -> None:
    """Move the boot time in ``stat`` by this many seconds, as the kernel does if the clock is set."""
    lines = stat.read_text().splitlines()
    moved = [
        f"btime {int(line.split()[1]) + seconds}" if line.startswith("btime") else line for line in lines
    ]
    with stat.open("r+") as file:  # overwrite it in place: the file is mounted
        file.write("\n".join(moved) + "\n")


class SmallDisk:
    """A small disk. Only commands with the prefix :attr:`inside` see it under its path."""

    def __init__(self, holder: int, folder: Path) -> None:
        self.inside = ["nsenter", f"--target={holder}", "--mount", "--wd=/"]
        """Prefix of a command that sees the disk."""
        self.seen = Path(f"/proc/{holder}/root{folder}")
        """Its path for all other processes."""
        self._filler = self.seen / "filler"

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        with suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def free(self) -> None:
        """Free the space that :meth:`fill` used."""
        self._filler.unlink()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[SmallDisk]:
    """Mount a disk in memory, of a size such as ``10m``, at a new folder while the block runs."""
    folder.mkdir()
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", _DISK, "sh", size, str(folder)]
    with Program(words, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "\n"
        yield SmallDisk(holder.pid, folder)
