"""One run on one target, and where its things are: what every verb is given."""

import json
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manycpu.pipeline.adapters.storage import Location, is_remote
from manycpu.pipeline.ledger import Entry, Ledger
from manycpu.pipeline.ledger.base import LEASE_S
from manycpu.pipeline.ledger.file import FileLedger
from manycpu.pipeline.spec.credentials import redacted_description
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.naming import run_key
from manycpu.pipeline.spec.targets import BareMetal, Kubernetes, Local, Target
from manycpu.pipeline.spec.training_run import TrainingRun

if TYPE_CHECKING:
    from manycpu.pipeline.adapters.cluster import Cluster
    from manycpu.pipeline.ledger.configmap import ConfigMapLedger

__all__ = [
    "OWN_FOLDERS",
    "WAY",
    "Access",
    "ClusterContext",
    "MachineContext",
    "RunContext",
    "home",
]

OWN_FOLDERS = ("runs", "data", "model", "code", "functions")
"""Folders of a target's folder in which what no run needs is deleted."""
WAY = ("connection", "directory")
"""Fields of a target that say where a run is and how it is reached: not what an attempt was started with."""


@dataclass(frozen=True)
class RunContext(ABC):
    """A validated run and target with absolute paths, and the key that tells this run from every other."""

    run: TrainingRun
    target: Target
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

    @property
    @abstractmethod
    def ledger(self) -> Ledger:
        """The run's ledger."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Where the run's things are, for people."""

    @property
    @abstractmethod
    def location(self) -> tuple[str, ...]:
        """The options by which a command finds the run; none where it looks there anyway."""

    def typed(self, command: str, *options: str) -> str:
        """Write a command for this run, as it is typed."""
        return shlex.join(["manycpu", command, self.name, *options, *self.location])

    @property
    def deletion(self) -> str:
        """The command with which a person deletes the run, whatever is kept of it."""
        return self.typed("clean", "--delete-model")

    @property
    def waiting_lease(self) -> float:
        """Seconds that a run is let be from its launch on: by then its training has ended."""
        return LEASE_S + self.run.longest

    @property
    def destination(self) -> str:
        """Path or URL of the folder of the report, and of the model where there is to be one."""
        folder = home(getattr(self.target, "directory", None))
        return self.run.output or str(folder / "reports" / self.name)

    @property
    def output_in_cluster(self) -> bool:
        """Whether the output is reached from inside a cluster, and never from here."""
        return False

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
        return self.run.model_dump(mode="json", exclude_defaults=True) | {"backend": self.run.backend}

    @property
    def target_fields(self) -> dict[str, Any]:
        """The target as ledgers keep it."""
        return self.target.model_dump(mode="json", exclude_none=True)

    def origin(self, *fields: str) -> str:
        """Hash fields of the run, with the target: what was made from others is not what is asked for."""
        target = {name: value for name, value in self.target_fields.items() if name not in WAY}
        return run_key(*(getattr(self.run, field) for field in fields), json.dumps(target, sort_keys=True))


@dataclass(frozen=True)
class MachineContext(RunContext):
    """A run on this machine, or on the hosts of a hostfile."""

    target: Local | BareMetal

    @property
    def home(self) -> Path:
        """The target's folder: what stands for the volume."""
        return home(self.target.directory)

    @property
    def directory(self) -> Path:
        """The run's own folder."""
        return self.home / "runs" / self.name

    @property
    def where(self) -> str:
        """The run's own folder."""
        return str(self.directory)

    @property
    def location(self) -> tuple[str, ...]:
        """The folder of runs."""
        return () if self.target.directory is None or self.home == home() else ("--directory", str(self.home))

    @property
    def ledger(self) -> FileLedger:
        """The run's ledger: a file in its folder."""
        return FileLedger(self.directory)

    def attempt_directory(self, attempt: int) -> Path:
        """Folder of one attempt: log, handle, exit record."""
        return self.directory / "attempts" / str(attempt)


@dataclass(frozen=True)
class Access:
    """What Airflow's connections give instead of files: secrets, which stay in this process."""

    connect: Callable[[], Any] | None = None
    """Makes a client of the cluster; None: as ``target.connection`` says."""
    cluster: Any = None
    """A namespace that is open already, for many runs to share."""
    registry_login: Mapping[str, str] | None = None
    """``username`` and ``password`` of the registry; None: as ``target.registry_connection`` says."""


@dataclass(frozen=True)
class ClusterContext(RunContext):
    """A run on Kubernetes."""

    target: Kubernetes
    access: Access = Access()

    @cached_property
    def cluster(self) -> "Cluster":
        """The run's namespace.

        Raises:
            ClusterError: No cluster can be reached.
        """
        if self.access.cluster is not None:
            shared: Cluster = self.access.cluster
            return shared
        from manycpu.pipeline.adapters import cluster

        connect = self.access.connect or partial(cluster.connect, self.target.connection)
        namespace: Cluster = cluster.Cluster(connect, self.target.namespace)
        return namespace

    @property
    def run_fields(self) -> dict[str, Any]:
        """The run without its secrets: whoever may read ConfigMaps of the namespace reads its ledger."""
        return redacted_description(super().run_fields)

    @property
    def target_fields(self) -> dict[str, Any]:
        """The target, likewise."""
        return redacted_description(super().target_fields)

    @cached_property
    def ledger(self) -> "ConfigMapLedger":
        """The run's ledger: a ConfigMap."""
        from manycpu.pipeline.ledger.configmap import ConfigMapLedger

        return ConfigMapLedger(self.cluster, self.name)

    @property
    def location(self) -> tuple[str, ...]:
        """The namespace, and the kubeconfig where one is named."""
        given = self.target.connection
        return ("--namespace", self.target.namespace, *(("--connection", given) if given else ()))

    @property
    def where(self) -> str:
        """The namespace, and the run's name there."""
        return f"{self.target.namespace}/{self.name}"

    @property
    def directory(self) -> str:
        """The run's own folder on the volume."""
        return f"{self.target.home}/runs/{self.name}"

    @property
    def output_in_cluster(self) -> bool:
        """Whether the output is a URL: the worker needs neither its credentials nor a way to it."""
        return is_remote(self.destination)

    @property
    def claim(self) -> str:
        """Name of the claim: the target's, or the one made for the run."""
        return self.target.claim or f"{self.name}-data"

    def attempt_directory(self, attempt: int) -> str:
        """Folder of one attempt on the volume."""
        return f"{self.directory}/attempts/{attempt}"


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
