"""Clean up a run on machines, which owns its folder here and on the hosts."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters import disk, process, ssh
from manycpu.pipeline.ledger import Attempt, Entry
from manycpu.pipeline.ledger.file import OWNER, FileLedger, half_removed
from manycpu.pipeline.spec.errors import Finding, ManycpuError, RunGoneError, UnseenError
from manycpu.pipeline.spec.output import METRICS
from manycpu.pipeline.spec.targets import BareMetal, Local
from manycpu.pipeline.targets import output
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.machines import hosts
from manycpu.pipeline.targets.machines.context import (
    MachineContext,
    attempt_directory,
    directory_of,
    home_of,
    is_on_machines,
    working_folder,
)
from manycpu.pipeline.targets.machines.wait import ACTIVITY

_RUN_RECORDS = frozenset({"ledger.json", "lease.json", OWNER, "uses"})
# Files in an attempt's folder with its end and its ranks' reports: the next attempt and the report need them.
_ATTEMPT_RECORDS = frozenset({process.HANDLE, process.EXIT, ACTIVITY})
# Patterns of results on hosts; the folder itself counts too, because a program may replace it by a link.
_OUTPUTS = ("attempts/*/output", "attempts/*/output/*")
_RESULTS = (*_OUTPUTS, "checkpoints", "checkpoints/*")


def keep_results(ctx: MachineContext, seconds: float | None, *, checkpoints: bool = True) -> list[str]:
    """Keep output and checkpoints for some seconds (None: for ever), and delete the rest of the run's folder.

    Before that, ranks that still run on hosts are ended, and the lease records for how long the results stay.

    Returns:
        The kept paths, and ``host:folder`` for each other host that may have results; empty: there are no
        results, and nothing was deleted.
    """
    folder = directory_of(ctx)
    hosts.end_ranks(ctx, ctx.ledger.read())  # a rank that still runs would keep writing
    attempts = _attempts(ctx)
    outputs = [*(attempt / "output" for attempt in attempts), *_stray_results(ctx)]
    results = [path for path in outputs if disk.may_hold_files(path)]
    if checkpoints:
        if disk.may_hold_files(folder / "checkpoints"):
            results.insert(0, folder / "checkpoints")
        on_hosts = hosts.holding_files(ctx, folder, *_RESULTS)
    else:  # run.output is null: an output with metrics alone is no result, because the report has them
        results = [path for path in results if not disk.holds_only(path, METRICS)]
        on_hosts = hosts.holding_files(ctx, folder, *_OUTPUTS, but=(METRICS,))
    strays_on_hosts = _strays_on_hosts(ctx)
    on_hosts += strays_on_hosts
    if not results and not on_hosts:
        return []
    ctx.ledger.keep(seconds)  # first, so that a kill from here on loses no record
    _keep_only(folder, attempts, results)
    # Hosts may share the folder with this machine: what is kept here must stay there too.
    kept_names = {*_RUN_RECORDS, *_ATTEMPT_RECORDS, "attempts", "checkpoints", "output"}
    has_strays = bool(strays_on_hosts) or any(path.name == "work" for path in results)
    hosts.keep_only(ctx, folder, kept_names | ({"work"} if has_strays else set()))
    return [*map(str, results), *on_hosts]


def _keep_only(folder: Path, attempts: list[Path], results: list[Path]) -> None:
    """Delete all but results and records, in a run's folder on this machine and in those of its attempts."""
    needed = {folder / name for name in _RUN_RECORDS} | set(results)
    needed |= {attempt / name for attempt in attempts for name in _ATTEMPT_RECORDS}
    children = [*_children(folder), *(child for attempt in attempts for child in _children(attempt))]
    # "attempts" itself stays: the children of each attempt are judged one by one.
    for path in children:
        if path not in needed and path.name != "attempts":
            _delete(path)


def _attempts(ctx: MachineContext) -> list[Path]:
    """List the folders of the run's attempts; links are skipped, because a program may have made them."""
    folder = directory_of(ctx) / "attempts"
    return [path for path in sorted(_children(folder)) if path.is_dir() and not path.is_symlink()]


def _stray_results(ctx: MachineContext) -> list[Path]:
    """List the ``work`` folders of attempts without output in which the program wrote files.

    ``work`` is the parent of the working folder: a program may write there too, as to ``../file``.
    """
    works = [(working_folder(folder), code) for folder, code, _ in _without_output(ctx)]
    return [work.parent for work, code in works if work.is_dir() and transfer.strays(code, work)]


def _strays_on_hosts(ctx: MachineContext) -> list[str]:
    """List the files that programs left in ``work`` folders on hosts, each as ``host:path``.

    Only attempts without output count.
    """
    return [
        stray
        for folder, code, attempt in _without_output(ctx)
        for stray in hosts.strays(ctx, folder, files_of_code(code), attempt)
    ]


def _without_output(ctx: MachineContext) -> list[tuple[Path, Path, Attempt]]:
    """List the attempts without output that ran a copy of the code: folder, folder of the code, attempt.

    An attempt is without output if its export found no files (``fruitless``), or if ``run.output`` is null.
    """
    return [
        (attempt_directory(ctx, number), Path(attempt.code), attempt)
        for number, attempt in ctx.ledger.read().attempts.items()
        if attempt.code and (attempt.fruitless or ctx.run.output is None)
    ]


