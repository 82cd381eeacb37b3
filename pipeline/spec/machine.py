"""The processors and the memory of a node that this process may use, and what its processors can do.

Pure but for reading files below ``root``; knows no torch, so that launchers and ``manycpu plan`` use it too.
"""

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

_BF16_FLAGS: Final = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Flags of x86-64 and of ARM, as Linux names them."""
_BF16_FACTORS: Final = {"avx512f": "about 4 times", "avx2": "about 36 times"}
"""Best flag of a processor -> time of bf16 as a multiple of that of fp32.
Measured with torch 2.15.0 on one core: forward and backward through two linear layers (1024 x 768 x 3072),
oneDNN held to that instruction set (ONEDNN_MAX_CPU_ISA). With AMX, bf16 takes a third of the time of fp32.
"""
_LIBRARIES: Final = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
    "jemalloc": ("libjemalloc.so.2",),
    "iomp5": ("libiomp5.so",),
}
"""Library that is worth preloading -> names of its file, the best one first."""
_SYSTEM: Final = (
    "usr/local/lib",
    "usr/lib/{machine}-linux-gnu",
    "lib/{machine}-linux-gnu",
    "usr/lib64",
    "usr/lib",
)
_SHARES_PER_CPU: Final = 1024  # what the kubelet gives for each processor that a container requests


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
    """In a pod: whether its CPU request equals its limit; None: no pod, or unknown."""
    memory: int | None = None
    """Bytes: the node's, or the tightest cgroup's limit."""
    shm: int | None = None
    """Bytes of /dev/shm."""
    flags: frozenset[str] = frozenset()
    """What the processor can do, as Linux names it; empty: unknown."""
    libraries: Mapping[str, str] | None = None
    """Name -> path of the libraries worth preloading that are installed; None: not searched."""
    is_described: bool = False
    """Whether a person described it; else a process has observed it."""

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
    def sockets_apart(self) -> int:
        """Sockets with memory of their own: many virtual machines show each processor as a socket."""
        return min(self.sockets, self.nodes)

    @property
    def threads_per_core(self) -> int:
        """The most hyper-threads of one core that this process may use."""
        return max(Counter(cpu.core for cpu in self.cpus).values())

    @classmethod
    def observe(cls, root: Path = Path("/")) -> "Machine":
        """Read the processors and the memory of this machine from files below ``root``."""
        try:
            file_system = os.statvfs(root / "dev/shm")
            shm = file_system.f_blocks * file_system.f_frsize
        except OSError:
            shm = None
        folders = _cgroups(root)
        quotas = [quota for folder in folders("cpu") if (quota := _quota(folder))]
        memory = [limit for folder in folders("memory") if (limit := _cgroup_memory(folder))]
        if total := _value_behind(root / "proc/meminfo", "MemTotal:"):
            memory.append(int(total.split()[0]) * 1024)
        quota = min(quotas, default=None)
        own_cgroup = next(folders("cpu"), root)  # root: there is none, and no file of a cgroup is there
        return cls(
            cpus=tuple(sorted(_cpus(root))),
            quota=quota,
            guaranteed=_requests_its_limit(root, own_cgroup, quota),
            memory=min(memory, default=None),
            shm=shm,
            flags=processor_flags(root),
            libraries=preload_libraries(root),
        )


def numbers(text: str) -> tuple[int, ...]:
    """Parse a list of numbers as the kernel writes it: ``0-2,5`` is 0, 1, 2, 5.

    Raises:
        ValueError: The text is no such list.
    """
    values: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        values.extend(range(int(low), int(high or low) + 1))
    return tuple(values)


def _read_lines(path: Path) -> list[str]:
    """Read the lines of a file that are not empty; an empty list: it has none, or cannot be read."""
    try:
        # Not splitlines: of the characters that it splits at, the kernel escapes only the line feed in names.
        return [*filter(None, path.read_bytes().decode(errors="replace").split("\n"))]
    except OSError:
        return []


def _value_behind(path: Path, *beginnings: str) -> str:
    """Read what follows the colon in the first line that begins with one of ``beginnings``.

    Empty: there is no such line, or the file cannot be read.
    """
    lines = (line for line in _read_lines(path) if line.startswith(beginnings))
    return next(lines, "").partition(":")[2]


def _cpus(root: Path) -> Iterator[Cpu]:
    """Read the logical processors that this process may use, each with its core, socket and NUMA node."""
    nodes = {  # number of a processor -> its NUMA node
        number: int(folder.name.removeprefix("node"))
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*")
        for number in numbers(",".join(_read_lines(folder / "cpulist")[:1]))
    }
    # Unknown: one processor, number 0.
    allowed = numbers(_value_behind(root / "proc/self/status", "Cpus_allowed_list:") or "0")
    # The mask also has processors that a guest may get later. Not from the file "online": lxcfs replaces it.
    offline = numbers(",".join(_read_lines(root / "sys/devices/system/cpu/offline")[:1]))
    for number in sorted({*allowed}.difference(offline)):
        folder = root / f"sys/devices/system/cpu/cpu{number}/topology"
        # Some virtual machines have no such files: then each processor counts as a core of socket 0.
        siblings = next(iter(_read_lines(folder / "thread_siblings_list")), str(number))
        socket = next(iter(_read_lines(folder / "physical_package_id")), "0")
        core = min(numbers(siblings))
        node = nodes.get(number, 0) if nodes else int(socket)  # no nodes: each socket's memory is its own
        yield Cpu(socket=int(socket), node=node, core=core, number=number)


def _cgroups(root: Path) -> Callable[[str], Iterator[Path]]:
    """Return a function that yields the folders of this process's cgroups for a controller, such as ``cpu``.

    In each hierarchy of version 1 or 2, the process's own cgroup comes first, then each one above it, up to
    the mount point. A folder may not exist.
    """
    paths: dict[str, str] = {}  # controller -> path of the process's cgroup in that hierarchy
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)  # of version 2, controllers is empty
        paths |= dict.fromkeys(controllers.split(","), path)

    def folders(controller: str) -> Iterator[Path]:
        """Yield the cgroups' folders, the process's own cgroup first."""
        for line in _read_lines(root / "proc/self/mountinfo"):
            # As in proc_pid_mountinfo(5): which cgroup is mounted (in most containers not "/"), and where.
            head, _, right = line.partition(" - ")
            mounted_cgroup, mount_point = head.split(" ")[3:5]
            filesystem, _, options = right.split(" ", 2)  # the source between them may be empty
            own: str | None = None  # path of the process's cgroup in this hierarchy
            if filesystem == "cgroup2":
                own = paths.get("")  # version 2's one hierarchy
            elif filesystem == "cgroup" and controller in options.split(","):
                own = paths.get(controller)
            if own is None:
                continue
            below_mount = own.removeprefix(mounted_cgroup) if mounted_cgroup != "/" else own
            parts = [part for part in below_mount.split("/") if part not in ("", "..")]
            base = root / mount_point.lstrip("/")
            for length in range(len(parts), -1, -1):  # a folder that does not exist is no error
                yield base.joinpath(*parts[:length])

    return folders


def _quota(folder: Path) -> float | None:
    """Read how many processors' worth of time a cgroup grants, of version 2 or 1; None: no limit."""
    quota_and_period = [  # from one file of version 2, or from two of version 1: the others do not exist
        *_words_of_file(folder / "cpu.max"),
        *_words_of_file(folder / "cpu.cfs_quota_us"),
        *_words_of_file(folder / "cpu.cfs_period_us"),
    ]
    if len(quota_and_period) < 2:  # noqa: PLR2004 - as its name says
        return None
    quota, period = quota_and_period[:2]
    if quota in ("max", "-1") or int(period) <= 0:
        return None
    return int(quota) / int(period)


