"""What a target does for each verb: one Protocol, and one package for each kind of target.

``verbs.py`` of a package offers the functions; it is imported when a run needs it, with what it speaks to.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol, TypeVar

from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import Handle, JobHandle, ProcessHandle
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.targets.context import ClusterContext, MachineContext, RunContext
from manycpu.pipeline.targets.results import Built, Copied, Staged
from manycpu.pipeline.transfer import Manifest, Progress

__all__ = ["TARGETS", "TargetVerbs", "Watch", "verbs_of"]

Ctx = TypeVar("Ctx", bound=RunContext, contravariant=True)  # noqa: PLC0105 - a context, of one kind of target
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


class TargetVerbs(Protocol[Ctx, H]):
    """What a target does for each verb. Errors are those of the verbs in ``verbs/``."""

    def findings(self, ctx: Ctx) -> Iterable[Finding]:
        """Check what only this kind of target can have wrong."""

    def stage(self, ctx: Ctx, sources: Mapping[str, str], progress: Progress) -> dict[str, Copied]:
        """Copy sources, by the name of their field, to the volume, each into a folder named by content."""

    def build(self, ctx: Ctx) -> tuple[Built, bool]:
        """Freeze the code; whether it was there before."""

    def launch(self, ctx: Ctx, staged: Staged, built: Built) -> tuple[H, bool]:
        """Start the next attempt, or attach to the present one; whether it was attached to."""

    def objects(self, ctx: Ctx) -> list[dict[str, Any]]:
        """Describe what would be started, with nothing staged or built yet; the job is the last."""

    def present_handle(self, ctx: Ctx, entry: Entry) -> H | None:
        """Find the present attempt, also where whoever started it was killed before it was recorded."""

    def status(self, ctx: Ctx, handle: H, entry: Entry) -> Status:
        """Look at an attempt, as whoever waits for it does."""

    def watch(self, ctx: Ctx, handle: H, cursor: Any) -> Watch:
        """Begin to watch an attempt, or go on from where another watch has come to."""

    def observed_of(self, ctx: Ctx, handle: H) -> Observed:
        """Read what the ranks of an attempt have said."""

    def seconds(self, ctx: Ctx, handle: H) -> float:
        """Tell how many seconds an attempt took; 0 while it has not ended."""

    def cancel(self, ctx: Ctx, by: str, attempt: int | None) -> bool:
        """End the present attempt and record who did so; whether there was something to end."""

    def export(self, ctx: Ctx, handle: H, progress: Progress) -> Manifest:
        """Copy what the program wrote to the output; the manifest has no files where it wrote none."""

    def read_returned(self, ctx: Ctx, handle: H, name: str) -> bytes:
        """Read a file that the function of an attempt returned."""

    def model_of(self, ctx: Ctx, handle: H) -> str:
        """Name the folder that the program of an attempt wrote to, for people."""

    def may_have_model(self, ctx: Ctx, handle: H) -> bool:
        """Whether the program of an attempt may have written files."""

    def strays(self, ctx: Ctx, entry: Entry, handle: H) -> list[str]:
        """Name files that the program wrote elsewhere than to its output."""

    def read_report(self, ctx: Ctx) -> str | None:
        """Read the output's report.json; None where there is none."""

    def write_report(self, ctx: Ctx, text: str) -> None:
        """Write the output's report.json."""

    def keep(self, ctx: Ctx, seconds: float | None) -> list[str]:
        """Note for how long the run is kept (None: for ever); name what is kept."""

    def keep_results(self, ctx: Ctx, seconds: float | None) -> list[str]:
        """Note the same for output and checkpoints, and delete the rest; empty where there are none."""

    def owns(self, ctx: Ctx, what: str) -> bool:
        """Whether something that a report says is kept goes with the run."""

    def remove(self, ctx: Ctx) -> list[str]:
        """Delete what the run owns and see that it is gone; name what is left."""

    def remove_expired(self, ctx: Ctx, now: float, end: Callable[[RunContext], bool]) -> list[Finding]:
        """Delete other runs whose time is over, if ``end`` says that they may go; what troubled that."""


def _machines() -> TargetVerbs[MachineContext, ProcessHandle]:
    from manycpu.pipeline.targets.machines import verbs

    return verbs


def _kubernetes() -> TargetVerbs[ClusterContext, JobHandle]:
    from manycpu.pipeline.targets.kubernetes import verbs

    return verbs


TARGETS: Final[Mapping[str, Callable[[], TargetVerbs[Any, Any]]]] = {
    "local": _machines,
    "baremetal": _machines,
    "kubernetes": _kubernetes,
}
"""Kind of target -> loads what it does."""


def verbs_of(ctx: RunContext) -> TargetVerbs[Any, Any]:
    """Load what the run's target does for each verb."""
    return TARGETS[ctx.target.kind]()
