"""Apply the CPU plan to a rank: libraries before Python begins, cores before threads do."""

import contextlib
import os
import sys
from collections.abc import Mapping

from manycpu.pipeline.node import shared_cores
from manycpu.pipeline.node.rank_environment import Rank
from manycpu.pipeline.spec import cpu_plan
from manycpu.pipeline.spec.cpu_request import CpuRequest
from manycpu.pipeline.spec.machine import Machine

__all__ = ["pin", "plan", "preload"]


def plan(rank: Rank, environ: Mapping[str, str]) -> cpu_plan.CpuPlan:
    """Plan for this node and its ranks, from what the launcher passed on of the run."""
    cpus = environ.get("MANYCPU_CPUS")
    named = environ.get("MANYCPU_USER_ENV", "").split(",")
    request = CpuRequest(
        processes=rank.local_world_size,
        subprocesses=int(environ.get("MANYCPU_SUBPROCESSES") or 1),
        cpus=float(cpus) if cpus else None,
        dtype=environ.get("MANYCPU_DTYPE") or "fp32",
        backend=environ.get("MANYCPU_BACKEND"),
        env={name: environ[name] for name in named if name in environ},
    )
    return cpu_plan.plan(Machine.observe(), request)


def preload(rank: Rank) -> None:
    """Begin anew with the plan's libraries preloaded; returns where there are none, or they already are.

    What is in LD_PRELOAD already, by the user or by the image, stays as it is.
    """
    if os.environ.get("LD_PRELOAD") is not None:
        return
    libraries = plan(rank, os.environ).preload
    if libraries:
        os.environ["LD_PRELOAD"] = ":".join(libraries)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - it is this very command


def pin(plan: cpu_plan.CpuPlan, rank: Rank, environ: Mapping[str, str]) -> str:
    """Bind this process, and all that it starts, to processors that no other rank of this machine has.

    Returns:
        Why it is not bound, though the plan binds it; else nothing.
    """
    if not plan.pins:
        return ""
    folder = shared_cores.folder_of_user(environ)
    try:
        share = shared_cores.take(plan, rank, environ, folder)
    except (OSError, ValueError) as error:
        return f"the ranks are not pinned to cores, which other runs may have: {error}"
    if share.pins:
        with contextlib.suppress(OSError):  # the cpuset has changed since: the kernel decides
            os.sched_setaffinity(0, share.pins[rank.local_rank])
    return share.why_not
