"""Run a rank: plan CPUs, meet the others, wrap the backend, run the script, and check how it ended."""

import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from manycpu.pipeline.node import accelerate_world, cpus, local_world, metrics, script, world
from manycpu.pipeline.node.emit import NodeExit, say, warn
from manycpu.pipeline.spec import cpu_plan
from manycpu.pipeline.spec.exit_records import EXIT_NOT_TOGETHER, EXIT_PROOF

if TYPE_CHECKING:
    from manycpu.pipeline.node.proof import Meeting
    from manycpu.pipeline.node.step_pace import StepPace
    from manycpu.pipeline.node.xla import Devices

_FINISHED: Final = "all ranks had finished before some of them were lost: the program does not run again"


class _Start:
    """Reports what the rank waits for before the program's first line, and how long each step takes.

    ``speaks``: whether to report; only rank 0 does.
    """

    def __init__(self, *, speaks: bool) -> None:
        self._speaks, self._step, self._since = speaks, "", 0.0

    def waits_for(self, what: str) -> None:
        """Report what the start waits for now, and how long the step before took.

        ``what`` empty: the start is done, and the program begins.
        """
        took = f"{self._step} took {time.monotonic() - self._since:.1f} s; " if self._step else ""
        comes_now = f"waits for {what}" if what else "the program begins"
        if self._speaks:
            say("start", message=took + comes_now)
        self._step, self._since = what, time.monotonic()


def run(rank: world.Rank, argv: list[str], listener: socket.socket | None = None) -> int:
    """Run ``SCRIPT ARGS...`` or ``-m MODULE ARGS...`` as this rank; returns the exit code.

    The reason of a refusal (:class:`NodeExit`) becomes an event, and its code is returned.

    ``listener``: the socket on which rank 0 serves the store where the ranks meet; None: the store is at
    MASTER_ADDR and MASTER_PORT, and the launcher or rank 0 opens that port.
    """
    os.environ.update(rank.environment())
    try:
        return _run(rank, script.Program.parse(argv), listener)
    except NodeExit as refusal:
        say("error", kind="Refusal", message=refusal.message)
        return int(str(refusal.code))  # a number; for mypy, `SystemExit.code` may be anything


def _run(rank: world.Rank, program: script.Program, listener: socket.socket | None) -> int:
    """Prepare the rank, meet the others, and run the program; returns the exit code.

    If an earlier meeting of these ranks has finished, the program does not run again.
    """
    requested = world.read_requested(os.environ)
    requested.check_world(rank)
    plan = _plan_cpus(rank)
    accelerate_world.prepare(rank)
    accelerate_world.prepare_devices(os.environ, requested.devices)
    # A process alone in its world opens a port to meet itself, if the launcher gave it none.
    listener = _open_meeting_point(rank) or listener
    for name in ("MANYCPU_OUTPUT", "MANYCPU_CHECKPOINTS"):
        if folder := os.environ.get(name):
            Path(folder).mkdir(parents=True, exist_ok=True)
    start = _Start(speaks=rank.rank == 0)
    start.waits_for("the import of torch")
    # Late: the plan's variables must be set before torch is loaded.
    from manycpu.pipeline.node import backends, proof

    if waited_for := backends.awaited(requested.backend):
        start.waits_for(waited_for)
    no_ccl = ""
    if requested.backend == world.AUTO:  # the ranks choose as they meet: ccl, if none has a reason against it
        no_ccl = backends.why_unavailable("ccl")
    elif requested.backend is not None:  # None: the script chooses
        backends.require(requested.backend)
    devices = _take_devices(requested, start)
    start.waits_for(f"all ranks to meet: {rank.world_size} (for at most {requested.timeout} s)")
    meeting = proof.meet(rank, requested, plan, no_ccl, listener)
    start.waits_for("")  # for nothing more
    if meeting.finished:
        if rank.rank == 0:
            say("finished", meeting=meeting.finished, message=_FINISHED)
        return 0
    return _train(rank, program, meeting, devices)


