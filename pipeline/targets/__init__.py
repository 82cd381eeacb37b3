"""Targets: one driver for each kind, found in one table, and one package for each driver.

A driver has no state: each method is given the run. Its package is imported when a run needs it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from manycpu.pipeline.ledger import Entry, Ledger
from manycpu.pipeline.spec.errors import BadInputError, Finding
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.results import Built, Copied, Staged
from manycpu.pipeline.transfer import Manifest, Progress

__all__ = ["DRIVERS", "Driver", "Watch", "driver_of"]

Ctx = TypeVar("Ctx", bound=RunContext)
H = TypeVar("H", bound=Handle)


class Watch(Protocol):
    """One look after another at a training: its new lines, and its state."""

    ctx: Any
    handle: Any
    spoken: bool
    """Whether a rank has said anything."""
    behind: bool
    """Whether more is there to be read at once: a long log comes in parts."""

    @property
    def observed(self) -> Observed:
        """What the ranks have said, whether or not it could be recorded."""

    @property
    def cursor(self) -> Any:
        """How far the log was read, as JSON: whoever goes on from here misses and repeats nothing."""

    def look(self) -> tuple[list[RankLine], Status]:
        """Read what came since the last look. After a terminal state nothing more comes."""

    def close(self) -> None:
        """Stop watching; a last look may still tell lines that came before."""


class Driver(ABC, Generic[Ctx, H]):
    """What a kind of target does for each verb. Errors are those of the verbs in ``verbs/``."""

    @abstractmethod
    def ledger(self, ctx: Ctx) -> Ledger:
        """Open the run's ledger."""

    @abstractmethod
    def where(self, ctx: Ctx) -> str:
        """Say where the run's things are, for people."""

    @abstractmethod
    def location(self, ctx: Ctx) -> tuple[str, ...]:
        """List the options by which a command finds the run; none where it looks there by default."""

    @abstractmethod
    def names(self, ctx: Ctx) -> list[str]:
        """List the names under which a run with this key has begun."""

    def home(self, ctx: Ctx) -> Path | None:  # noqa: ARG002 - others have one
        """Return the folder of this machine in which manycpu keeps the run; None: it keeps it elsewhere."""
        return None

    def reaches_output(self, ctx: Ctx) -> bool:  # noqa: ARG002 - others do
        """Whether the target itself reaches the output, so that this machine needs no way to it."""
        return False

    def save_image(self, ctx: Ctx, archive: Path) -> str:  # noqa: ARG002 - others have images
        """Write the training image as an OCI archive; return its name."""
        raise BadInputError(f"target {ctx.target.kind} has no images", field="target.kind")

    @abstractmethod
    def findings(self, ctx: Ctx) -> Iterable[Finding]:
        """Check what only this kind of target can have wrong."""

    @abstractmethod
    def stage(self, ctx: Ctx, sources: Mapping[str, str], progress: Progress) -> dict[str, Copied]:
        """Copy sources, by the name of their field, to the volume, each into a folder named by content."""

    @abstractmethod
    def build(self, ctx: Ctx) -> tuple[Built, bool]:
        """Freeze the code; whether it was there before."""

    @abstractmethod
    def launch(self, ctx: Ctx, staged: Staged, built: Built) -> tuple[H, bool]:
        """Start the next attempt, or attach to the present one; whether it was attached to."""

    @abstractmethod
    def objects(self, ctx: Ctx) -> list[dict[str, Any]]:
        """Describe what would be started, with nothing staged or built yet; the job is the last."""

    @abstractmethod
    def present_handle(self, ctx: Ctx, entry: Entry) -> H | None:
        """Find the present attempt, also where whoever started it was killed before it was recorded."""

    @abstractmethod
    def status(self, ctx: Ctx, handle: H, entry: Entry) -> Status:
        """Look at an attempt, as whoever waits for it does."""

    @abstractmethod
    def watch(self, ctx: Ctx, handle: H, cursor: Any) -> Watch:
        """Begin to watch an attempt, or go on from where another watch has come to."""

    @abstractmethod
    def observed_of(self, ctx: Ctx, handle: H) -> Observed:
        """Read what the ranks of an attempt have said."""

    @abstractmethod
    def seconds(self, ctx: Ctx, handle: H) -> float:
        """Tell how many seconds an attempt took; 0 while it has not ended."""

    @abstractmethod
    def cancel(self, ctx: Ctx, by: str, attempt: int | None) -> bool:
        """End the present attempt and record who did so; whether there was something to end."""

    @abstractmethod
    def export(self, ctx: Ctx, handle: H, progress: Progress) -> Manifest:
        """Copy what the program wrote to the output; the manifest has no files where it wrote none."""

    @abstractmethod
    def read_returned(self, ctx: Ctx, handle: H, name: str) -> bytes:
        """Read a file that the function of an attempt returned."""

    @abstractmethod
    def model_of(self, ctx: Ctx, handle: H) -> str:
        """Name the folder that the program of an attempt wrote to, for people."""

    @abstractmethod
    def may_have_model(self, ctx: Ctx, handle: H) -> bool:
        """Whether the program of an attempt may have written files."""

    @abstractmethod
    def strays(self, ctx: Ctx, entry: Entry, handle: H) -> list[str]:
        """Name files that the program wrote elsewhere than to its output."""

    @abstractmethod
    def read_report(self, ctx: Ctx) -> str | None:
        """Read the output's report.json; None where there is none."""

    @abstractmethod
    def write_report(self, ctx: Ctx, text: str) -> None:
        """Write the output's report.json."""

    @abstractmethod
    def keep(self, ctx: Ctx, seconds: float | None) -> list[str]:
        """Note for how long the run is kept (None: for ever); name what is kept."""

    @abstractmethod
    def keep_results(self, ctx: Ctx, seconds: float | None) -> list[str]:
        """Note the same for output and checkpoints, and delete the rest; empty where there are none."""

    @abstractmethod
    def owns(self, ctx: Ctx, what: str) -> bool:
        """Whether something that a report says is kept goes with the run."""

    @abstractmethod
    def remove(self, ctx: Ctx) -> list[str]:
        """Delete what the run owns and see that it is gone; name what is left."""

    @abstractmethod
    def remove_expired(self, ctx: Ctx, now: float, end: Callable[[RunContext], bool]) -> list[Finding]:
        """Delete other runs whose time is over, if ``end`` says that they may go; what troubled that."""

    def declare_gone(self, ctx: Ctx, entry: Entry) -> bool:  # noqa: ARG002 - others can be out of sight
        """Record that the present attempt is gone for good, as a person says; whether that was unknown.

        Raises:
            LaunchError: It runs on this host.
        """
        return False


def _machines() -> Driver[Any, Any]:
    from manycpu.pipeline.targets.machines.driver import MachineDriver

    return MachineDriver()


def _kubernetes() -> Driver[Any, Any]:
    from manycpu.pipeline.targets.kubernetes.driver import KubernetesDriver

    return KubernetesDriver()


DRIVERS: Final[Mapping[str, Callable[[], Driver[Any, Any]]]] = {
    "local": _machines,
    "baremetal": _machines,
    "kubernetes": _kubernetes,
}
"""Kind of target -> loads its driver."""


def driver_of(kind: str) -> Driver[Any, Any]:
    """Load the driver of a kind of target."""
    return DRIVERS[kind]()
