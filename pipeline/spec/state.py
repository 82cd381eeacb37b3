"""The state of a training, the same for every target."""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from manycpu.pipeline.spec.exit_records import EXIT_CODES

_SHORT_CHARACTERS = 500


class RunState(StrEnum):
    """The state of a training."""

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """It may run: it was started on another host, or in another container."""

    @property
    def terminal(self) -> bool:
        """Whether the state is final."""
        return self in (RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED)


class RankFailure(BaseModel):
    """How the first rank that failed ended."""

    model_config = ConfigDict(frozen=True)

    rank: int
    host: str
    exit_code: int
    last_lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"rank {self.rank} on {self.host} failed first, {describe_exit(self.exit_code)}"
        return "\n".join([f"{head}; its last lines:", *self.last_lines]) if self.last_lines else head


class Status(BaseModel):
    """A state with its reason."""

    model_config = ConfigDict(frozen=True)

    state: RunState
    reason: str = ""
    failure: RankFailure | None = None
    budget: str | None = None
    """The field of the run whose time budget ended it; None: no budget did."""
    by_itself: bool = False
    """Whether the training itself failed, by an exit code or a time budget; else the cause is unknown."""

    @property
    def in_short(self) -> str:
        """The reason in one line, or which rank failed first."""
        first, _, _ = (self.reason or str(self.failure or "")).partition("\n")
        return first[:_SHORT_CHARACTERS]

    @property
    def refused(self) -> bool:
        """Whether manycpu itself ended a rank, with one of its own exit codes: a retry would end the same."""
        return self.failure is not None and self.failure.exit_code in EXIT_CODES


def describe_exit(code: int) -> str:
    """Describe an exit code in words; negative codes are signals, as in :mod:`subprocess`."""
    if code in EXIT_CODES:
        return f"exit code {code} ({EXIT_CODES[code]})"
    if code == -9:  # noqa: PLR2004 - SIGKILL
        return "killed by signal 9 (SIGKILL: often the kernel, for lack of memory)"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
