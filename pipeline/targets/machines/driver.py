"""The driver of the targets ``local`` (this machine) and ``baremetal`` (the hosts of a hostfile)."""

from contextlib import suppress
from pathlib import Path

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters import disk, process
from manycpu.pipeline.adapters.commands import END_TIMEOUT_S
from manycpu.pipeline.ledger import CLEANUP, Entry
from manycpu.pipeline.ledger.file import FileLedger, half_removed, ledgers
from manycpu.pipeline.spec import rank_logs
from manycpu.pipeline.spec.credentials import without_secrets
from manycpu.pipeline.spec.errors import ExportError
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.output import RETURNED
from manycpu.pipeline.spec.targets import BareMetal, Local
from manycpu.pipeline.targets import Driver
from manycpu.pipeline.targets.context import RunContext, home
from manycpu.pipeline.targets.machines import cleanup, hosts, launch, wait
from manycpu.pipeline.targets.machines.context import MachineContext, directory_of, home_of, working_folder
from manycpu.pipeline.targets.machines.preflight import findings
from manycpu.pipeline.targets.machines.stage import build, stage
from manycpu.pipeline.targets.open_run import reopen_all
from manycpu.pipeline.transfer import Manifest, Progress


class MachineDriver(Driver[MachineContext, ProcessHandle]):
    """Works on runs whose state is a folder, and whose training is a supervised process."""

    findings = staticmethod(findings)
    stage = staticmethod(stage)
    build = staticmethod(build)
    objects = staticmethod(launch.objects)
    present_handle = staticmethod(launch.present_handle)
    status = staticmethod(wait.status)
    watch = staticmethod(wait.MachineWatch)
    keep_results = staticmethod(cleanup.keep_results)
    remove = staticmethod(cleanup.remove)
    remove_expired = staticmethod(cleanup.remove_expired)
    launch = staticmethod(launch.launch)  # the last one: it hides the module of its name

    def ledger(self, ctx: MachineContext) -> FileLedger:
        return FileLedger(directory_of(ctx))

    def where(self, ctx: MachineContext) -> str:
        return str(directory_of(ctx))

    def location(self, ctx: MachineContext) -> tuple[str, ...]:
        default = ctx.target.directory is None or home_of(ctx) == home()
        return () if default else ("--directory", str(home_of(ctx)))

    def names(self, ctx: MachineContext) -> list[str]:
        # A run's name is a readable label, a dash and the key.
        folders = (home_of(ctx) / "runs").glob(f"*-{ctx.key}")
        return [folder.name for folder in folders if FileLedger(folder).exists()]

    def runs(self, target: Local | BareMetal) -> list[RunContext]:
        folder = home(target.directory)
        return reopen_all(ledgers(folder / "runs"), str(folder))

    def half_removed(self, target: Local | BareMetal) -> list[str]:
        return [ledger.directory.name for ledger in half_removed(home(target.directory) / "runs")]

    def finish_removal(self, target: Local | BareMetal, name: str) -> list[str]:
        return cleanup.finish_removal(FileLedger(home(target.directory) / "runs" / name))

    def home(self, ctx: MachineContext) -> Path:
        return home_of(ctx)

    def observed_of(self, ctx: MachineContext, handle: ProcessHandle) -> Observed:  # noqa: ARG002
        return wait.ActivityLog(Path(handle.directory)).read_all()

    def read_log(self, ctx: MachineContext, handle: ProcessHandle) -> list[str]:  # noqa: ARG002
        return process.last_lines(Path(handle.directory) / process.LOG, rank_logs.LIMIT)

    def seconds(self, ctx: MachineContext, handle: ProcessHandle) -> float:  # noqa: ARG002
        record = process.observe(handle)["exit"]
        return record["ended"] - record["started"] if record else 0.0

    def cancel(self, ctx: MachineContext, by: str, attempt: int | None) -> bool:
        """End the present attempt, and record ``by``, who did so; False: it had ended, or is not ``attempt``.

        If its supervisor died without a record of the end, the ranks that are left are ended too.

        Raises:
            UnseenError: Whether it runs cannot be seen from here.
            LaunchError: A process does not end, or a host cannot be reached.
            OSError: The record cannot be written; the attempt was ended.
        """
        to_end: ProcessHandle | None = None
        try:
            with ctx.ledger.update() as entry:
                handle = launch.present_handle(ctx, entry)
                if handle is None or (attempt is not None and entry.attempt != attempt):
                    return False
                observed = process.observe(handle)
                if observed["exit"] is not None:  # the supervisor ends right after it wrote this record
                    process.wait_until_gone(handle, END_TIMEOUT_S)
                    # An earlier cancellation may have failed to record who did it: then this caller counts.
                    # A clean-up does not count: it comes here after every end.
                    if observed["exit"]["reason"] == "cancelled" and by != CLEANUP:
                        entry.record_canceller(by)
                    return False
                if observed["alive"] is None:
                    raise process.unseen_error(handle, observed["unseen"], ctx.typed("cancel", "--gone"))
                if not observed["alive"]:  # it died for an unknown reason, so no canceller is recorded
                    process.end_leftovers(handle)
                    hosts.end_ranks(ctx, entry)
                    return False
                entry.record_canceller(by)
                to_end = handle  # ended only after the ledger is saved: a waiting process reads the canceller
        except OSError as error:  # such as a full disk
            if to_end is not None:
                error.add_note(f"The training of run {ctx.name} was ended; who did so could not be recorded.")
            raise
        finally:
            if to_end is not None:  # also if the canceller could not be recorded
                process.cancel(to_end)
        return True

    def declare_gone(self, ctx: MachineContext, entry: Entry) -> bool:
        """Write the exit record of an attempt whose host or container is gone, and end its ranks on hosts.

        False: there is no attempt, or its end is known.
        """
        handle = launch.present_handle(ctx, entry)
        if handle is None or process.observe(handle)["exit"] is not None:
            return False
        process.declare_gone(handle, ctx.typed("cancel"))
        hosts.end_ranks(ctx, entry)
        return True

    def export(self, ctx: MachineContext, handle: ProcessHandle, progress: Progress) -> Manifest:
        """Collect the program's files from the hosts, and copy them to the output; return what was copied.

        The manifest is empty if the program wrote no file.

        Raises:
            ExportError: The output was not written, or hosts have different files of one name.
            StageError: A copy from a host failed.
        """
        source = Path(handle.directory) / "output"
        hosts.collect(ctx, handle.attempt, source)
        if not source.exists() or all(item.is_folder for item in transfer.written(str(source)).items()):
            return Manifest()  # no file was written, and empty folders do not count
        _check_mount(ctx, source, ctx.ledger.read().described(handle.attempt).output_mount)
        try:
            return transfer.publish(source, ctx.output, ctx.claim_key, progress)
        except Exception as error:
            # Each fsspec protocol raises its own error types.
            fix = f"The model is kept in {source}: mend the output, and run again with the same run id"
            text = without_secrets(f"{ctx.destination} was not written: {error}", ctx.destination)
            raise ExportError(text, field="run.output", fix=fix) from error

    def read_returned(self, ctx: MachineContext, handle: ProcessHandle, name: str) -> bytes:
        folder = Path(handle.directory) / RETURNED
        hosts.collect(ctx, handle.attempt, folder)
        return (folder / name).read_bytes()

    def model_of(self, ctx: MachineContext, handle: ProcessHandle) -> str:  # noqa: ARG002
        return str(Path(handle.directory) / "output")

    def may_have_model(self, ctx: MachineContext, handle: ProcessHandle) -> bool:
        folder = Path(handle.directory) / "output"
        return disk.may_hold_files(folder) or bool(hosts.holding_files(ctx, folder, attempt=handle.attempt))

    def strays(self, ctx: MachineContext, entry: Entry, handle: ProcessHandle) -> list[str]:
        """Name files that the program wrote to its working folder, here or on hosts, or to staged folders."""
        attempt = entry.described(handle.attempt)
        work = working_folder(Path(handle.directory))
        in_work = transfer.strays(Path(attempt.code), work) if attempt.code and work.is_dir() else []
        code_files = cleanup.files_of_code(Path(attempt.code)) if attempt.code else set()
        on_hosts = hosts.strays(ctx, Path(handle.directory), code_files, attempt)
        staged = [Path(path) for path in (attempt.data, attempt.model) if path]
        in_staged = [stray for folder in staged for stray in transfer.strays(folder)]
        return [*map(str, in_work), *on_hosts, *map(str, in_staged)]

    def keep(self, ctx: MachineContext, seconds: float | None) -> list[str]:
        ctx.ledger.keep(seconds)
        return [str(directory_of(ctx))]

    def owns(self, ctx: MachineContext, what: str) -> bool:
        return what.startswith(f"{directory_of(ctx)}/")  # files that later runs reuse are outside it


def _check_mount(ctx: MachineContext, source: Path, mount_at_launch: str | None) -> None:
    """Raise ExportError if the disk of the output is no longer mounted: the export would fill another disk.

    ``source`` is the folder of the model. ``mount_at_launch`` None: there is nothing to check.
    """
    output = ctx.output.local
    if mount_at_launch is None or output is None:
        return
    is_safe = False
    with suppress(OSError):  # such as a mount whose server is gone
        # Without the mount, an output that was edited to another disk is fine too.
        is_safe = Path(mount_at_launch).is_mount() or not output.resolve().is_relative_to(mount_at_launch)
    if not is_safe:
        raise ExportError(
            f"nothing is mounted at {mount_at_launch} any more, as there was at the launch",
            field="run.output",
            fix=f"The model is kept in {source}: mount it, or give another output, and run again with the "
            "same run id",
        )
