"""The processors and the memory of a node that this process may use.

Pure but for reading files below ``root``; knows no torch, so that launchers and ``manycpu plan`` use it too.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from manycpu.pipeline.spec import cgroup, hardware

__all__ = ["Cpu", "Machine", "numbers"]


class Cpu(NamedTuple):
    """A logical processor, as Linux numbers them."""

    socket: int
    node: int
    """NUMA node; Linux numbers those of all sockets through."""
    core: int
    """Physical core, by the number of its first logical processor."""
    number: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The part of a node that this process may use."""

    cpus: tuple[Cpu, ...]
    """Logical processors of its affinity, which lies within the cpuset; at least one, in order."""
    quota: float | None = None
    """Processors' worth of time that the tightest cgroup above it grants; None: no limit."""
    guaranteed: bool | None = None
    """In a pod: whether what it requests is its limit; None: no pod, or nobody can tell."""
    memory: int | None = None
    """Bytes: the node's, or the tightest cgroup's limit."""
    shm: int | None = None
    """Bytes of /dev/shm."""
    flags: frozenset[str] = frozenset()
    """What the processor can do, as Linux names it; empty: nobody can tell."""
    libraries: Mapping[str, str] | None = None
    """Name -> path of the libraries worth preloading that are there; None: nobody has looked."""

    @property
    def processors(self) -> float:
        """How many processes can run at a time: the lesser of affinity and quota."""
        return min(float(len(self.cpus)), self.quota or math.inf)

    @property
    def cores(self) -> float:
        """How many threads can compute at a time: hyper-threads share one core's arithmetic."""
        return min(float(len({cpu.core for cpu in self.cpus})), self.quota or math.inf)

    @property
    def sockets(self) -> int:
        """Sockets that its processors lie on."""
        return len({cpu.socket for cpu in self.cpus})

    @property
    def nodes(self) -> int:
        """NUMA nodes that its processors lie on."""
        return len({cpu.node for cpu in self.cpus})

    @property
    def threads_per_core(self) -> int:
        """Hyper-threads that share a core, of those it may use."""
        return max(Counter(cpu.core for cpu in self.cpus).values())

    @classmethod
    def observe(cls, root: Path = Path("/")) -> "Machine":
        """Read the processors and the memory of this machine from files below ``root``."""
        grant = cgroup.observe(root)
        return cls(
            cpus=tuple(sorted(_cpus(root))),
            quota=grant.quota,
            guaranteed=grant.guaranteed,
            memory=min(filter(None, (_memory(root), grant.memory)), default=None),
            shm=_shm(root),
            flags=hardware.flags(root),
            libraries=hardware.libraries(root),
        )


def numbers(text: str) -> tuple[int, ...]:
    """Parse a list of numbers as the kernel writes it: ``0-2,5`` is 0, 1, 2, 5.

    Raises:
        ValueError: It is none.
    """
    values: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        values.extend(range(int(low), int(high or low) + 1))
    return tuple(values)


def _cpus(root: Path) -> Iterator[Cpu]:
    nodes = _nodes(root)
    for number in _affinity(root):
        folder = root / f"sys/devices/system/cpu/cpu{number}/topology"
        siblings = numbers(_first(folder / "thread_siblings_list", str(number)))
        socket = int(_first(folder / "physical_package_id", "0"))
        yield Cpu(socket, nodes.get(number, 0), min(siblings), number)


def _affinity(root: Path) -> tuple[int, ...]:
    for line in cgroup.lines(root / "proc/self/status"):
        if line.startswith("Cpus_allowed_list:"):
            return numbers(line.partition(":")[2])
    return (0,)


def _nodes(root: Path) -> dict[int, int]:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return {
        number: int(folder.name.removeprefix("node"))
        for folder in folders
        for number in numbers(_first(folder / "cpulist", ""))
    }


def _memory(root: Path) -> int | None:
    for line in cgroup.lines(root / "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _shm(root: Path) -> int | None:
    try:
        filesystem = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return filesystem.f_blocks * filesystem.f_frsize


def _first(path: Path, default: str) -> str:
    return next(iter(cgroup.lines(path)), default)
