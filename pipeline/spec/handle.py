"""Handles: JSON by which a trigger, a retry or another process finds a training that was started.

Each kind has ``kind``, ``run``, ``attempt``, ``began``, and a text for logs (``str``).
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from manycpu.pipeline.spec.errors import BadInputError


class ProcessHandle(BaseModel):
    """A supervised training on this machine (or started from it, for ``baremetal``)."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["process"] = "process"
    run: str
    """Name of the run."""
    attempt: int
    host: str
    boot_id: str
    """The kernel's boot id: after a restart, the same pid is another process."""
    pid: int
    start_time: float
    """Seconds since the epoch, by the clock at its start."""
    start_ticks: int | None = None
    """Clock ticks from boot to its start, which do not change with the clock: detects a reused pid."""
    pid_namespace: str | None = None
    """The kernel's name of its PID namespace: containers have their own process ids."""
    machine: str | None = None
    """Digest of the machine's id: distinguishes a restart from another machine of the same name."""
    directory: str
    """The attempt's folder, with its log and, once it ended, its exit record."""

    @property
    def began(self) -> float:
        """Seconds since the epoch at which the attempt was started."""
        return self.start_time

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class JobHandle(BaseModel):
    """A job of one of Kubeflow's operators."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["job"] = "job"
    run: str
    """Name of the run, and of its ledger."""
    attempt: int
    launch: str
    """The launch kind, such as ``pytorchjob``."""
    namespace: str
    name: str
    uid: str
    """Distinguishes this job from a later one of the same name."""
    created: float
    """Seconds since the epoch, by the API server's clock."""
    connection: str | None = None
    """How the cluster is reached: ``target.connection``."""

    @property
    def began(self) -> float:
        """Seconds since the epoch at which the attempt was started."""
        return self.created

    def __str__(self) -> str:
        return f"{self.launch} {self.namespace}/{self.name}"


Handle = Annotated[ProcessHandle | JobHandle, Field(discriminator="kind")]
_HANDLES: TypeAdapter[ProcessHandle | JobHandle] = TypeAdapter(Handle)


def read_handle(fields: object) -> ProcessHandle | JobHandle:
    """Read a handle from its JSON.

    Raises:
        BadInputError: ``fields`` is no handle.
    """
    try:
        return _HANDLES.validate_python(fields)
    except ValidationError as error:
        raise BadInputError(
            f"{fields!r} is no handle",
            field="handle",
            fix="Give what the task that trains returned: if a person marked it successful, clear it",
        ) from error
