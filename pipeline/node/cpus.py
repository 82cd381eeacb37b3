"""Apply the CPU plan to a rank: preload libraries, and pin the rank to cores that no other run has.

Each run that pins its ranks has a record, a file that lists their cores. One folder has the records of all
runs of a user. The ranks lock the record of their run until they end. The kernel releases a lock when its
process ends, so that a record without a lock is of a run that has ended.
"""

import fcntl
import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from manycpu.pipeline.node.world import Rank
from manycpu.pipeline.spec import cpu_plan
from manycpu.pipeline.spec.cpu_plan import CpuRequest, pinned
from manycpu.pipeline.spec.machine import Machine
from manycpu.pipeline.spec.words import counted

_LOCK_TIMEOUT_S: Final = 30.0  # others hold the folder's lock for milliseconds, unless they are frozen
_POLL_INTERVAL_S: Final = 0.02
held: Final[list[int]] = []
"""Descriptors that hold this rank's locks, until it ends."""


class Share(NamedTuple):
    """What a run may pin its ranks of this machine to."""

    pins: tuple[tuple[int, ...], ...]
    """Numbers of the processors of each rank, by its local rank; empty: no rank is pinned."""
    why_not: str = ""
    """Why no rank is pinned, though the plan asks for it; empty: the ranks are pinned."""


def plan(rank: Rank, environ: Mapping[str, str]) -> cpu_plan.CpuPlan:
    """Make the CPU plan of this node's ranks, from the run's variables in ``environ``."""
    cpus = environ.get("MANYCPU_CPUS")
    user_names = environ.get("MANYCPU_USER_ENV", "").split(",")  # of the variables in run.env
    request = CpuRequest(
        processes=rank.local_world_size,
        subprocesses=int(environ.get("MANYCPU_SUBPROCESSES") or 1),
        cpus=float(cpus) if cpus else None,
        dtype=environ.get("MANYCPU_DTYPE") or "fp32",
        backend=environ.get("MANYCPU_BACKEND"),
        env={name: environ[name] for name in user_names if name in environ},
    )
    return cpu_plan.plan(Machine.observe(), request)


def preload(rank: Rank) -> None:
    """Restart this process (by exec) with the CPU plan's libraries in LD_PRELOAD.

    Only return if the plan has no libraries, or if LD_PRELOAD is set already: by the user, the image, or this
    function before the restart.
    """
    if os.environ.get("LD_PRELOAD") is not None:
        return
    libraries = plan(rank, os.environ).preload
    if libraries:
        os.environ["LD_PRELOAD"] = ":".join(libraries)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - it is this very command


def pin(plan: cpu_plan.CpuPlan, rank: Rank, environ: Mapping[str, str]) -> str:
    """Pin this process, and all processes that it starts, to cores that no other rank of this machine has.

    Returns:
        Why the process got no cores, though the plan asks for them. Empty if it got cores, if the plan pins
        nothing, or if the kernel refused the cores, which is no error.
    """
    if not plan.pins:
        return ""
    try:
        share = reserve_cores(plan, rank, environ, folder_of_user(environ))
    except (OSError, ValueError) as error:
        return f"the ranks are not pinned to cores, which other runs may have: {error}"
    if share.pins:
        with suppress(OSError):  # the cpuset has changed since the plan was made: the kernel decides
            os.sched_setaffinity(0, share.pins[rank.local_rank])
    return share.why_not


def reserve_cores(plan: cpu_plan.CpuPlan, rank: Rank, environ: Mapping[str, str], folder: Path) -> Share:
    """Reserve the cores that a plan asks for, until the last rank of the run has ended.

    All ranks of the run on this machine get the same answer: the first of them writes it to the record.
    Records of runs that have ended are deleted.

    Raises:
        OSError: The folder cannot be used, is not this user's alone, or stays locked for 30 s.
        ValueError: A record is damaged.
    """
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_owner(folder.parent)
    _check_owner(folder)
    # What the ranks of this run on this host have in common, and no other running process has.
    names = ("MANYCPU_RUN", "MANYCPU_ATTEMPT", "MASTER_ADDR", "MASTER_PORT", "MANYCPU_HOST")
    run_identity = [*(environ.get(name, "") for name in names), str(rank.local_world_size)]
    key = hashlib.sha256("\0".join(run_identity).encode()).hexdigest()[:16]
    own_record = folder / f"{key}.json"
    with _locked(folder / "lock"):
        other_runs = []  # records of other runs
        for path in sorted(folder.glob("*.json")):
            if path == own_record:
                continue
            if _is_held(path):
                other_runs.append(json.loads(path.read_text()))
            else:  # its run has ended
                path.unlink()
        if not _is_held(own_record):  # this is the first rank of the run on this machine
            share = _choose_free_cores(other_runs, plan)
            own_record.write_text(json.dumps({"run": environ.get("MANYCPU_RUN", "")} | share._asdict()))
        descriptor = os.open(own_record, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # shared by all ranks of the run
        held.append(descriptor)
        record = json.loads(own_record.read_text())
    return Share(tuple(map(tuple, record["pins"])), record["why_not"])


def _check_owner(folder: Path) -> None:
    """Check that only this user may write to a folder; else raise PermissionError."""
    # Another user may have made it, or put a link in its place: /tmp is open to all users.
    status = folder.lstat()
    writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid != os.getuid() or writable_by_others or folder.is_symlink():
        raise PermissionError(f"{folder} is not this user's alone")


def folder_of_user(environ: Mapping[str, str]) -> Path:
    """Name the folder of this user's records, on a disk of this machine."""
    # Not in the home folder: other machines may share that, whose locks are not seen here.
    return Path(environ.get("TMPDIR") or "/tmp") / f"manycpu-{os.getuid()}" / "cores"  # noqa: S108 - reserve_cores checks the owner


def _is_held(path: Path) -> bool:
    """Whether a running process holds the lock of a run's record, so that the run has not ended.

    False also if there is no such record.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _choose_free_cores(others: list[dict[str, Any]], plan: cpu_plan.CpuPlan) -> Share:
    """Choose cores for the plan's ranks that no other run has.

    If too few cores are free, no rank gets any, and the share has the reason. ``others`` are the records of
    the other runs on this machine.
    """
    # Number of a processor -> the run that is pinned to it.
    run_of = {number: str(other["run"]) for other in others for pin in other["pins"] for number in pin}
    taken_cores = {cpu.core for cpu in plan.machine.cpus if cpu.number in run_of}
    # A core is free if no run has any of its hyper-threads.
    free_cpus = [cpu for cpu in plan.machine.cpus if cpu.core not in taken_cores]
    cores_each = max(1, int(plan.cores // plan.processes))
    free_cores = len({cpu.core for cpu in free_cpus})
    if free_cores >= plan.processes * cores_each:
        pins = pinned(free_cpus, plan.processes, cores_each)
        return Share(tuple(tuple(cpu.number for cpu in pin) for pin in pins))
    runs = sorted({run_of[cpu.number] for cpu in plan.machine.cpus if cpu.number in run_of})
    needed = counted(plan.processes * cores_each, "core")
    return Share(
        (),
        f"the ranks are not pinned to cores: they need {needed}, and {', '.join(runs)}, which runs on this "
        f"machine too, leaves {free_cores}. Both are slower than alone",
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file.

    Raises:
        BlockingIOError: Another process held the lock for 30 s.
    """
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
