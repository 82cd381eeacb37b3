"""Share out this machine's cores among the runs that pin their ranks.

Each run has a record in a folder of its user's, with the cores of its ranks, which lock it for as
long as they live. The kernel ends a lock with the process that holds it: no record outlives its
run.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from manycpu.pipeline.node.rank_environment import Rank
from manycpu.pipeline.spec.cpu_plan import CpuPlan, pinned
from manycpu.pipeline.spec.words import counted

__all__ = ["Share", "folder_of_user", "held", "take"]

_LOCK_TIMEOUT_S: Final = 30.0  # others hold the folder's lock for milliseconds, where they are not frozen
_POLL_INTERVAL_S: Final = 0.02
held: Final[list[int]] = []
"""Descriptors that hold this rank's locks, until it ends."""


class Share(NamedTuple):
    """What a run may pin its ranks of this machine to."""

    pins: tuple[tuple[int, ...], ...]
    """Processors of each rank, by its local rank; empty: the kernel decides."""
    why_not: str = ""
    """Why no rank is pinned, though the plan pins them."""


def take(plan: CpuPlan, rank: Rank, environ: Mapping[str, str], folder: Path) -> Share:
    """Take the cores that a plan wants, and keep them until the last rank of the run has ended.

    All ranks of the run on this machine get the same answer: the first of them writes it down.

    Raises:
        OSError: The folder cannot be used, and then nothing is shared out.
    """
    _make(folder)
    own = folder / f"{_key(rank, environ)}.json"
    with _locked(folder / "lock"):
        others = list(_living(folder, own))
        if not _is_held(own):
            share = _beside(others, plan)
            own.write_text(json.dumps({"run": environ.get("MANYCPU_RUN", "")} | share._asdict()))
        descriptor = os.open(own, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        held.append(descriptor)
        record = json.loads(own.read_text())
    return Share(tuple(map(tuple, record["pins"])), record["why_not"])


def folder_of_user(environ: Mapping[str, str]) -> Path:
    """Name the folder of this user's records, on a disk of this machine."""
    # A home may be shared with other machines, whose locks are not seen here.
    return Path(environ.get("TMPDIR") or "/tmp") / f"manycpu-{os.getuid()}" / "cores"  # noqa: S108 - see _make


def _make(folder: Path) -> None:
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    for made in (folder.parent, folder):
        seen = made.lstat()
        if seen.st_uid != os.getuid() or seen.st_mode & 0o022 or made.is_symlink():
            raise PermissionError(f"{made} is not this user's alone")


def _key(rank: Rank, environ: Mapping[str, str]) -> str:
    """Name what the ranks of a run on one host have in common, and no others that live."""
    names = ("MANYCPU_RUN", "MANYCPU_ATTEMPT", "MASTER_ADDR", "MASTER_PORT", "MANYCPU_HOST")
    words = [*(environ.get(name, "") for name in names), str(rank.local_world_size)]
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _living(folder: Path, own: Path) -> Iterator[dict[str, Any]]:
    """Read the records of other runs that live, and delete the rest."""
    for path in sorted(folder.glob("*.json")):
        if path == own:
            continue
        if _is_held(path):
            yield json.loads(path.read_text())
        else:
            path.unlink()


def _is_held(path: Path) -> bool:
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _beside(others: list[dict[str, Any]], plan: CpuPlan) -> Share:
    """Place the plan's ranks on cores that no other run has; nowhere, where these are too few."""
    used = {number: str(other["run"]) for other in others for pin in other["pins"] for number in pin}
    cores = {cpu.core for cpu in plan.machine.cpus if cpu.number in used}
    free = [cpu for cpu in plan.machine.cpus if cpu.core not in cores]
    each = max(1, int(plan.cores // plan.processes))
    left = len({cpu.core for cpu in free})
    if left >= plan.processes * each:
        pins = pinned(free, plan.processes, each)
        return Share(tuple(tuple(cpu.number for cpu in pin) for pin in pins))
    runs = sorted({used[cpu.number] for cpu in plan.machine.cpus if cpu.number in used})
    needed = counted(plan.processes * each, "core")
    return Share(
        (),
        f"the ranks are not pinned to cores: they need {needed}, and {', '.join(runs)}, which runs on this "
        f"machine too, leaves {left}. Both are slower than alone",
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_INTERVAL_S)
        yield
