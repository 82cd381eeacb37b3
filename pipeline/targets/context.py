"""The context of a run on a target: the argument of every verb."""

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, cast

from pydantic import BaseModel, ConfigDict
from typing_extensions import TypeVar

from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.ledger import Entry, Ledger
from manycpu.pipeline.ledger.base import LEASE_S
from manycpu.pipeline.spec.credentials import redacted
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.naming import run_key
from manycpu.pipeline.spec.output import claim_key
from manycpu.pipeline.spec.targets import TargetFields
from manycpu.pipeline.spec.training_run import TrainingRun, passable

if TYPE_CHECKING:
    from manycpu.pipeline.targets import Driver

OWN_FOLDERS = ("runs", "data", "model", "code", "functions")
"""Subfolders of a target's folder in which manycpu deletes what no run needs any more."""


@dataclass(frozen=True)
class Access:
    """Access to a cluster and a registry through Airflow's connections; their secrets stay in this process.

    It also holds the connections that a driver has opened, so that several contexts share them.
    """

    connect: Callable[[], Any] | None = None
    """Makes a client of the cluster; None: ``target.connection`` decides."""
    registry_login: Mapping[str, str] | None = None
    """``username`` and ``password`` of the registry; None: ``target.registry_connection`` decides."""
    opened: dict[str, Any] = field(default_factory=dict)
    """Name that the driver chose -> open connection."""


Target_co = TypeVar("Target_co", bound=TargetFields, covariant=True, default=TargetFields)
Ledger_co = TypeVar("Ledger_co", bound=Ledger, covariant=True, default=Ledger)


@dataclass(frozen=True)
class RunContext(Generic[Target_co, Ledger_co]):
    """A validated run and target with absolute paths, and the key that tells the run from others."""

    run: TrainingRun
    target: Target_co
    key: str
    base: Path
    """Folder that relative paths started from; a program that is a module is searched there first."""
    name: str
    """Name of the run, and of the objects it creates; it stays when the fields of the run are edited."""
    task: str = ""
    """The Airflow task that works on the run, for messages; empty outside of Airflow."""
    dag: Mapping[str, str] = field(default_factory=dict, compare=False)
    """``dag_id``, ``run_id`` and perhaps ``partition_key`` of the DAG run, and the ``instance`` of Airflow;
    empty outside of Airflow."""
    run_id: str = field(default="", compare=False)
    """What resumes the run as ``--run-id``, or in a notebook as ``run_id``; empty: a task of Airflow does."""
    run_file: Path | None = None
    """The file that the run was read from; it may contain secrets, so it never travels as code."""
    needs: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Package -> version that the nodes must have, if pickled objects travel to them (Python, torch, ...)."""
    access: Access = field(default_factory=Access, compare=False)
    """Access to the target through Airflow's connections, if any."""

    @cached_property
    def driver(self) -> "Driver[Any, Any]":
        """The driver of the run's target, imported on first use."""
        from manycpu.pipeline.targets import driver_of

        return driver_of(self.target.kind)

    @cached_property
    def ledger(self) -> Ledger_co:
        """The run's ledger."""
        ledger = cast("Ledger_co", self.driver.ledger(self))
        ledger.location = self.driver.location(self)  # for the commands that its errors suggest
        return ledger

    @property
    def claim_key(self) -> str:
        """The key of the run's claim on its output: a run with the same id and another ledger has another."""
        return claim_key(self.key, self.ledger.identity())

    @property
    def where(self) -> str:
        """The place of the run, such as its folder or namespace, for messages."""
        return self.driver.where(self)

    def typed(self, command: str, *options: str) -> str:
        """Write a ``manycpu`` command for this run, as a person types it."""
        return shlex.join(["manycpu", command, self.name, *options, *self.driver.location(self)])

    @property
    def deletion(self) -> str:
        """The command that deletes the run, with everything that is kept of it."""
        return self.typed("clean", "--delete-model")

    @property
    def waiting_lease(self) -> float:
        """Seconds that the lease lasts after a launch: more than all time budgets of an attempt together."""
        return LEASE_S + self.run.longest

    @property
    def destination(self) -> str:
        """Path or URL of the output: ``run.output``; if that is null, a folder that gets the report only."""
        folder = home(getattr(self.target, "directory", None))  # only targets on machines have the field
        return self.run.output or str(folder / "reports" / self.name)

    @property
    def output_in_cluster(self) -> bool:
        """Whether only the target, from inside a cluster, reads and writes the output."""
        return self.driver.reaches_output(self)

    @property
    def output(self) -> Location:
        """The folder of the report and the model, opened for access with the present login."""
        return Location.of(self.destination, "run.output")

    def new_entry(self, created: float) -> Entry:
        """Make the entry with which the run's ledger begins; ``created`` is in seconds since the epoch."""
        return Entry(
            key=self.key,
            name=self.name,
            created=created,
            run=self.run_fields,
            target=self.target_fields,
            dag=dict(self.dag),
            run_id=self.run_id,
        )

    @property
    def run_fields(self) -> dict[str, Any]:
        """The run as ledgers record it: the fields that differ from the defaults, and always the backend.

        The target leaves out secrets if others may read its ledgers.
        """
        fields = self.run.model_dump(mode="json", exclude_defaults=True) | {"backend": self.run.backend}
        return self.target.recorded(fields)

    @property
    def target_fields(self) -> dict[str, Any]:
        """The target as ledgers record it."""
        return self.target.recorded(self.target.model_dump(mode="json", exclude_none=True))

    def origin(self, *fields: str) -> str:
        """Hash the given fields of the run, and the target: what was made with the same hash is reused.

        Fields of the target that only say how to reach it, such as a connection, do not count.
        """
        target = {
            name: value for name, value in self.target_fields.items() if name not in self.target.reached_by
        }
        return run_key(*(getattr(self.run, field) for field in fields), json.dumps(target, sort_keys=True))


