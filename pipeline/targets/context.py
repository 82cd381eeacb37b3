"""One run on one target: what every verb is given."""

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, cast

from typing_extensions import TypeVar

from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.ledger import Entry, Ledger
from manycpu.pipeline.ledger.base import LEASE_S
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.naming import run_key
from manycpu.pipeline.spec.targets import TargetFields
from manycpu.pipeline.spec.training_run import TrainingRun

if TYPE_CHECKING:
    from manycpu.pipeline.targets import Driver

__all__ = ["OWN_FOLDERS", "WAY", "Access", "RunContext", "home"]

OWN_FOLDERS = ("runs", "data", "model", "code", "functions")
"""Folders of a target's folder in which what no run needs is deleted."""
WAY = ("connection", "directory")
"""Fields of a target that say where a run is and how it is reached: not what an attempt was started with."""


@dataclass(frozen=True)
class Access:
    """What Airflow's connections give instead of files: secrets, which stay in this process.

    It keeps the connections that a driver opens, so that contexts of one run share them.
    """

    connect: Callable[[], Any] | None = None
    """Makes a client of the cluster; None: as ``target.connection`` says."""
    registry_login: Mapping[str, str] | None = None
    """``username`` and ``password`` of the registry; None: as ``target.registry_connection`` says."""
    opened: dict[str, Any] = field(default_factory=dict)
    """Connections that are open, by the name that the driver gives them."""


Target_co = TypeVar("Target_co", bound=TargetFields, covariant=True, default=TargetFields)
Ledger_co = TypeVar("Ledger_co", bound=Ledger, covariant=True, default=Ledger)


@dataclass(frozen=True)
class RunContext(Generic[Target_co, Ledger_co]):
    """A validated run and target with absolute paths, and the key that tells this run from every other."""

    run: TrainingRun
    target: Target_co
    key: str
    base: Path
    """Folder that relative paths started from; modules of the user's own are looked for there."""
    name: str
    """Name of the run, and of everything it makes: it stays when the run's fields are edited."""
    task: str = ""
    """The task that acts, for people; empty where it is no task."""
    dag: Mapping[str, str] = field(default_factory=dict, compare=False)
    """``dag_id`` and ``run_id`` of the DAG run that it is of; empty where it is of none."""
    run_file: Path | None = None
    """The file that the run was read from, which is no code: it may hold what is for its owner alone."""
    needs: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Versions that the nodes must have, where objects travel to them: of Python, torch, accelerate."""
    access: Access = field(default_factory=Access, compare=False)
    """How the target is reached, where Airflow's connections say so."""

    @cached_property
    def driver(self) -> "Driver[Any, Any]":
        """What the run's kind of target does for each verb; imported on first use."""
        from manycpu.pipeline.targets import driver_of

        return driver_of(self.target.kind)

    @cached_property
    def ledger(self) -> Ledger_co:
        """The run's ledger."""
        return cast("Ledger_co", self.driver.ledger(self))

    @property
    def where(self) -> str:
        """Where the run's things are, for people."""
        return self.driver.where(self)

    def typed(self, command: str, *options: str) -> str:
        """Write a command for this run, as it is typed."""
        return shlex.join(["manycpu", command, self.name, *options, *self.driver.location(self)])

    @property
    def deletion(self) -> str:
        """The command with which a person deletes the run, whatever is kept of it."""
        return self.typed("clean", "--delete-model")

    @property
    def waiting_lease(self) -> float:
        """Seconds that the run's lease lasts from its launch on: by then its training has ended."""
        return LEASE_S + self.run.longest

    @property
    def destination(self) -> str:
        """Path or URL of the folder of the report, and of the model where there is to be one."""
        folder = home(getattr(self.target, "directory", None))
        return self.run.output or str(folder / "reports" / self.name)

    @property
    def output_in_cluster(self) -> bool:
        """Whether the output is reached from inside a cluster, and never from here."""
        return self.driver.reaches_output(self)

    @cached_property
    def output(self) -> Location:
        """Where the model and the report go."""
        return Location.of(self.destination, "run.output")

    def new_entry(self, created: float) -> Entry:
        """Begin a ledger entry."""
        return Entry(
            key=self.key,
            name=self.name,
            created=created,
            run=self.run_fields,
            target=self.target_fields,
            dag=dict(self.dag),
        )

    @property
    def run_fields(self) -> dict[str, Any]:
        """The run as ledgers keep it: what is set, and the backend also where it is left to the ranks."""
        fields = self.run.model_dump(mode="json", exclude_defaults=True) | {"backend": self.run.backend}
        return self.target.recorded(fields)

    @property
    def target_fields(self) -> dict[str, Any]:
        """The target as ledgers keep it."""
        return self.target.recorded(self.target.model_dump(mode="json", exclude_none=True))

    def origin(self, *fields: str) -> str:
        """Hash fields of the run, with the target: what was made from others is not what is asked for."""
        target = {name: value for name, value in self.target_fields.items() if name not in WAY}
        return run_key(*(getattr(self.run, field) for field in fields), json.dumps(target, sort_keys=True))


def home(directory: str | None = None) -> Path:
    """Find the folder for runs, staged data and code: the one given, $MANYCPU_HOME, or ~/.manycpu."""
    folder = Path(directory or os.environ.get("MANYCPU_HOME") or "~/.manycpu")
    try:
        return folder.expanduser().absolute()
    except RuntimeError as error:  # no $HOME, and no entry in /etc/passwd
        raise BadInputError(
            f"{folder} cannot be found: {error}",
            field="target.directory",
            fix="Set it, or $MANYCPU_HOME or $HOME, to a folder",
        ) from error
