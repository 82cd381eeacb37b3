"""Run a rank: plan CPUs, meet, wrap the backend, run the script, and report how it ended."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from manycpu.pipeline.node import (
    accelerate_world,
    cpus,
    device_environment,
    forks,
    meeting_point,
    options,
    rank_environment,
    requested_world,
    script,
    trainer_results,
)
from manycpu.pipeline.node.emit import say, warn
from manycpu.pipeline.node.node_exit import NEVER_INITIALISED, PROOF, NodeExit
from manycpu.pipeline.node.start import Start
from manycpu.pipeline.spec import cpu_plan

if TYPE_CHECKING:
    from manycpu.pipeline.node.xla import Devices

__all__ = ["run"]

_FINISHED: Final = "all ranks had finished before some of them were lost: the program is not run once more"


def run(rank: rank_environment.Rank, argv: list[str], listener: socket.socket | None = None) -> int:
    """Run the script of ``argv`` as this rank; the exit code.

    Args:
        rank: The rank.
        argv: ``SCRIPT ARGS...`` or ``-m MODULE ARGS...``.
        listener: What rank 0 is to serve the ranks' meeting point on; None: as the environment says.
    """
    os.environ.update(rank.environment())
    try:
        return _run(rank, script.Program.parse(argv), listener)
    except NodeExit as refusal:
        say("error", kind="Refusal", message=refusal.message)
        return int(str(refusal.code))


def _run(rank: rank_environment.Rank, program: script.Program, listener: socket.socket | None) -> int:
    asked_for = requested_world.of(os.environ)
    asked_for.check_world(rank)
    plan = plan_cpus(rank)
    accelerate_world.prepare(rank)
    device_environment.prepare(os.environ, asked_for.devices)
    listener = _meeting_point(rank) or listener
    _make_folders()
    start = Start(speaks=rank.rank == 0)
    start.waits_for("the import of torch")
    # Late: torch must not be loaded before the plan's variables are set.
    from manycpu.pipeline.node import network, process_groups, proof, step_pace

    if waited_for := process_groups.awaited(asked_for.backend):
        start.waits_for(waited_for)
    no_ccl = process_groups.lacking("ccl") if asked_for.backend == requested_world.AUTO else ""
    if asked_for.backend and asked_for.backend != requested_world.AUTO:
        process_groups.require(asked_for.backend)
    devices = _take_devices(asked_for, start)
    start.waits_for(f"all ranks to meet: {rank.world_size} (for at most {asked_for.timeout} s)")
    meeting = proof.meet(rank, asked_for, plan, no_ccl, listener)
    start.ends()
    if meeting.finished:
        if rank.rank == 0:
            say("finished", meeting=meeting.finished, message=_FINISHED)
        return 0
    network.choose_interface(meeting)
    if meeting.backend:
        os.environ["MANYCPU_BACKEND"] = meeting.backend
    process_groups.wrap(meeting.backend, meeting.world_size)
    program = options.translated(program, meeting.backend)
    forks.watch()
    pace, process = step_pace.watch(), os.getpid()
    code = script.execute(program)
    if os.getpid() != process:  # a child that the script forked, and that comes back here
        return code
    pace.tell()
    if devices is not None:
        devices.report()
    if code == 0:
        trainer_results.tell_results()
        _check(program, rank, meeting.world_size, devices)
    return code


def _check(
    program: script.Program, rank: rank_environment.Rank, world_size: int, devices: "Devices | None"
) -> None:
    """Check that a program that ended well worked with the others, and on the devices that it was given."""
    if devices is not None:
        devices.check(program.name)
    if rank.world_size > 1:
        accelerate_world.check(program.name, world_size)
        _check_initialised(program, rank)


def _take_devices(asked_for: requested_world.RequestedWorld, start: Start) -> "Devices | None":
    if asked_for.devices is None:
        return None
    start.waits_for("torch_xla, and its devices")
    # Late: it imports torch.
    from manycpu.pipeline.node import xla

    return xla.take(asked_for.devices)


def _check_initialised(program: script.Program, rank: rank_environment.Rank) -> None:
    # Late: it imports torch.
    from manycpu.pipeline.node import process_groups

    if process_groups.was_initialised():
        return
    raise NodeExit(
        NEVER_INITIALISED,
        f"{_label(program)} ended without ever initialising torch.distributed, although {rank.world_size} "
        "processes were asked for: each of them trained alone. Call torch.distributed.init_process_group "
        "(Accelerate and the Hugging Face Trainer do) in this program, not in one that it starts, or ask for "
        "one process.",
    )


def _label(program: script.Program) -> str:
    """Name a program as its user does: a function that was made one goes by its own name."""
    return Path(program.name).name.removesuffix("-function.py") if not program.module else program.name


def plan_cpus(rank: rank_environment.Rank) -> cpu_plan.CpuPlan:
    """Apply the CPU plan, and warn where the user's own choices win."""
    plan = cpus.plan(rank, os.environ)
    # torchrun has set OMP_NUM_THREADS=1 by itself; only what the run itself names is the user's.
    os.environ.update(plan.env)
    os.environ["MANYCPU_THREADS"] = str(plan.threads)
    unpinned = cpus.pin(plan, rank, os.environ)
    if rank.local_rank == 0:
        for warning in filter(None, (*plan.warnings, unpinned)):
            warn(warning)
    return plan


def _make_folders() -> None:
    for name in ("MANYCPU_OUTPUT", "MANYCPU_CHECKPOINTS"):
        if folder := os.environ.get(name):
            Path(folder).mkdir(parents=True, exist_ok=True)


def _meeting_point(rank: rank_environment.Rank) -> socket.socket | None:
    """See that there is a meeting point; a process alone makes one for itself, and listens there.

    Raises:
        NodeExit: 87, each rank would wait at a place of its own.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if os.environ.get(name) in (None, "", "0")]
    if not missing:
        return None
    if rank.world_size > 1:
        raise NodeExit(
            PROOF,
            f"proof of scale failed: {rank.launcher} gave rank {rank.rank} of {rank.world_size} no "
            f"{' and no '.join(missing)}, so that the ranks cannot meet",
        )
    return meeting_point.listen()
