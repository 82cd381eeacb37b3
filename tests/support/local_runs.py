"""The runs of a folder on this machine."""

from pathlib import Path

from manycpu.pipeline.spec.targets import Local
from manycpu.pipeline.targets import driver_of
from manycpu.pipeline.targets.context import RunContext


def on_this_machine(home: Path) -> list[RunContext]:
    """Find the runs of a target's folder, oldest first."""
    return driver_of("local").runs(Local(directory=str(home)))
