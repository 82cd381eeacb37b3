"""launch: start the training, or attach to the one that this run has started already."""

import socket
import sys
from pathlib import Path
from typing import Any

from manycpu.pipeline.adapters import hosts as host_adapter
from manycpu.pipeline.adapters import mpi, process
from manycpu.pipeline.launchers import LAUNCHERS
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.targets import BareMetal
from manycpu.pipeline.verbs import hosts
from manycpu.pipeline.verbs.build import Built
from manycpu.pipeline.verbs.context import RunContext
from manycpu.pipeline.verbs.stage import Staged

__all__ = ["launch", "manifest", "place", "status"]


def launch(ctx: RunContext, staged: Staged, built: Built) -> tuple[Handle, bool]:
    """Start the next attempt, unless one lives or has succeeded.

    The attempt is on disk before anything starts, and nobody else starts one meanwhile.

    Returns:
        The handle, and whether it is that of an attempt which was there before.

    Raises:
        LaunchError: There is no MPI, no host, or no supervisor.
    """
    with ctx.ledger.timed("launch") as record, ctx.ledger.update() as (entry, lock):
        present = present_handle(ctx, entry)
        if present is not None and _goes_on(status(present, entry)):
            entry.handle = present
            record.result = "reused"
            return present, True
        entry.attempt += 1
        entry.handle = None
        ctx.ledger.save(entry)
        placement = place(ctx, staged, built, entry.attempt)
        for folder in (placement.output, placement.checkpoints, placement.code):
            hosts.make_folder(ctx, Path(folder))
        entry.handle = process.start(
            LAUNCHERS[ctx.target.launch].manifest(ctx.run, ctx.target, placement),
            Path(placement.attempt_directory),
            _job(ctx, entry.attempt),
            lock,
        )
        return entry.handle, False


def status(handle: Handle, entry: Entry) -> Status:
    """Look at an attempt.

    Raises:
        LaunchError: It was started on another machine.
    """
    observed = process.observe(handle) | {"cancelled": handle.attempt in entry.cancelled}
    return LAUNCHERS[entry.target["launch"]].state(observed)


def present_handle(ctx: RunContext, entry: Entry) -> Handle | None:
    """Find the present attempt, also where whoever started it was killed before it could note the handle."""
    if entry.attempt == 0:
        return None
    return entry.handle or process.read_handle(ctx.attempt_directory(entry.attempt))


def manifest(ctx: RunContext) -> dict[str, Any]:
    """Describe what would be run, with nothing staged or started yet."""
    staged = Staged(data=ctx.run.data and "<data>", model=ctx.run.model and "<model>")
    built = Built(code=None, program=("-m", "<program>"), digest="")
    return LAUNCHERS[ctx.target.launch].manifest(ctx.run, ctx.target, place(ctx, staged, built, 1))


def place(ctx: RunContext, staged: Staged, built: Built, attempt: int) -> Placement:
    """Decide where everything of an attempt is on its nodes.

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
        "checkpoints": ctx.run.checkpoints or str(ctx.directory / "checkpoints"),
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
    """Find a port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _job(ctx: RunContext, attempt: int) -> process.Job:
    run = ctx.run
    return process.Job(ctx.name, attempt, run.run_timeout, run.start_timeout, run.stall_timeout)


def _goes_on(seen: Status) -> bool:
    return not seen.state.terminal or seen.state is RunState.SUCCEEDED