def home(directory: str | None = None) -> Path:
    """Return the folder for runs, data and code: ``directory``, else $MANYCPU_HOME, else ~/.manycpu.

    Raises:
        BadInputError: The user's home folder is unknown, or the path is no UTF-8 or a URL of another host.
    """
    named = directory or os.environ.get("MANYCPU_HOME") or "~/.manycpu"
    folder = Path(without_protocol(named, "target.directory"))
    try:
        return Path(passable(str(folder.expanduser().absolute())))
    except (RuntimeError, ValueError) as error:  # no $HOME, and no entry in /etc/passwd; or no UTF-8
        raise BadInputError(
            f"{str(folder)!r} cannot be used: {error}",
            field="target.directory",
            fix="Set it, or $MANYCPU_HOME or $HOME, to a folder",
        ) from error


def without_protocol(path: str, field: str) -> str:
    """Return the path that a URL of this disk (``file://``, ``local://``) names; return others unchanged.

    Raises:
        BadInputError: The URL names another host than ``localhost``, or no path.

    >>> without_protocol("file://localhost/qa", "run.output"), without_protocol("s3://qa", "run.output")
    ('/qa', 's3://qa')
    """
    if not path.startswith(("file://", "local://")):
        return path
    host, slash, rest = path.partition("://")[2].partition("/")
    if not slash or host not in ("", "localhost"):
        fix = "Give the path alone, or write it after three slashes, as in file:///models/qa"
        raise BadInputError(f"{redacted(path)} names no path of this host", field=field, fix=fix)
    return f"/{rest}"


class Copied(NamedTuple):
    """A staged source: its path on every node, the digest of its manifest, and whether the copy existed."""

    path: str
    digest: str
    reused: bool


class Staged(BaseModel):
    """What was staged: paths of data and model on every node, and the digests of their manifests."""

    model_config = ConfigDict(frozen=True)

    data: str | None = None
    model: str | None = None
    digests: dict[str, str] = {}
    origin: str = ""
    """Hash of the fields that it was staged from; empty: an older version staged it."""


class Built(BaseModel):
    """What was built: the code's folder on every node, the arguments of Python, and the code's digest."""

    model_config = ConfigDict(frozen=True)

    code: str | None
    """None: the code is part of manycpu, or installed in the environment or image."""
    program: tuple[str, ...]
    digest: str
    image: str | None = None
    """The image by digest, on targets that have images."""
    origin: str = ""
    """Hash of the fields that it was built from; empty: an older version built it."""