def files_of_code(code: Path) -> set[str]:
    """List the files of an attempt's code, by path below the attempt's folder; empty: they are unknown."""
    manifest = transfer.staged(code)
    return {f"work/code/{file.path}" for file in manifest.files} if manifest else set()


def _children(folder: Path) -> list[Path]:
    """List the files and folders in a folder; empty if it does not exist."""
    return list(folder.iterdir()) if folder.is_dir() else []


def _delete(path: Path) -> None:
    """Delete a file, a link or a folder; what cannot be deleted stays."""
    with suppress(OSError):  # it is deleted later, with the kept folder
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove(ctx: MachineContext, *, only_over: bool = False) -> list[str]:
    """Delete what the run owns, here and on its hosts; return the paths that could not be deleted.

    Args:
        ctx: The run.
        only_over: Delete the run only if its lease is over, not if another process has renewed it.
    """
    folder = directory_of(ctx)
    # With ``only_over``, another run waits for this removal: it gets little time on each host.
    timeout = ssh.COMMAND_TIMEOUT_S if only_over else ssh.COPY_TIMEOUT_S
    if ctx.ledger.exists():  # raises if the hosts are unknown, before anything is deleted or renamed
        hosts.recorded(ctx.ledger.read(), ctx.target)
    try:
        elsewhere = partial(_remove_elsewhere, folder, ctx.target, timeout)
        left = ctx.ledger.remove(elsewhere, only_over=only_over)
    except OSError as error:
        return [f"{folder}: {error}"]
    # With ``only_over``, the folder of a run with a new lease stays, which is no fault.
    if folder.exists() and not only_over:
        return [*left, str(folder)]
    return left


def _remove_elsewhere(
    folder: Path, present: Local | BareMetal | None, timeout: float, entry: Entry
) -> list[str]:
    """Delete what a run has outside its folder here: its folders on hosts, and broken exports beside outputs.

    ``present``: the run's target as it is now; None: as it was recorded. ``timeout``: seconds for each host.

    Returns:
        What is left on hosts.
    """
    transfer.discard_exports(entry.outputs, entry.key)
    return hosts.remove_folder(folder, present, timeout, entry)


def finish_removal(
    ledger: FileLedger, present: Local | BareMetal | None = None, timeout: float = ssh.COPY_TIMEOUT_S
) -> list[str]:
    """Delete the rest of a run whose removal was killed, or left something on a host.

    Args:
        ledger: The run's ledger.
        present: The run's target as it is now; None: as it was recorded.
        timeout: Seconds for the deletion on each host.

    Returns:
        What is left, or the error that stopped the removal.
    """
    try:
        return ledger.finish_removal(partial(_remove_elsewhere, ledger.directory, present, timeout))
    except (ManycpuError, OSError) as error:  # such as files of another user
        return [str(error)]


def remove_expired(
    ctx: MachineContext, now: float, may_delete: Callable[[RunContext], bool]
) -> list[Finding]:
    """Delete other runs in the target's folder whose lease has expired.

    Args:
        ctx: The run that starts the removal.
        now: Seconds since the epoch.
        may_delete: Returns whether such a run may be deleted; if not, it records how long the run is kept.

    Returns:
        Warnings about runs that could not be removed; they do not stop this run.
    """
    findings = []
    for ledger in half_removed(home_of(ctx) / "runs"):
        # The rest of this run from before: its target, as it is now, has a newer ssh command than its ledger.
        present = ctx.target if ledger.directory.name == ctx.name else None
        findings += [
            _not_removed(f"run {ledger.directory.name} is not wholly removed: {left}")
            for left in finish_removal(ledger, present, ssh.COMMAND_TIMEOUT_S)
        ]
    for other in ctx.driver.runs(ctx.target):
        if other.name != ctx.name and is_on_machines(other):
            findings += [
                _not_removed(f"run {other.name}, whose time is over, is not removed: {problem}")
                for problem in _remove_if_expired(other, now, may_delete)
            ]
    return findings


def _remove_if_expired(
    other: MachineContext, now: float, may_delete: Callable[[RunContext], bool]
) -> list[str]:
    """Delete a run if its lease has expired and ``may_delete`` allows; return what is left, or an error."""
    try:
        if not other.ledger.lease().over(now) or not may_delete(other):
            return []
        return _remove_over(other)
    except (RunGoneError, UnseenError):  # another process removed it, or only another host can see it
        return []
    except (ManycpuError, OSError) as error:  # such as a file that is cut, or a run of another user
        return [str(error)]


def _remove_over(other: MachineContext) -> list[str]:
    """Delete a run whose lease is over, and its claims; return what is left.

    If another process has renewed the lease meanwhile, nothing is deleted.
    """
    key = other.claim_key  # read now: the ledger has it
    left = remove(other, only_over=True)
    if not other.ledger.exists():
        output.release(other, key)
    return left


def _not_removed(message: str) -> Finding:
    """Make the warning that a run is not removed; it does not stop the run that tried."""
    fix = "The next run tries again; `manycpu clean` does so now"
    return Finding("target.directory", message, fix, fatal=False)
