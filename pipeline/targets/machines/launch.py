"""Launch a training on machines as a supervised process, and judge its status."""

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from manycpu.pipeline.adapters import hosts as host_adapter
from manycpu.pipeline.adapters import mpi, process
from manycpu.pipeline.launchers import LAUNCHERS
from manycpu.pipeline.launchers.states import process_state
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.observed import believe
from manycpu.pipeline.spec import exit_records
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.output import RETURNED
from manycpu.pipeline.spec.placement import Placement
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.targets import BareMetal
from manycpu.pipeline.targets.attempt import attempt_of, attempt_status, checkpoints_of, goes_on, join
from manycpu.pipeline.targets.machines import hosts
from manycpu.pipeline.targets.machines.activity_log import ActivityLog
from manycpu.pipeline.targets.machines.context import MachineContext, attempt_directory, directory_of, home_of
from manycpu.pipeline.targets.outcome import outcome
from manycpu.pipeline.targets.program_code import program_of
from manycpu.pipeline.targets.results import Built, Staged

__all__ = ["launch", "objects", "place", "present_handle", "status", "working_folder"]


def launch(ctx: MachineContext, staged: Staged, built: Built) -> tuple[ProcessHandle, bool]:
    """Start the next attempt, or attach to the present one if it runs or has succeeded; True: attached.

    The attempt is recorded before anything starts. The ledger's lock keeps other processes from launching.

    Raises:
        ForeignRunError: Another task trains this run, with other fields.
        LaunchError: No MPI was found, a host cannot be reached, or the supervisor does not start.
        UnseenError: This host cannot see whether the present attempt still runs.
    """
    with ctx.ledger.hold() as (entry, lock):
        join(ctx, entry, "train")
        present = present_handle(ctx, entry)
        if present is not None:
            current = attempt_status(ctx, present, entry)
            if current.state is RunState.UNKNOWN:
                raise process.unseen_error(present, current.reason)
            if goes_on(current, entry):
                entry.handle = present
                return present, True
            process.end_leftovers(present)
        entry.attempt += 1
        described = attempt_of(ctx, staged, built)
        entry.attempts[entry.attempt] = described.model_copy(update={"hosts": hosts.names(ctx)})
        entry.handle = entry.export = None
        entry.verbs.pop("wait", None)  # it belongs to the attempt before
        ctx.ledger.save(entry)
        placement = place(ctx, staged, built, entry.attempt)
        beside = str(Path(placement.output).with_name(RETURNED))
        for folder in (placement.output, beside, placement.checkpoints):
            hosts.make_folder(ctx, Path(folder))
        hosts.copy_folder(ctx, Path(built.code) if built.code else None, Path(placement.code))
        handle = process.start(
            _described(ctx, placement)[-1],
            Path(placement.attempt_directory),
            _job(ctx, entry.attempt),
            lock,
        )
        entry.handle = handle
        return handle, False


def status(
    ctx: MachineContext, handle: ProcessHandle, entry: Entry, activity: ActivityLog | None = None
) -> Status:
    """Read the status of an attempt; a success needs the proof of scale.

    Args:
        ctx: The run, as the attempt was started.
        handle: The attempt.
        entry: The ledger's entry.
        activity: The reader of its log; None: a new one, which resumes from the saved offset.
    """
    observation = process.observe(handle)  # before the log: the end comes after the last line
    observed = activity.read_new() if activity else ActivityLog(Path(handle.directory)).read_all()
    facts = {"cancelled": handle.attempt in entry.cancelled, "met": observed.met}
    status = process_state(observation | facts)
    if status.state is RunState.FAILED and _says_nothing(observation["exit"]):
        status = _by_records(handle, status, observed)
    if (
        status.state is RunState.FAILED
        and observation["exit"] is None
        and entry.cancelled_by_person(handle.attempt)
    ):
        # The supervisor was killed after the cancellation, before it wrote its exit record.
        status = Status(state=RunState.CANCELLED, reason=status.reason)
    return outcome(ctx, status, observed) if status.state is RunState.SUCCEEDED else status


def _says_nothing(record: Mapping[str, Any] | None) -> bool:
    """Whether the exit record does not say how the ranks ended: it is missing, or a budget was used up."""
    return record is None or bool(record["reason"])


def _by_records(handle: ProcessHandle, status: Status, observed: Observed) -> Status:
    """Turn a failure into a success if the exit records show that all ranks had finished."""
    with suppress(OSError):
        believe(observed, exit_records.finished_round(Path(handle.directory) / exit_records.FOLDER))
    if not observed.finished:
        return status
    return Status(state=RunState.SUCCEEDED, reason=f"all ranks had finished before: {status.in_short}")


def present_handle(ctx: MachineContext, entry: Entry) -> ProcessHandle | None:
    """Find the handle of the present attempt, even if the launch was killed before it recorded it."""
    if entry.attempt == 0:
        return None
    recorded = entry.handle if isinstance(entry.handle, ProcessHandle) else None
    return recorded or process.read_handle(attempt_directory(ctx, entry.attempt))


def objects(ctx: MachineContext) -> list[dict[str, Any]]:
    """List the processes that a launch would start, without staging or building."""
    staged = Staged(data=ctx.run.data and "<data>", model=ctx.run.model and "<model>")
    _, arguments = program_of(ctx)
    built = Built(code=None, program=arguments, digest="")
    return _described(ctx, place(ctx, staged, built, 1))


def _described(ctx: MachineContext, placement: Placement) -> list[dict[str, Any]]:
    """Describe the launch; on ``local``, with the Hugging Face caches of the user's environment."""
    described = LAUNCHERS[ctx.target.launch].objects(ctx.run, ctx.target, placement)
    if not isinstance(ctx.target, BareMetal):
        described[-1]["env"] |= _caches_of_user(os.environ) | ctx.run.env
    return described


def _caches_of_user(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with Hugging Face's caches, where downloads and the user's token are."""
    home = environ.get("HF_HOME")
    datasets = environ.get("HF_DATASETS_CACHE") or (home and str(Path(home) / "datasets"))
    named = {"HF_HOME": home, "HF_DATASETS_CACHE": datasets}
    return {name: value for name, value in named.items() if value}


def place(ctx: MachineContext, staged: Staged, built: Built, attempt: int) -> Placement:
    """Decide the paths of an attempt on its nodes.

    Raises:
        LaunchError: No usable MPI was found.
    """
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
        "checkpoints": checkpoints_of(ctx, directory_of(ctx)),
        "caches": str(home_of(ctx) / "caches"),
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


def working_folder(attempt: Path) -> Path:
    """Return the working folder of an attempt's program; its parent also belongs to the attempt alone."""
    return attempt / "work" / "code"


def free_port() -> int:
    """Find a free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _job(ctx: MachineContext, attempt: int) -> process.Job:
    run = ctx.run
    return process.Job(ctx.name, attempt, run.run_timeout, run.start_timeout, run.stall_timeout)
