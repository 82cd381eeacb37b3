"""The paths and settings of a run on its nodes, as stage, build and target chose them: a launcher's input."""

from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline.spec.naming import secret_name
from manycpu.pipeline.spec.targets import Family

CODE: Final = "/opt/manycpu/code"
"""Where images have the snapshot of the code."""
LIB: Final = "/opt/manycpu/lib"
"""Where images have manycpu itself, of the version that started the run."""


class Host(NamedTuple):
    """A host of a hostfile; ``slots`` None: the file gives no number of processes."""

    name: str
    slots: int | None = None


class Mpi(BaseModel):
    """An installed MPI; its family decides the options that mpirun takes."""

    model_config = ConfigDict(frozen=True)

    family: Family
    version: str
    mpirun: str
    """Absolute path of its mpirun."""
    env: dict[str, str] = {}
    """Variables that it needs, such as I_MPI_ROOT."""


class Placement(BaseModel):
    """The paths and settings of a run on its nodes. All paths are absolute and the same on every node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    attempt: int
    python: str
    code: str
    """Working folder of the program: its code, on machines a copy of the attempt's own."""
    program: tuple[str, ...]
    """The program as Python's arguments: ``("-m", "module")`` or ``("train.py",)``."""
    data: str | None = None
    model: str | None = None
    output: str
    checkpoints: str
    caches: str
    """Folder for the caches of the Hub and of datasets."""
    attempt_directory: str
    """Folder of this attempt on the machine that starts the launcher: log, hostfile, exit record."""
    resume_from: str | None = None
    mpi: Mpi | None = None
    hosts: tuple[Host, ...] = ()
    """Empty for ``local``."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launcher_address: str | None = None
    """Address of the machine that starts the launcher, as the hosts see it."""
    launcher_interface: str | None = None
    """The network interface that has this address."""
    image: str = ""
    """The image by digest; this and the next fields are for Kubernetes."""
    claim: str = ""
    """The PersistentVolumeClaim: one that exists, or one made for the run."""
    owners: tuple[dict[str, Any], ...] = ()
    """The ownerReferences of everything that the run creates: they name its ledger."""

    @property
    def job(self) -> str:
        """Name of this attempt's job."""
        return f"{self.name}-{self.attempt}"

    @property
    def secret(self) -> str:
        """Name of the Secret with the run's secret variables."""
        return secret_name(self.name)
