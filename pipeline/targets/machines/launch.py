"""Launch a training on machines as a supervised process."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

from manycpu.pipeline.adapters import disk, mpi, process
from manycpu.pipeline.adapters import hosts as host_adapter
from manycpu.pipeline.launchers import LAUNCHERS
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.output import RETURNED
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.targets import BareMetal
from manycpu.pipeline.targets.attempt import (
    attempt_of,
    attempt_status,
    begin_attempt,
    checkpoints_of,
    join,
    should_attach,
)
from manycpu.pipeline.targets.context import Built, Staged
from manycpu.pipeline.targets.machines import hosts
from manycpu.pipeline.targets.machines.context import (
    MachineContext,
    attempt_directory,
    directory_of,
    home_of,
    working_folder,
)
from manycpu.pipeline.targets.program_code import program_of


def launch(ctx: MachineContext, staged: Staged, built: Built) -> tuple[ProcessHandle, bool]:
    """Start the next attempt, or attach to the present one if it runs or has succeeded.

    The attempt is recorded before anything starts. The ledger's lock keeps other processes from launching.
    The started process holds the lock too, until its handle is on disk.

    Returns:
        The handle, and whether it is that of an earlier attempt (attached).

    Raises:
        ForeignRunError: Another task or another run is in the way.
        UnseenError: Whether the present attempt runs cannot be seen from here.
        LaunchError: The training cannot be started, or ranks of an earlier attempt do not end.
    """
    with ctx.ledger.hold() as (entry, lock):
        join(ctx, entry, role="train")  # refuses another task of the DAG run with other fields
        present = present_handle(ctx, entry)
        if present is not None:
            present_status = attempt_status(ctx, present, entry)
            if present_status.state is RunState.UNKNOWN:
                gone = ctx.typed("cancel", "--gone")
                raise process.unseen_error(present, present_status.reason, gone)
            if should_attach(present_status, entry):
                entry.handle = present
                return present, True
            # Kill ranks that outlived the attempt's supervisor: they write to the same checkpoints.
            process.end_leftovers(present)
            hosts.end_ranks(ctx, entry, needed=hosts.names(ctx))
        hosts.claim(ctx, entry)
        output = ctx.output.local if ctx.run.output is not None else None
        mount = output and str(disk.mount_point(output))  # the export refuses if it is gone by then
        description = attempt_of(ctx, staged, built)
        description = description.model_copy(update={"hosts": hosts.names(ctx), "output_mount": mount})
        begin_attempt(entry, entry.attempt + 1, description)
        ctx.ledger.save(entry)
        placement = _place(ctx, staged, built, entry)
        returned = str(Path(placement.output).with_name(RETURNED))  # for the value of a notebook's function
        for folder in (placement.output, returned, placement.checkpoints):
            hosts.make_folder(ctx, Path(folder))
        hosts.copy_folder(ctx, Path(built.code) if built.code else None, Path(placement.code))
        timeouts = ctx.run.run_timeout, ctx.run.start_timeout, ctx.run.stall_timeout
        job = process.Job(ctx.name, entry.attempt, *timeouts)
        command = _describe(ctx, placement)[-1]  # on machines, there is only one
        handle = process.start(command, Path(placement.attempt_directory), job, lock)
        entry.handle = handle
        return handle, False


def present_handle(ctx: MachineContext, entry: Entry) -> ProcessHandle | None:
    """Find the handle of the present attempt, even if the launch was killed before it recorded the handle.

    None: no process of the attempt was started, or there is no attempt.
    """
    if entry.attempt == 0:
        return None
    recorded = entry.handle if isinstance(entry.handle, ProcessHandle) else None
    return recorded or process.read_handle(attempt_directory(ctx, entry.attempt))


def objects(ctx: MachineContext) -> list[dict[str, Any]]:
    """List the processes that a launch would start, without staging or building."""
    # Placeholders: staging chooses the paths, by the hash of the content.
    staged = Staged(data=ctx.run.data and "<data>", model=ctx.run.model and "<model>")
    _, arguments = program_of(ctx)
    built = Built(code=None, program=arguments, digest="")
    return _describe(ctx, _place(ctx, staged, built, entry=None))


def _describe(ctx: MachineContext, placement: Placement) -> list[dict[str, Any]]:
    """Describe the processes to start.

    On ``local``, they use the caches of Hugging Face that the user's environment names. On hosts, or if it
    names none, the caches are in the target's folder.
    """
    described = LAUNCHERS[ctx.target.launch].objects(ctx.run, ctx.target, placement)
    if not isinstance(ctx.target, BareMetal):
        home = os.environ.get("HF_HOME")
        # If only HF_HOME is set, take its folder: else the HF_DATASETS_CACHE of the launcher would win.
        datasets = os.environ.get("HF_DATASETS_CACHE") or (home and str(Path(home) / "datasets"))
        caches = {"HF_HOME": home, "HF_DATASETS_CACHE": datasets}  # with downloads and the user's token
        set_caches = {name: value for name, value in caches.items() if value}
        described[-1]["env"] |= set_caches | ctx.run.env  # run.env wins
    return described


def _place(ctx: MachineContext, staged: Staged, built: Built, entry: Entry | None) -> Placement:
    """Choose the paths of an attempt on its nodes, and the hosts, the MPI and the port that it needs.

    The attempt is the present one of the ledger's ``entry``. None: the first one of a new run.
    """
    attempt = 1 if entry is None else entry.attempt
    folder = attempt_directory(ctx, attempt)
    common: dict[str, Any] = {
        "name": ctx.name,
        "attempt": attempt,
        "python": sys.executable,
        "code": str(working_folder(folder)),
        "program": built.program,
        "data": staged.data,
        "model": staged.model,
        # Each attempt has its own output: files of a failed attempt must not count as a model.
        "output": str(folder / "output"),
        "checkpoints": checkpoints_of(ctx, entry, directory_of(ctx)),
        "caches": str(home_of(ctx) / "caches"),
        "attempt_directory": str(folder),
        "resume_from": ctx.run.resume_from,
    }
    if ctx.target.launch == "mpirun":
        common["mpi"] = mpi.find(ctx.target.mpi)
    if isinstance(ctx.target, BareMetal):
        return Placement(**common | host_adapter.placement(ctx.target, ctx.run))
    if ctx.target.launch == "mpirun":  # other launch kinds choose the port of the ranks themselves
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))  # 0: the system chooses a free port
            common["master_port"] = int(listener.getsockname()[1])
    return Placement(**common)
