"""Launch a training on machines: as a supervised process."""

import socket
import sys
from pathlib import Path
from typing import Any

from manycpu.pipeline.adapters import hosts as host_adapter
from manycpu.pipeline.adapters import mpi, process
from manycpu.pipeline.launchers import LAUNCHERS
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.targets import BareMetal
from manycpu.pipeline.targets.attempt import attempt_of, attempt_status, checkpoints_of, goes_on, join
from manycpu.pipeline.targets.context import MachineContext
from manycpu.pipeline.targets.machines import hosts
from manycpu.pipeline.targets.machines.activity_log import ActivityLog
from manycpu.pipeline.targets.outcome import outcome
from manycpu.pipeline.targets.program_code import program_of
from manycpu.pipeline.targets.results import Built, Staged

__all__ = ["launch", "objects", "place", "present_handle", "status"]


def launch(ctx: MachineContext, staged: Staged, built: Built) -> tuple[ProcessHandle, bool]:
    """Start the next attempt, unless one lives or has succeeded.

    The attempt is on disk before anything starts, and nobody else starts one meanwhile.

    Raises:
        ForeignRunError: The run is another task's, which describes another training.
        LaunchError: There is no MPI, no host, or no supervisor.
    """
    with ctx.ledger.hold() as (entry, lock):
        join(ctx, entry, "train")
        present = present_handle(ctx, entry)
        if present is not None and goes_on(attempt_status(ctx, present, entry), entry):
            entry.handle = present
            return present, True
        entry.attempt += 1
        entry.attempts[entry.attempt] = attempt_of(ctx, staged, built)
        entry.handle = None
        entry.verbs.pop("wait", None)  # it told of the attempt before
        ctx.ledger.save(entry)
        placement = place(ctx, staged, built, entry.attempt)
        for folder in (placement.output, placement.checkpoints, placement.code):
            hosts.make_folder(ctx, Path(folder))
        handle = process.start(
            LAUNCHERS[ctx.target.launch].objects(ctx.run, ctx.target, placement)[-1],
            Path(placement.attempt_directory),
            _job(ctx, entry.attempt),
            lock,
        )
        entry.handle = handle
        return handle, False


def status(
    ctx: MachineContext, handle: ProcessHandle, entry: Entry, activity: ActivityLog | None = None
) -> Status:
    """Read an attempt's status; a success counts once its ranks have proved their scale.

    Args:
        ctx: The run, as the attempt was started.
        handle: The attempt.
        entry: The ledger's entry.
        activity: What of its log was read already; None: begin with what is on disk.

    Raises:
        LaunchError: It was started on another machine.
    """
    process_state = process.observe(handle)  # before the log is read: an end comes after the last line
    observed = activity.read_new() if activity else ActivityLog(Path(handle.directory)).read_all()
    facts = {"cancelled": handle.attempt in entry.cancelled, "met": observed.met}
    status = LAUNCHERS[entry.described(handle.attempt).target["launch"]].state(process_state | facts)
    return outcome(ctx, status, observed) if status.state is RunState.SUCCEEDED else status


def present_handle(ctx: MachineContext, entry: Entry) -> ProcessHandle | None:
    """Find the handle of the present attempt, also where its starter was killed before recording it."""
    if entry.attempt == 0:
        return None
    recorded = entry.handle if isinstance(entry.handle, ProcessHandle) else None
    return recorded or process.read_handle(ctx.attempt_directory(entry.attempt))


def objects(ctx: MachineContext) -> list[dict[str, Any]]:
    """List what would be started, with nothing staged or built yet."""
    staged = Staged(data=ctx.run.data and "<data>", model=ctx.run.model and "<model>")
    _, arguments = program_of(ctx)
    built = Built(code=None, program=arguments, digest="")
    return LAUNCHERS[ctx.target.launch].objects(ctx.run, ctx.target, place(ctx, staged, built, 1))


def place(ctx: MachineContext, staged: Staged, built: Built, attempt: int) -> Placement:
    """Decide the paths of an attempt on its nodes.

    Raises:
        LaunchError: There is no MPI that mpirun could be spoken to.
    """
    folder = ctx.attempt_directory(attempt)
    common: dict[str, Any] = {
        "name": ctx.name,
        "attempt": attempt,
        "python": sys.executable,
        "code": built.code or str(ctx.directory / "work"),
        "program": built.program,
        "data": staged.data,
        "model": staged.model,
        # Of its own for each attempt: what a failed one wrote must not pass for a model.
        "output": str(folder / "output"),
        "checkpoints": checkpoints_of(ctx),
        "caches": str(ctx.home / "caches"),
        "attempt_directory": str(folder),
        "resume_from": ctx.run.resume_from,
    }
    if ctx.target.launch == "mpirun":
        common["mpi"] = mpi.find(ctx.target.mpi)
    if isinstance(ctx.target, BareMetal):
        return Placement(**common | host_adapter.placement(ctx.target, ctx.run))
    if ctx.target.launch == "mpirun":
        common["master_port"] = free_port()
    return Placement(**common)


def free_port() -> int:
    """Find a free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _job(ctx: MachineContext, attempt: int) -> process.Job:
    run = ctx.run
    return process.Job(ctx.name, attempt, run.run_timeout, run.start_timeout, run.stall_timeout)
