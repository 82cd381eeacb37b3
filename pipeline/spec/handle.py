"""The identity of something started: JSON that a trigger, a retry or another process can find it by."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["Handle", "ProcessHandle"]


class ProcessHandle(BaseModel):
    """A supervised training on this machine (or started from it, for ``baremetal``)."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["process"] = "process"
    run: str
    """Name of the run."""
    attempt: int
    host: str
    boot_id: str
    """The kernel's boot id: after a restart, a process of the same pid is another one."""
    pid: int
    start_time: float
    """Seconds since the epoch, as the kernel records it: tells a reused pid."""
    directory: str
    """The attempt's folder, with its log and, once it ended, its exit record."""


Handle = ProcessHandle