def _train(rank: world.Rank, program: script.Program, meeting: "Meeting", devices: "Devices | None") -> int:
    """Run the program with the ranks that met, and check how it trained; returns its exit code."""
    # Late: they import torch.
    from manycpu.pipeline.node import backends, proof, step_pace

    proof.choose_interface(meeting)
    if meeting.backend:
        os.environ["MANYCPU_BACKEND"] = meeting.backend  # for the program: AUTO names no backend
    backends.wrap(meeting.backend, len(meeting.records))
    accelerate_world.adapt_at_import(rank.world_size)
    program = script.translated(program, meeting.backend)
    script.warn_of_forks()
    pace = step_pace.watch()
    process = os.getpid()
    code = script.execute(program)
    if os.getpid() != process:  # a child that the script forked returns here too: it is not the rank
        return code
    pace.report()
    if devices is not None:
        devices.report()
    if code == 0:
        metrics.report_trainer_files()
        _check(program, rank, len(meeting.records), devices)
        _warn_of_training_alone(rank, pace, devices)
    return code


def _take_devices(requested: world.RequestedWorld, start: _Start) -> "Devices | None":
    """Take the XLA devices of this node; None: the run trains on CPUs."""
    if requested.devices is None:
        return None
    start.waits_for("torch_xla, and its devices")
    # Late: it imports torch.
    from manycpu.pipeline.node import xla

    return xla.take(requested.devices)


def _check(program: script.Program, rank: world.Rank, world_size: int, devices: "Devices | None") -> None:
    """End the rank with exit code 86 if its program did not work with all ranks, or on all devices."""
    if devices is not None:
        devices.check(program.name)
    if rank.world_size == 1:
        return
    # First: if each rank trained alone, its message names the cause in Accelerate.
    accelerate_world.check(program.name, world_size)
    # Late: it imports torch.
    from manycpu.pipeline.node import backends

    if backends.was_initialised():
        return
    # A notebook's function runs as a file; users know it by its own name.
    label = program.name if program.module else Path(program.name).name.removesuffix("-function.py")
    raise NodeExit(
        EXIT_NOT_TOGETHER,
        f"{label} ended without ever initialising torch.distributed, although {rank.world_size} "
        "processes were asked for: each of them trained alone. Call torch.distributed.init_process_group "
        "(Accelerate and the Hugging Face Trainer do) in this program, not in one that it starts, or ask for "
        "one process.",
    )


def _warn_of_training_alone(rank: world.Rank, pace: "StepPace", devices: "Devices | None") -> None:
    """Warn if ranks exchanged nothing in most of their steps: no error, since a program may mean that."""
    # Devices of XLA communicate by themselves, without collectives of torch.
    if rank.world_size == 1 or devices is not None:
        return
    alone = pace.trained_alone()
    if alone and rank.rank == 0:  # one warning is enough
        warn(
            f"{alone}: unless that is meant, each rank trained a model of its own. "
            "Wrap the model in DistributedDataParallel, or prepare it by Accelerate, before it trains."
        )


def _plan_cpus(rank: world.Rank) -> cpu_plan.CpuPlan:
    """Make the node's CPU plan, set its variables, pin this rank to its cores, and return the plan.

    Warnings, such as those of choices of the user that the plan keeps, come once for each node.
    """
    plan = cpus.plan(rank, os.environ)
    # Replaces OMP_NUM_THREADS=1, which torchrun sets by itself. plan.env lacks what run.env sets: that stays.
    os.environ.update(plan.env)
    os.environ["MANYCPU_THREADS"] = str(plan.threads)  # for recipes
    why_unpinned = cpus.pin(plan, rank, os.environ)
    if rank.local_rank == 0:
        for warning in filter(None, (*plan.warnings, why_unpinned)):
            warn(warning)
    return plan


def _open_meeting_point(rank: world.Rank) -> socket.socket | None:
    """Check that MASTER_ADDR and MASTER_PORT are set; if there is only one rank, set them to a new port.

    Returns:
        The socket that listens on that port; None: both variables were set.

    Raises:
        NodeExit: There are several ranks, and a variable is missing (exit code 87).
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if os.environ.get(name) in (None, "", "0")]
    if not missing:
        return None
    if rank.world_size > 1:
        raise NodeExit(
            EXIT_PROOF,
            f"proof of scale failed: {rank.launcher} gave rank {rank.rank} of {rank.world_size} no "
            f"{' and no '.join(missing)}, so that the ranks cannot meet",
        )
    return local_world.open_meeting_point()
