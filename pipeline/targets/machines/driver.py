"""The driver of the targets ``local`` (this machine) and ``baremetal`` (the hosts of a hostfile)."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from manycpu.pipeline.adapters import process
from manycpu.pipeline.adapters.commands import END_TIMEOUT
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.ledger.file import FileLedger, ledgers
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import Status
from manycpu.pipeline.spec.targets import BareMetal, Local
from manycpu.pipeline.targets import Driver, output
from manycpu.pipeline.targets.context import RunContext, home
from manycpu.pipeline.targets.machines import cleanup, export, launch
from manycpu.pipeline.targets.machines.activity_log import ActivityLog
from manycpu.pipeline.targets.machines.build import build
from manycpu.pipeline.targets.machines.context import MachineContext, directory_of, home_of
from manycpu.pipeline.targets.machines.preflight import findings
from manycpu.pipeline.targets.machines.stage import stage
from manycpu.pipeline.targets.machines.wait import MachineWatch
from manycpu.pipeline.targets.open_run import reopen_all
from manycpu.pipeline.targets.results import Built, Copied, Staged
from manycpu.pipeline.transfer import Manifest, Progress

__all__ = ["MachineDriver"]


class MachineDriver(Driver[MachineContext, ProcessHandle]):
    """Works on runs whose state is a folder, and whose training is a supervised process."""

    def ledger(self, ctx: MachineContext) -> FileLedger:
        """Open the run's ledger: a file in its folder."""
        return FileLedger(directory_of(ctx))

    def where(self, ctx: MachineContext) -> str:
        """Return the run's own folder."""
        return str(directory_of(ctx))

    def location(self, ctx: MachineContext) -> tuple[str, ...]:
        """Return the option with the folder of runs; empty: it is the default folder."""
        default = ctx.target.directory is None or home_of(ctx) == home()
        return () if default else ("--directory", str(home_of(ctx)))

    def names(self, ctx: MachineContext) -> list[str]:
        """List the names of runs that have begun with this run's key."""
        folders = (home_of(ctx) / "runs").glob(f"*-{ctx.key}")
        return [folder.name for folder in folders if FileLedger(folder).exists()]

    def runs(self, target: Local | BareMetal) -> list[RunContext]:
        """Find the runs in the target's folder, oldest first."""
        folder = home(target.directory)
        return reopen_all(ledgers(folder / "runs"), str(folder))

    def home(self, ctx: MachineContext) -> Path:
        """Return the target's folder."""
        return home_of(ctx)

    def findings(self, ctx: MachineContext) -> Iterable[Finding]:
        """Run the checks that only machines need."""
        return findings(ctx)

    def stage(self, ctx: MachineContext, sources: Mapping[str, str], progress: Progress) -> dict[str, Copied]:
        """Copy each source to the target's folder, or use it in place."""
        return stage(ctx, sources, progress)

    def build(self, ctx: MachineContext) -> tuple[Built, bool]:
        """Make a snapshot of the program's folder; True: it existed before."""
        return build(ctx)

    def launch(self, ctx: MachineContext, staged: Staged, built: Built) -> tuple[ProcessHandle, bool]:
        """Start the next attempt's supervisor, or attach to the present attempt."""
        return launch.launch(ctx, staged, built)

    def objects(self, ctx: MachineContext) -> list[dict[str, Any]]:
        """Describe the processes that a launch would start, without staging or building."""
        return launch.objects(ctx)

    def present_handle(self, ctx: MachineContext, entry: Entry) -> ProcessHandle | None:
        """Find the handle of the present attempt, in the ledger or in the attempt's folder."""
        return launch.present_handle(ctx, entry)

    def status(self, ctx: MachineContext, handle: ProcessHandle, entry: Entry) -> Status:
        """Read the status of an attempt from its process, its exit record and its log."""
        return launch.status(ctx, handle, entry)

    def watch(self, ctx: MachineContext, handle: ProcessHandle, cursor: int | None) -> MachineWatch:
        """Watch an attempt, from its beginning or from a cursor."""
        return MachineWatch(ctx, handle, cursor)

    def observed_of(self, ctx: MachineContext, handle: ProcessHandle) -> Observed:  # noqa: ARG002
        """Read what the ranks of an attempt have reported."""
        return ActivityLog(Path(handle.directory)).read_all()

    def seconds(self, ctx: MachineContext, handle: ProcessHandle) -> float:  # noqa: ARG002
        """Return how many seconds an attempt took; 0 until it has ended."""
        record = process.observe(handle)["exit"]
        return record["ended"] - record["started"] if record else 0.0

    def cancel(self, ctx: MachineContext, by: str, attempt: int | None) -> bool:
        """End the present attempt's supervisor, and record who did so; False: it was not running."""
        running: ProcessHandle | None = None
        try:
            with ctx.ledger.update() as entry:
                handle = launch.present_handle(ctx, entry)
                if handle is None or (attempt is not None and entry.attempt != attempt):
                    return False
                observed = process.observe(handle)
                if observed["exit"] is not None:
                    process.wait_until_gone(handle, END_TIMEOUT)
                    return False
                if observed["alive"] is None:
                    raise process.unseen_error(handle, observed["unseen"])
                if not observed["alive"]:  # why it died is unknown, and stays so
                    return False
                entry.cancelled.setdefault(entry.attempt, by)
                running = handle
        finally:
            if running is not None:  # also if a full disk keeps the record from being written
                process.cancel(running)
        return True

    def declare_gone(self, ctx: MachineContext, entry: Entry) -> bool:
        """Record that the present attempt ended with its host or container; False: it has an exit record."""
        handle = launch.present_handle(ctx, entry)
        if handle is None or process.observe(handle)["exit"] is not None:
            return False
        process.declare_gone(handle)
        return True

    def export(self, ctx: MachineContext, handle: ProcessHandle, progress: Progress) -> Manifest:
        """Copy the program's files to the output."""
        return export.export(ctx, handle, progress)

    def read_returned(self, ctx: MachineContext, handle: ProcessHandle, name: str) -> bytes:
        """Read a file of the return value of a notebook's function."""
        return export.read_returned(ctx, handle, name)

    def model_of(self, ctx: MachineContext, handle: ProcessHandle) -> str:  # noqa: ARG002
        """Name the folder that the program of an attempt wrote to."""
        return str(export.output_of(handle))

    def may_have_model(self, ctx: MachineContext, handle: ProcessHandle) -> bool:
        """Whether the program of an attempt may have written files."""
        return export.may_have_model(ctx, handle)

    def strays(self, ctx: MachineContext, entry: Entry, handle: ProcessHandle) -> list[str]:
        """Name the files that the program wrote outside its output."""
        return export.strays(ctx, entry, handle)

    def read_report(self, ctx: MachineContext) -> str | None:
        """Read the output's report.json."""
        return output.read_report(ctx)

    def write_report(self, ctx: MachineContext, text: str) -> None:
        """Write the output's report.json."""
        output.write_report(ctx, text)

    def keep(self, ctx: MachineContext, seconds: float | None) -> list[str]:
        """Record for how many seconds the run is kept; return its folder."""
        ctx.ledger.keep(seconds)
        return [str(directory_of(ctx))]

    def keep_results(self, ctx: MachineContext, seconds: float | None) -> list[str]:
        """Keep output and checkpoints, and delete the rest of the run's folder; return the kept paths."""
        return cleanup.keep_results(ctx, seconds)

    def owns(self, ctx: MachineContext, what: str) -> bool:
        """Whether a path is in the run's own folder; files that later runs reuse are outside it."""
        return what.startswith(f"{directory_of(ctx)}/")

    def remove(self, ctx: MachineContext) -> list[str]:
        """Delete the run's folder, here and on the hosts; name what is left."""
        return cleanup.remove(ctx)

    def remove_expired(
        self, ctx: MachineContext, now: float, end: Callable[[RunContext], bool]
    ) -> list[Finding]:
        """Delete other runs in the target's folder whose lease has expired."""
        return cleanup.remove_expired(ctx, now, end)
