"""Clean up a run on machines, which owns its folder here and on the hosts."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters import disk, process
from manycpu.pipeline.ledger.file import finish_removals
from manycpu.pipeline.spec.errors import Finding, ManycpuError
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

_OF_THE_RUN = frozenset({"ledger.json", "lease.json", "uses"})
# The end of an attempt and what its ranks reported: the next attempt and the report need them.
_OF_AN_ATTEMPT = frozenset({process.HANDLE, process.EXIT, ACTIVITY})
# Patterns on hosts; the folder itself counts too, because a program may replace it by a link.
_RESULTS = ("attempts/*/output", "attempts/*/output/*", "checkpoints", "checkpoints/*")


def keep_results(ctx: MachineContext, seconds: float | None) -> list[str]:
    """Keep output and checkpoints, and delete the rest of the run's folder; return the kept paths."""
    folder = directory_of(ctx)
    attempts = _attempts(ctx)
    outputs = [folder / "checkpoints", *(attempt / "output" for attempt in attempts), *_stray_results(ctx)]
    results = [path for path in outputs if disk.may_hold_files(path)]
    on_hosts = hosts.holding_files(ctx, folder, *_RESULTS)
    if not results and not on_hosts:
        return []
    ctx.ledger.keep(seconds)  # first, so that a kill from here on loses no record
    needed = {folder / name for name in _OF_THE_RUN} | set(results)
    needed |= {attempt / name for attempt in attempts for name in _OF_AN_ATTEMPT}
    for path in [*_children(folder), *(child for attempt in attempts for child in _children(attempt))]:
        if path not in needed and path.name != "attempts":
            _delete(path)
    hosts.keep_only(ctx, folder, {*_OF_THE_RUN, *_OF_AN_ATTEMPT, "attempts", "checkpoints", "output"})
    return [*map(str, results), *on_hosts]


def _attempts(ctx: MachineContext) -> list[Path]:
    """List the folders of attempts; links are skipped, because a program may have made them."""
    folder = directory_of(ctx) / "attempts"
    return [path for path in sorted(_children(folder)) if path.is_dir() and not path.is_symlink()]


def _stray_results(ctx: MachineContext) -> list[Path]:
    """List the working folders of attempts that succeeded and wrote files there instead of to the output."""
    found = []
    for number, ran in ctx.ledger.read().attempts.items():
        work = working_folder(attempt_directory(ctx, number))
        if ran.fruitless and ran.code and work.is_dir() and transfer.strays(Path(ran.code), work):
            found.append(work.parent)
    return found


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _delete(path: Path) -> None:
    with suppress(OSError):  # it is deleted later, with the kept folder
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove(ctx: MachineContext, *, only_over: bool = False) -> list[str]:
    """Delete what the run owns, unless ``only_over`` and its lease was renewed; return what is left."""
    left: list[str] = []
    folder = directory_of(ctx)

    def on_hosts() -> None:
        left.extend(hosts.remove_folder(ctx, folder))

    try:
        ctx.ledger.remove(only_over=only_over, before=on_hosts)
    except OSError as error:
        return [*left, f"{folder}: {error}"]
    return [*left, str(folder)] if folder.exists() and not only_over else left


def remove_expired(ctx: MachineContext, now: float, end: Callable[[RunContext], bool]) -> list[Finding]:
    """Delete other runs in the target's folder whose lease has expired."""
    try:
        finish_removals(home_of(ctx) / "runs")
    except OSError as error:
        return [_trouble(f"an older run is not removed: {error}")]
    others = [other for other in ctx.driver.runs(ctx.target) if other.name != ctx.name]
    return [
        _trouble(f"run {other.name}, whose time is over, is not removed: {what}")
        for other in others
        if is_on_machines(other)
        for what in _remove_one(other, now, end)
    ]


def _remove_one(other: MachineContext, now: float, end: Callable[[RunContext], bool]) -> list[str]:
    try:
        if not other.ledger.lease().over(now) or not end(other):
            return []
        return remove(other, only_over=True)
    except ManycpuError:  # another process removed it, or only another host can see it
        return []
    except OSError as error:  # such as a run of another user
        return [str(error)]


def _trouble(message: str) -> Finding:
    fix = "The next run tries again; `manycpu clean` does so now"
    return Finding("target.directory", message, fix, fatal=False)
