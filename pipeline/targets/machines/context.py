"""The context of a run on this machine or on the hosts of a hostfile, and the paths of its folders."""

from pathlib import Path
from typing import TypeAlias

from typing_extensions import TypeIs

from manycpu.pipeline.ledger.file import FileLedger
from manycpu.pipeline.spec.targets import BareMetal, Local
from manycpu.pipeline.targets.context import RunContext, home

MachineContext: TypeAlias = RunContext[Local | BareMetal, FileLedger]


def is_on_machines(ctx: RunContext) -> TypeIs[MachineContext]:
    """Whether the target of a run is ``local`` or ``baremetal``."""
    return isinstance(ctx.target, (Local, BareMetal))


def home_of(ctx: MachineContext) -> Path:
    """Return the target's folder, which machines use as the volume."""
    return home(ctx.target.directory)


def directory_of(ctx: MachineContext) -> Path:
    """Return the run's own folder."""
    return home_of(ctx) / "runs" / ctx.name


def attempt_directory(ctx: MachineContext, attempt: int) -> Path:
    """Return the folder of an attempt, with its log, handle and exit record."""
    return directory_of(ctx) / "attempts" / str(attempt)


def working_folder(attempt: Path) -> Path:
    """Return the working folder of an attempt's program; its parent also belongs to the attempt alone."""
    return attempt / "work" / "code"