def _cgroup_memory(folder: Path) -> int | None:
    """Read the memory limit of a cgroup, of version 2 or 1, in bytes; None: no limit."""
    words = [*_words_of_file(folder / "memory.max"), *_words_of_file(folder / "memory.limit_in_bytes")]
    return int(words[0]) if words and words[0] != "max" else None


def _requests_its_limit(root: Path, folder: Path, quota: float | None) -> bool | None:
    """Whether a pod requests as much CPU as its limit; None: this is no pod, or it cannot be known.

    A pod's request becomes the shares or the weight of its cgroup, and its limit becomes the quota.
    """
    # In every container, /etc/hosts and /dev/termination-log are mounted from the kubelet's folder of pods.
    mounts = _read_lines(root / "proc/self/mountinfo")
    if quota is None or not any("kubelet/pods/" in line for line in mounts):
        return None
    # The shares of a pod whose request equals its limit. They and the weights are compared within 1, as they
    # are rounded to whole numbers.
    expected = quota * _SHARES_PER_CPU
    if shares := _words_of_file(folder / "cpu.shares"):
        return abs(int(shares[0]) - expected) <= 1
    if weight := _words_of_file(folder / "cpu.weight"):
        return any(abs(int(weight[0]) - expected_weight) <= 1 for expected_weight in _weights(expected))
    return None


def _weights(shares: float) -> tuple[int, int]:
    """Convert CPU shares of cgroup version 1 to weights of version 2, by both rules of container runtimes.

    The first weight is by the older, linear rule (Kubernetes' KEP 2254). The second is by the rule of runc
    1.3.2, crun 1.23 and later.
    """
    shares = min(max(shares, 2), 262_144)  # the limits of the kernel
    bits = math.log2(shares)
    linear = 1 + (shares - 2) * 9999 / 262_142
    return int(linear), math.ceil(10 ** ((bits * bits + 125 * bits) / 612 - 7 / 34))


def _words_of_file(path: Path) -> list[str]:
    """Read a file's words; empty: it cannot be read."""
    return " ".join(_read_lines(path)).split()


def processor_flags(root: Path = Path("/")) -> frozenset[str]:
    """Read the processor's flags; empty: they cannot be read."""
    return frozenset(_value_behind(root / "proc/cpuinfo", "flags", "Features").split())


def has_bf16(flags: Collection[str]) -> bool:
    """Whether a processor with these flags has instructions for bf16."""
    return not _BF16_FLAGS.isdisjoint(flags)


def bf16_warning(flags: Collection[str]) -> str | None:
    """Explain the cost of bf16 on a processor without it; None: the processor has it, or is unknown."""
    if not flags or has_bf16(flags):
        return None
    factor = next((factor for flag, factor in _BF16_FACTORS.items() if flag in flags), "many times")
    return (
        "bf16 without hardware for it: this processor has neither avx512_bf16 nor amx_bf16, so a step takes "
        f"{factor} as long as in fp32; set run.dtype to fp32"
    )


def preload_libraries(root: Path = Path("/")) -> dict[str, str]:
    """Find the libraries worth preloading, in folders of the linker and of Python: library -> its path."""
    user_folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    system_folders = [root / folder.format(machine=os.uname().machine) for folder in _SYSTEM]
    folders = [*user_folders, Path(sys.prefix, "lib"), *system_folders]
    path_of = {}
    for name, files in _LIBRARIES.items():
        # The best name of a library counts first, then the order of the folders.
        places = (folder / file for file in files for folder in folders)
        if path := next((path for path in places if path.is_file()), None):
            path_of[name] = str(path)
    return path_of
