"""One run on one target, and where its things are: what every verb is given."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.ledger import Entry, Ledger
from manycpu.pipeline.spec import cpu_plan, program
from manycpu.pipeline.spec.machine import Machine
from manycpu.pipeline.spec.naming import run_key, run_name
from manycpu.pipeline.spec.targets import BareMetal, Local, Target
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.spec.validation import read_run, read_target

__all__ = ["RunContext", "home", "open_context", "reopen"]


@dataclass(frozen=True)
class RunContext:
    """A validated run and target with absolute paths, and the key that tells this run from every other."""

    run: TrainingRun
    target: Target
    key: str
    base: Path
    """Folder that relative paths started from; modules of the user's own are looked for there."""

    @property
    def name(self) -> str:
        """Name of the run, and of everything it makes."""
        return run_name(self.run.label, self.key)

    @property
    def home(self) -> Path:
        """The target's folder: what stands for the volume."""
        return home(self.target.directory)

    @property
    def directory(self) -> Path:
        """The run's own folder."""
        return self.home / "runs" / self.name

    @property
    def ledger(self) -> Ledger:
        """The run's ledger."""
        return Ledger(self.directory)

    @cached_property
    def output(self) -> Location:
        """Where the model and the report go."""
        return Location.of(self.run.output, "run.output")

    def attempt_directory(self, attempt: int) -> Path:
        """Folder of one attempt: log, handle, exit record."""
        return self.directory / "attempts" / str(attempt)

    def new_entry(self, created: float) -> Entry:
        """Begin a ledger entry."""
        return Entry(
            key=self.key,
            name=self.name,
            created=created,
            run=self.run.model_dump(mode="json", exclude_defaults=True),
            target=self.target.model_dump(mode="json", exclude_none=True),
        )


def home(directory: str | None = None) -> Path:
    """Find the folder for runs, staged data and code: the one given, $MANYCPU_HOME, or ~/.manycpu."""
    return Path(directory or os.environ.get("MANYCPU_HOME") or "~/.manycpu").expanduser().absolute()


def open_context(
    run: Mapping[str, Any] | TrainingRun,
    target: Mapping[str, Any] | Target | None,
    *identity: object,
    base: Path,
) -> RunContext:
    """Validate a run and a target, and make their paths absolute.

    Args:
        run: The run, or its fields.
        target: The target, or its fields; None is this machine.
        identity: What tells this run from every other.
        base: Folder that relative paths start from: the run file's, or the DAG file's.

    Raises:
        BadInputError: A field is wrong.
    """
    where = read_target(target)
    found = _sized(read_run(run), where)
    return RunContext(
        _anchored(found, base), _anchored_target(where, base), run_key(*identity), base.absolute()
    )


def _sized(run: TrainingRun, target: Target) -> TrainingRun:
    """Choose the processes of this machine where the run leaves them open."""
    if not isinstance(target, Local) or "nproc_per_node" in run.model_fields_set:
        return run
    made = cpu_plan.plan(Machine.observe(), run.wanted)
    return run.model_copy(update={"nproc_per_node": made.processes})


def _anchored(run: TrainingRun, base: Path) -> TrainingRun:
    fields = ("data", "model", "output", "checkpoints", "resume_from")
    found = {field: _absolute(getattr(run, field), base) for field in fields}
    if program.parse(run.program).kind == "script":
        found["program"] = _absolute(run.program, base)
    return run.model_copy(update=found)


def _anchored_target(target: Target, base: Path) -> Target:
    paths = {"directory": target.directory and _absolute(target.directory, base)}
    if isinstance(target, BareMetal):
        paths["hostfile"] = _absolute(target.hostfile, base)
    return target.model_copy(update=paths)


def _absolute(path: str | None, base: Path) -> str | None:
    if path is None or "://" in path:
        return path
    return os.path.normpath(base.absolute() / Path(path).expanduser())


def reopen(ledger: Ledger) -> RunContext:
    """Go on with a run that has begun, from what its ledger holds."""
    entry = ledger.read()
    directory = str(ledger.directory.parents[1])
    target = read_target({**entry.target, "directory": directory})
    return RunContext(read_run(entry.run), target, entry.key, ledger.directory)
