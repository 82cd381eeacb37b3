"""Read the limits of this process's cgroups, of versions 1 and 2: CPU time, memory, a pod's share.

Pure but for reading files below ``root``.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["Grant", "lines", "observe"]

_SHARES_PER_CPU: Final = 1024  # what the kubelet gives for each processor that a container requests


class Grant(NamedTuple):
    """The tightest limits of this process's cgroup and all those above it; None: no limit."""

    quota: float | None = None
    """Processors' worth of time."""
    memory: int | None = None
    """Bytes."""
    guaranteed: bool | None = None
    """In a pod: whether its request for processors equals its limit; None elsewhere, or without a limit."""


def observe(root: Path) -> Grant:
    """Read the files that Linux keeps below ``root``."""
    paths = {
        controller: path
        for _, controllers, path in (line.split(":", 2) for line in lines(root / "proc/self/cgroup"))
        for controller in controllers.split(",")
    }
    quota = min(_limits(root, paths, "cpu", _quota), default=None)
    memory = min(_limits(root, paths, "memory", _memory), default=None)
    return Grant(quota, int(memory) if memory else None, _guaranteed(root, paths, quota))


def lines(path: Path) -> list[str]:
    """Read a file's lines; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


class _Mount(NamedTuple):
    controller: str  # "" is version 2's one hierarchy, as in /proc/self/cgroup
    shown: str  # the cgroup that is seen at the mount point: not "/" inside most containers
    point: str


def _limits(
    root: Path, paths: dict[str, str], controller: str, read: Callable[[Path], float | None]
) -> Iterator[float]:
    for folder in _folders(root, paths, controller):
        if (limit := read(folder)) is not None:
            yield limit


def _folders(root: Path, paths: dict[str, str], controller: str) -> Iterator[Path]:
    """Walk from the process's cgroup up to the mount point, in each hierarchy that has the controller."""
    for mount in _mounts(root, controller):
        yield from _upwards(root, mount, paths.get(mount.controller))


def _mounts(root: Path, controller: str) -> Iterator[_Mount]:
    for line in lines(root / "proc/self/mountinfo"):
        head, _, right = line.partition(" - ")
        shown, point = head.split()[3:5]
        kind, _, options = right.split(maxsplit=2)
        if kind == "cgroup2":
            yield _Mount("", shown, point)
        elif kind == "cgroup" and controller in options.split(","):
            yield _Mount(controller, shown, point)


def _upwards(root: Path, mount: _Mount, path: str | None) -> Iterator[Path]:
    if path is None:
        return
    inside = path.removeprefix(mount.shown) if mount.shown != "/" else path
    parts = [part for part in inside.split("/") if part not in ("", "..")]
    base = root / mount.point.lstrip("/")
    for length in range(len(parts), -1, -1):  # unseen folders are no error
        yield base.joinpath(*parts[:length])


def _quota(folder: Path) -> float | None:
    words = [
        *_words(folder / "cpu.max"),
        *_words(folder / "cpu.cfs_quota_us"),
        *_words(folder / "cpu.cfs_period_us"),
    ]
    if len(words) < 2 or words[0] in ("max", "-1") or int(words[1]) <= 0:  # noqa: PLR2004 - quota and period
        return None
    return int(words[0]) / int(words[1])


def _memory(folder: Path) -> float | None:
    words = [*_words(folder / "memory.max"), *_words(folder / "memory.limit_in_bytes")]
    return int(words[0]) if words and words[0] != "max" else None


def _guaranteed(root: Path, paths: dict[str, str], quota: float | None) -> bool | None:
    """Whether a pod requests as much CPU as its limit: compare its share with its quota."""
    if quota is None or not _in_a_pod(root):
        return None
    folder = next(_folders(root, paths, "cpu"), root)
    expected = quota * _SHARES_PER_CPU
    if shares := _words(folder / "cpu.shares"):
        return abs(int(shares[0]) - expected) <= 1
    if weight := _words(folder / "cpu.weight"):
        return any(abs(int(weight[0]) - expected_weight) <= 1 for expected_weight in _weights(expected))
    return None


def _in_a_pod(root: Path) -> bool:
    # The kubelet mounts /etc/hosts and /dev/termination-log into every container.
    return any("kubelet/pods/" in line for line in lines(root / "proc/self/mountinfo"))


def _weights(shares: float) -> tuple[int, int]:
    """Convert shares of version 1 to weights of version 2, as container runtimes have done it.

    The linear rule is Kubernetes' KEP 2254; the other is that of runc 1.3.2 and crun 1.23 and later.
    """
    shares = min(max(shares, 2), 262_144)
    bits = math.log2(shares)
    linear = 1 + (shares - 2) * 9999 / 262_142
    return int(linear), math.ceil(10 ** ((bits * bits + 125 * bits) / 612 - 7 / 34))


def _words(path: Path) -> list[str]:
    return " ".join(lines(path)).split()
