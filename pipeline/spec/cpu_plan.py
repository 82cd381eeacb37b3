"""How many threads each training process gets: from what this machine grants, never from what its host has.

Pure but for reading files below ``root``; knows no torch, so that launchers and ``manycpu plan`` use it too.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["THREAD_VARIABLES", "CpuPlan", "Machine", "Row", "plan"]

# What OpenMP, MKL, OpenBLAS, numexpr and Rayon (tokenizers) read to size their thread pools.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The processors that this process may use."""

    cpus: tuple[int, ...]
    """Logical processors of its affinity, which lies within the cpuset."""
    quota: float | None = None
    """Processors' worth of time that the tightest cgroup above it grants; None: no limit."""
    sockets: int = 1
    """Sockets that ``cpus`` lie on."""
    threads_per_core: int = 1
    """Hyper-threads that share a core."""

    @property
    def cores(self) -> float:
        """What is granted: the lesser of affinity and quota."""
        return min(float(len(self.cpus)), self.quota or math.inf)

    @classmethod
    def observe(cls, root: Path = Path("/")) -> "Machine":
        """Look at the files that Linux keeps below ``root``."""
        cpus = _affinity(root)
        return cls(cpus=cpus, quota=_quota(root), **_topology(root, cpus))


class Row(NamedTuple):
    """A line of the plan, as ``manycpu plan`` shows it."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class CpuPlan:
    """What each process of a node gets, and why."""

    machine: Machine
    cores: float
    processes: int
    threads: int
    """Threads of each process, as they will be: the user's number where one was set."""
    env: Mapping[str, str]
    """Variables to set before any of the libraries is loaded; without those that the user set."""
    warnings: tuple[str, ...] = ()
    _rows: tuple[Row, ...] = ()

    def rows(self) -> tuple[Row, ...]:
        """Name, value and reason of everything that was decided."""
        return self._rows


def plan(
    machine: Machine, processes: int, cpus: float | None = None, user_env: Mapping[str, str] | None = None
) -> CpuPlan:
    """Divide a node's cores among its processes.

    Args:
        machine: What the node grants.
        processes: Training processes on the node, at least 1.
        cpus: Cores that the run may use (``run.resources.cpu``); None: all that are granted.
        user_env: What the user set in ``run.env``: wins, with a warning where it matters.
    """
    user_env = user_env or {}
    cores = min(machine.cores, cpus or math.inf)
    fair = max(1, math.floor(cores / processes))
    # The others follow the user's OpenMP: the least of them is what torch uses.
    threads = _threads_of_user(user_env) or fair
    return CpuPlan(
        machine=machine,
        cores=cores,
        processes=processes,
        threads=threads,
        env={name: str(threads) for name in THREAD_VARIABLES if name not in user_env},
        warnings=tuple(_warnings(machine, cores, processes, cpus, user_env)),
        _rows=_explain(machine, cores, processes, fair, user_env),
    )


def _threads_of_user(user_env: Mapping[str, str]) -> int | None:
    text = user_env.get("OMP_NUM_THREADS", "").strip()
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _explain(
    machine: Machine, cores: float, processes: int, fair: int, user_env: Mapping[str, str]
) -> tuple[Row, ...]:
    quota = f"cgroup quota {machine.quota:g}" if machine.quota else "no cgroup quota"
    smt = f"{machine.threads_per_core} hyper-threads a core" if machine.threads_per_core > 1 else "no SMT"
    threads = _threads_of_user(user_env) or fair
    share = f"floor({cores:g} cores / {processes} processes), at least 1"
    return (
        Row(
            "granted",
            f"{machine.cores:g}",
            f"lesser of {len(machine.cpus)} processors of the affinity, {quota}",
        ),
        Row("topology", f"{machine.sockets} sockets", smt),
        Row("cores", f"{cores:g}", "what is granted, or run.resources.cpu where that is less"),
        Row("processes", str(processes), "run.nproc_per_node"),
        Row("threads", str(threads), "run.env" if threads != fair else share),
        *(
            Row(name, user_env.get(name, str(threads)), "run.env" if name in user_env else "threads")
            for name in THREAD_VARIABLES
        ),
    )


def _warnings(
    machine: Machine, cores: float, processes: int, cpus: float | None, user_env: Mapping[str, str]
) -> Iterator[str]:
    if cpus and cpus > machine.cores:
        yield f"run.resources.cpu asks for {cpus:g} cores; this node grants {machine.cores:g}, which are used"
    if processes > cores:
        yield f"{processes} processes share {cores:g} cores: oversubscribed"
    fair = max(1, math.floor(cores / processes))
    for name in THREAD_VARIABLES:
        if name in user_env and user_env[name].strip() != str(fair):
            yield (
                f"run.env: {name}={user_env[name]} wins over the CPU plan's {fair} "
                f"({processes} processes on {cores:g} cores); leave it out to have the plan's"
            )


def _affinity(root: Path) -> tuple[int, ...]:
    for line in _lines(root / "proc/self/status"):
        if line.startswith("Cpus_allowed_list:"):
            return _parse_list(line.partition(":")[2])
    return (0,)


def _parse_list(text: str) -> tuple[int, ...]:
    """Read a list of the kernel's: ``0-2,5`` is 0, 1, 2, 5."""
    found: list[int] = []
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        found.extend(range(int(low), int(high or low) + 1))
    return tuple(found)


def _topology(root: Path, cpus: tuple[int, ...]) -> dict[str, int]:
    folders = [root / f"sys/devices/system/cpu/cpu{cpu}/topology" for cpu in cpus]
    sockets = {line for folder in folders for line in _lines(folder / "physical_package_id")}
    siblings = next(iter(_lines(folders[0] / "thread_siblings_list")), "0")
    return {"sockets": len(sockets) or 1, "threads_per_core": len(_parse_list(siblings))}


def _quota(root: Path) -> float | None:
    """Find the tightest quota of this process's cgroup and all those above it, of versions 1 and 2."""
    paths = {
        controller: path
        for _, controllers, path in (line.split(":", 2) for line in _lines(root / "proc/self/cgroup"))
        for controller in controllers.split(",")
    }
    found = [
        limit
        for mount in _mounts(root)
        for folder in _upwards(root, mount, paths.get(mount.controller))
        if (limit := _limit(folder)) is not None
    ]
    return min(found, default=None)


class _Mount(NamedTuple):
    controller: str  # "" is version 2's one hierarchy, as in /proc/self/cgroup
    shown: str  # the cgroup that is seen at the mount point: not "/" inside most containers
    point: str


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        shown, point = left.split()[3:5]
        kind, _, options = right.split(maxsplit=2)
        if kind == "cgroup2":
            yield _Mount("", shown, point)
        elif kind == "cgroup" and "cpu" in options.split(","):
            yield _Mount("cpu", shown, point)


def _upwards(root: Path, mount: _Mount, path: str | None) -> Iterator[Path]:
    """Walk from the process's cgroup up to the mount point; unseen folders are no error."""
    if path is None:
        return
    inside = path.removeprefix(mount.shown) if mount.shown != "/" else path
    parts = [part for part in inside.split("/") if part not in ("", "..")]
    base = root / mount.point.lstrip("/")
    for length in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:length])


def _limit(folder: Path) -> float | None:
    words = [
        *_words(folder / "cpu.max"),
        *_words(folder / "cpu.cfs_quota_us"),
        *_words(folder / "cpu.cfs_period_us"),
    ]
    if len(words) < 2 or words[0] in ("max", "-1") or int(words[1]) <= 0:  # noqa: PLR2004 - quota and period
        return None
    return int(words[0]) / int(words[1])


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
