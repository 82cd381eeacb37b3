"""The drivers of targets: one for each kind of target, found in the table ``DRIVERS``.

A driver has no state: each method takes the run. Its package is imported only when a run needs it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from manycpu.pipeline import transfer
from manycpu.pipeline.ledger import Entry, Ledger
from manycpu.pipeline.spec.errors import BadInputError, Finding
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.handle import Handle
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.targets import output
from manycpu.pipeline.targets.context import Built, Copied, RunContext, Staged
from manycpu.pipeline.transfer import Manifest, Progress

__all__ = ["DRIVERS", "Driver", "Watch", "driver_of"]

Ctx = TypeVar("Ctx", bound=RunContext)
H = TypeVar("H", bound=Handle)


class Watch(Protocol):
    """Follows an attempt: each look returns its new lines and its status."""

    ctx: Any
    handle: Any
    behind: bool
    """Whether the next look finds more lines at once: a look reads only a part of a long log."""

    @property
    def observed(self) -> Observed:
        """What the ranks have reported so far, even if it could not be recorded."""

    @property
    def cursor(self) -> Any:
        """How far the log was read, as JSON: a watch that resumes from it misses no line."""

    def look(self) -> tuple[list[RankLine], Status]:
        """Read the lines since the last look, and the status. After a terminal status no more lines come."""

    def close(self) -> None:
        """Stop following; one more look may return lines that were received before."""


class Driver(ABC, Generic[Ctx, H]):
    """What one kind of target does for each verb. The verbs in ``verbs/`` document the errors.

    If the target's service cannot be reached for now, every method raises ClusterError. Triggers then try
    again.
    """

    @abstractmethod
    def ledger(self, ctx: Ctx) -> Ledger:
        """Open the run's ledger."""

    @abstractmethod
    def where(self, ctx: Ctx) -> str:
        """Name the place of the run, such as a folder or a namespace, for messages."""

    @abstractmethod
    def location(self, ctx: Ctx) -> tuple[str, ...]:
        """List the command-line options by which a command finds the run; empty: the defaults are enough."""

    @abstractmethod
    def names(self, ctx: Ctx) -> list[str]:
        """List the names of begun runs that have this run's key; empty: there is none.

        An edited field may change the name of a run, but not its key.
        """

    @abstractmethod
    def runs(self, target: Any) -> list[RunContext]:
        """List the runs that have begun in the target's folder or namespace, oldest first."""

    def home(self, ctx: Ctx) -> Path | None:  # noqa: ARG002 - overrides use it
        """Return the folder of runs on this machine; None: the target keeps runs elsewhere."""
        return None

    def reaches_output(self, ctx: Ctx) -> bool:  # noqa: ARG002 - overrides use it
        """Whether the target itself reads and writes the output, so that this machine does not access it."""
        return False

    def save_image(self, ctx: Ctx, archive: Path) -> str:  # noqa: ARG002 - overrides use them
        """Write the training image to an OCI archive; return the name of the image."""
        raise BadInputError(f"target {ctx.target.kind} has no images", field="target.kind")

    @abstractmethod
    def findings(self, ctx: Ctx) -> Iterable[Finding]:
        """Run the checks that only this kind of target needs."""

    @abstractmethod
    def stage(self, ctx: Ctx, sources: Mapping[str, str], progress: Progress) -> dict[str, Copied]:
        """Copy each source to where the ranks read it, into a folder that is named by the content's hash.

        The keys of ``sources`` and of the result are the fields that the run has: ``data``, ``model``. A
        source is a path or a URL.
        """

    @abstractmethod
    def build(self, ctx: Ctx) -> tuple[Built, bool]:
        """Make a snapshot of the code, or an image with it; return it, and whether it existed before."""

    @abstractmethod
    def launch(self, ctx: Ctx, staged: Staged, built: Built) -> tuple[H, bool]:
        """Start the next attempt, or attach to the present one; return its handle, and whether it attached.

        In this order, in one change of the ledger: ``join`` refuses another task, ``should_attach`` judges
        the present attempt, and ``begin_attempt`` records the next one (all in ``attempt.py``). Only after
        that anything starts; the handle is recorded last.
        """

    @abstractmethod
    def objects(self, ctx: Ctx) -> list[dict[str, Any]]:
        """Describe the objects that a launch would create, without staging or building; the job is last."""

    @abstractmethod
    def present_handle(self, ctx: Ctx, entry: Entry) -> H | None:
        """Find the handle of the present attempt, even if a killed launch did not record it.

        None: there is no attempt, or nothing of it was started.
        """

    @abstractmethod
    def status(self, ctx: Ctx, handle: H, entry: Entry) -> Status:
        """Read the status of an attempt, judged in the same way as by a watch.

        After a failure, a clean-up may delete output and checkpoints only if ``by_itself`` is true.
        ``budget`` is set only by a watch that itself ends the attempt because of a time budget. If something
        else does so, such as a supervisor, it is None, and the reason names the budget.
        """

    @abstractmethod
    def watch(self, ctx: Ctx, handle: H, cursor: Any) -> Watch:
        """Watch an attempt, from its beginning or from the cursor of another watch."""

    def lines_so_far(self, ctx: Ctx, handle: H) -> Iterable[RankLine]:
        """Read the lines that an attempt has written up to now, without waiting for more."""
        with closing(self.watch(ctx, handle, cursor=None)) as watching:
            yield from watching.look()[0]
            while watching.behind:
                yield from watching.look()[0]

    @abstractmethod
    def observed_of(self, ctx: Ctx, handle: H) -> Observed:
        """Read what the ranks of an attempt have reported: ``Observer`` makes it from their lines."""

    @abstractmethod
    def read_log(self, ctx: Ctx, handle: H) -> Iterable[str]:
        """Read the last lines of an attempt's ranks, as the ranks wrote them; a few MiB at most."""

    @abstractmethod
    def seconds(self, ctx: Ctx, handle: H) -> float:
        """Return how many seconds an attempt took; 0 until it has ended."""

    @abstractmethod
    def cancel(self, ctx: Ctx, by: str, attempt: int | None) -> bool:
        """End the present attempt, and record who did so (``by``); return False if there was none to end.

        If ``attempt`` is not None, nothing is ended unless it is the number of the present attempt.
        """

    @abstractmethod
    def export(self, ctx: Ctx, handle: H, progress: Progress) -> Manifest:
        """Copy the program's files to the output; the manifest is empty if the program wrote none."""

    @abstractmethod
    def read_returned(self, ctx: Ctx, handle: H, name: str) -> bytes:
        """Read the file ``name`` with a part of what the function of a notebook returned."""

    @abstractmethod
    def model_of(self, ctx: Ctx, handle: H) -> str:
        """Name the folder that the program of an attempt wrote to, for messages."""

    @abstractmethod
    def may_have_model(self, ctx: Ctx, handle: H) -> bool:
        """Whether the program of an attempt may have written files."""

    @abstractmethod
    def strays(self, ctx: Ctx, entry: Entry, handle: H) -> list[str]:
        """Name the files that the program wrote outside its output."""

    def read_beside(self, ctx: Ctx, name: str) -> str | None:
        """Read a text file of the output, such as report.json; None: there is none."""
        return output.read_beside(ctx, name)

    def why_not_exported(self, ctx: Ctx, digest: str, *, sizes: bool = True) -> str | None:
        """Say why the export with this digest is not in the output with all of its files; None: it is."""
        return transfer.why_not_exported(ctx.output, digest, sizes=sizes)

    def write_report(self, ctx: Ctx, text: str) -> None:
        """Write the output's report.json, or raise an error if this run must not replace the one there."""
        output.write_report(ctx, text)

    def write_beside(self, ctx: Ctx, name: str, text: str) -> None:
        """Write report.html or run.log to the output, unless the program wrote a file of that name."""
        output.write_beside(ctx, name, text)

    @abstractmethod
    def keep(self, ctx: Ctx, seconds: float | None) -> list[str]:
        """Record for how many seconds the run is kept (None: for ever); return the names of what is kept."""

    @abstractmethod
    def keep_results(self, ctx: Ctx, seconds: float | None, *, checkpoints: bool = True) -> list[str]:
        """Keep output and checkpoints, record in the lease for how long, and delete the rest.

        Args:
            ctx: The run.
            seconds: For how long; None: for ever.
            checkpoints: Whether the checkpoints are kept too.

        Returns:
            Names of what is kept. Empty: there are no results, the lease is as before, and the caller must
            remove the run.
        """

    @abstractmethod
    def owns(self, ctx: Ctx, what: str) -> bool:
        """Whether the run owns ``what``, a path in its report's list ``kept``: it is deleted with the run."""

    @abstractmethod
    def remove(self, ctx: Ctx) -> list[str]:
        """Delete what the run owns, and check that it is gone; return the names of what is left.

        This works without a ledger too: an earlier process may have deleted it, and then have been killed.
        """

    @abstractmethod
    def remove_expired(self, ctx: Ctx, now: float, may_delete: Callable[[RunContext], bool]) -> list[Finding]:
        """Delete other runs whose lease has expired; return warnings about failures.

        First finish removals that were begun. Then, for each run: read its lease, and end its training if no
        supervisor does that. Then call ``may_delete``, which returns whether the run may be deleted; if not,
        it records for how long the run is kept. Delete the run only if its lease is still over: another
        process may have resumed it. ``now``: seconds since the epoch, by the clock of leases.
        """

    def half_removed(self, target: Any) -> list[str]:  # noqa: ARG002 - overrides use it
        """Name the runs of a target whose removal was begun and is not finished."""
        return []

    def finish_removal(self, target: Any, name: str) -> list[str]:  # noqa: ARG002
        """Finish the removal of a half-removed run; return the names of what is left."""
        return []

    def declare_gone(self, ctx: Ctx, entry: Entry) -> bool:  # noqa: ARG002 - overrides use them
        """Record that the present attempt ended because its host or container is gone, as a person confirms.

        Returns:
            Whether it was recorded. False: there is no attempt, its end is known, or the target keeps no
            such records.

        Raises:
            LaunchError: The attempt runs on this host.
        """
        return False


def _load_machine_driver() -> Driver[Any, Any]:
    from manycpu.pipeline.targets.machines.driver import MachineDriver

    return MachineDriver()


def _load_kubernetes_driver() -> Driver[Any, Any]:
    from manycpu.pipeline.targets.kubernetes.driver import KubernetesDriver

    return KubernetesDriver()


DRIVERS: Final[Mapping[str, Callable[[], Driver[Any, Any]]]] = {
    "local": _load_machine_driver,
    "baremetal": _load_machine_driver,
    "kubernetes": _load_kubernetes_driver,
}
"""Kind of target -> function that loads its driver."""


def driver_of(kind: str) -> Driver[Any, Any]:
    """Load the driver of a kind of target."""
    return DRIVERS[kind]()
