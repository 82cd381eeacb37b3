"""The commands status, logs, cancel and clean, for runs that have begun."""

import time
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Final

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters import process
from manycpu.pipeline.cli.options import location_options
from manycpu.pipeline.display import escaped
from manycpu.pipeline.ledger import Entry, Lease
from manycpu.pipeline.ledger.file import FileLedger, ledgers
from manycpu.pipeline.listeners import ReadableLog, tell
from manycpu.pipeline.spec.errors import BadInputError, ManycpuError, RunGoneError, require
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.targets import TargetFields
from manycpu.pipeline.spec.validation import read_target
from manycpu.pipeline.targets import driver_of
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import RunContext, home
from manycpu.pipeline.targets.open_run import reopen
from manycpu.pipeline.verbs import wait
from manycpu.pipeline.verbs.cancel import cancel_or_prevent, declare_gone
from manycpu.pipeline.verbs.cleanup import Remains, cleanup, remains
from manycpu.pipeline.verbs.report import left_behind_error

_KEPT_FOR_A_TIME: Final[Mapping[Remains, str]] = {
    Remains.UNREAD: "what its function returned could not be read, and is kept",
    Remains.FILES: "what its program wrote is kept",
    Remains.FAILED: "its output and checkpoints are kept",
    Remains.UNKNOWN: "its output and checkpoints are kept",
}
"""What remains of a run -> why `clean` leaves the run alone until the time is over."""
_KEPT: Final = "all of it is kept, as run.keep says"
"""The same, if nothing else remains of a run."""

_REASON_CHARACTERS: Final = 150  # of a run in the list: about two lines
_CANCEL = "manycpu cancel"  # who ended the run, in its ledger
Location = dict[str, str | None]
"""What ``location_options`` gave: directory, namespace and connection."""


def _require_name(ctx: click.Context, parameter: click.Parameter, name: str | None) -> str | None:  # noqa: ARG001
    """Refuse an empty NAME, such as that of an unset variable: it would fit every run."""
    if name is not None and not name.strip():
        raise BadInputError("NAME is empty", fix="Give a run's name: `manycpu status` lists them")
    return name


@click.command()
@click.argument("name", required=False, callback=_require_name)
@location_options
def status(name: str | None, **location: str | None) -> None:
    """List the runs of this machine or of a namespace, or look at one."""
    titles = ("state", "attempt", "begun", "--run-id")
    # `cancel` and `clean` take whole names only: a narrow terminal must not cut them.
    table = Table(Column("run", no_wrap=True), *(Column(title, overflow="fold") for title in titles))
    reasons = dict[str, str]()  # name of a run -> why it is in its state
    runs = [_find(name, location)] if name else _runs(location)
    for ctx in runs:
        try:
            entry = ctx.ledger.read()
            state, reason = _state_and_reason(ctx, entry)
        except RunGoneError:
            continue  # it ended meanwhile
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created))
        cells = (entry.name, state, str(entry.attempt), began, entry.run_id)
        table.add_row(*(Text(escaped(cell)) for cell in cells))
        if reason:
            reasons[entry.name] = reason
    if not table.rows:
        click.echo(
            f"no run in {_searched_place(location)}; "
            "a run that has ended leaves its report.json beside its model"
        )
        return
    console, is_cut = Console(), False
    console.print(table)
    if name:
        for reason in reasons.values():
            click.echo(_escaped_lines(reason))
        return
    for run, reason in reasons.items():
        first, _, rest = reason.partition("\n")
        text = f"{run}: {shorten(first, _REASON_CHARACTERS, placeholder=' ...')}"
        console.print(Text(escaped(text)))
        is_cut = is_cut or bool(rest) or not text.endswith(first)
    if is_cut:
        console.print(Text("`manycpu status NAME` shows a whole reason"))


def _escaped_lines(text: str) -> str:
    """Escape control characters, but keep the ends of lines."""
    return "\n".join(map(escaped, text.splitlines()))


def _state_and_reason(ctx: RunContext, entry: Entry) -> tuple[str, str]:
    """Return the state of a run, and why; after an error ``unknown``, so that other runs are still listed.

    Raises:
        RunGoneError: The run has ended meanwhile.
    """
    try:
        handle = ctx.driver.present_handle(ctx, entry)
        current = attempt_status(ctx, handle, entry) if handle else None
    except RunGoneError:  # also a ManycpuError
        raise
    except (ManycpuError, OSError, ValueError) as error:
        return "unknown", str(error)
    if current is None:
        return "not launched", ""
    export = entry.verbs.get("export")  # the run also fails if only its export does
    if current.state is RunState.SUCCEEDED and export is not None and export.result == "failed":
        return str(RunState.FAILED), export.error or ""
    if current.state is RunState.SUCCEEDED and export is None and ctx.run.output is not None:
        hint = "its model is not exported yet; the same run id exports it, also to another --output"
        return str(current.state), hint
    return str(current.state), current.reason


@click.command()
@click.argument("name", required=False, callback=_require_name)
@click.option("--follow", "-f", is_flag=True, help="Continue until the training ends.")
@location_options
def logs(name: str | None, *, follow: bool, **location: str | None) -> None:
    """Print the log of a run's current attempt; of its progress, a line every ten seconds.

    NAME is the name of the run or its beginning; default: the newest run.
    """
    if name:
        ctx = _find(name, location)
    elif runs := _runs(location):
        ctx = runs[-1]
        click.echo(f"run {ctx.name}", err=True)  # stdout has the log alone
    else:
        fix = "`manycpu report` shows the run that ended last"
        raise BadInputError(f"there is no run in {_searched_place(location)}", fix=fix)
    handle = ctx.driver.present_handle(ctx, ctx.ledger.read())
    if handle is None:
        raise BadInputError(f"run {ctx.name} has launched nothing yet", fix="See `manycpu status`")
    log = ReadableLog(click.echo)
    if follow:
        wait.wait(ctx, handle, log)
    else:
        tell(wait.lines_so_far(ctx, handle), log)
        log.flush()


@click.command()
@click.argument("name", callback=_require_name)
@click.option("--gone", is_flag=True, help="The host or container that it ran on is gone for good.")
@location_options
def cancel(name: str, *, gone: bool, **location: str | None) -> None:
    """End a run's training; `manycpu clean` may remove it then, unless another process resumes it.

    A training that has not been launched yet is not launched any more. NAME is the whole name of the run.
    """
    ctx = _find(name, location, whole=True)
    if gone:
        recorded = declare_gone(ctx, _CANCEL)
        outcome = "recorded as gone" if recorded else "nothing to record, no process of it was unreachable"
        click.echo(f"{ctx.name}: {outcome}; the same run id continues it, manycpu clean removes it")
        return
    outcome = cancel_or_prevent(ctx, by=_CANCEL)
    with suppress(RunGoneError):  # its process has cleaned up meanwhile
        now = ctx.ledger.now()
        # End the lease, so that `clean` may remove the run. A live holder cleans up by itself.
        ctx.ledger.change_lease(only_if=lambda lease: lease.holder is None or not lease.held(now), ended=True)
    click.echo(f"{ctx.name}: {outcome}")


@click.command()
@click.argument("name", required=False, callback=_require_name)
@click.option(
    "--data", is_flag=True, help="On this machine, also staged data, models and code that no run uses."
)
@click.option("--delete-model", is_flag=True, help="Of the run NAME, also a model that was not exported.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@location_options
def clean(name: str | None, *, data: bool, delete_model: bool, yes: bool, **location: str | None) -> None:
    """Remove what older runs left; the command lists it first, and asks.

    A run that a process works on is left alone, and so is a run with a model that was not exported.
    NAME is the whole name of the run.
    """
    if delete_model and name is None:
        raise BadInputError("--delete-model is for one run", fix="Name it: manycpu clean NAME --delete-model")
    candidates, partly_removed = _to_clean(name, location)
    removable = [ctx for ctx in candidates if _removable(ctx, delete_model=delete_model)]
    home_folder = home(location["directory"])
    folders: list[Path] = []
    if data and location["namespace"] is None:  # runs of a namespace have no folders here
        folders = _removable_folders(home_folder, leaving={ctx.name for ctx in removable})
    lines = [f"run {partial}: the rest of it, which an earlier removal left" for partial in partly_removed]
    lines += [*(f"run {ctx.name}: {ctx.where}" for ctx in removable), *map(str, folders)]
    for line in lines:
        click.echo(line)
    if not lines:
        click.echo("nothing to remove")
        return
    if not yes and not click.confirm("remove these?"):
        click.echo("nothing was removed")
        return
    not_deleted = [
        *_finish_removals(partly_removed, location),
        *_remove(removable, delete_model=delete_model),
    ]
    for folder in folders:
        # Those runs are gone now. Another one may have begun meanwhile.
        transfer.discard(folder, in_use=partial(_is_used, folder, home_folder))
    if not_deleted:
        raise left_behind_error(not_deleted)


def _to_clean(name: str | None, location: Location) -> tuple[list[RunContext], list[str]]:
    """Return the runs at a location, and names of partly removed ones; ``name``: only the run so named.

    Raises:
        BadInputError: There is no run of that name.
    """
    target = _target_of(location)
    partly_removed = driver_of(target.kind).half_removed(target)
    if name is None:
        return _runs(location), partly_removed
    if name in partly_removed:
        return [], [name]  # it has no ledger, so it is not among the runs
    return [_find(name, location, whole=True)], []


def _finish_removals(names: Iterable[str], location: Location) -> list[str]:
    """Delete the rest of partly removed runs; return what cannot be deleted and why, a line for each."""
    target = _target_of(location)
    driver = driver_of(target.kind)
    return [f"run {name}: {left}" for name in names for left in driver.finish_removal(target, name)]


def _remove(runs: Iterable[RunContext], *, delete_model: bool) -> list[str]:
    """Clean up runs, and print the advice of each; return what cannot be deleted and why, a line for each."""
    not_deleted: list[str] = []
    for ctx in runs:
        lease = _removable(ctx, delete_model=delete_model)  # it may have changed while the question waited
        if lease is None:
            continue
        # Of no attempt, which would have a folder: this process only removes the run.
        holder = process.handle_of_this_process(directory=Path(), name=ctx.name, attempt=0)
        try:
            with ctx.ledger.held_by(holder, lease):  # so that no other process resumes it meanwhile
                report = cleanup(ctx, keep=False, delete_model=delete_model)
        except RunGoneError:  # another process has removed it
            continue
        except (ManycpuError, OSError) as error:
            not_deleted.append(f"run {ctx.name}: {error}")
            continue
        if report is None:  # it was cleaned up already
            continue
        if report.advice:
            click.echo(f"run {ctx.name}: {report.advice}")
        not_deleted += report.left_behind
    return not_deleted


def _runs(location: Location) -> list[RunContext]:
    """List the runs at a location, the newest last."""
    target = _target_of(location)
    return driver_of(target.kind).runs(target)


def _target_of(location: Location) -> TargetFields:
    """Return a target at a location: this machine, or a namespace."""
    fields = {"kind": "local", "directory": location["directory"]}
    if location["namespace"] is not None:
        require("kubernetes", field="--namespace", what="Kubernetes")
        names = ("namespace", "connection")
        fields = {"kind": "kubernetes", **{name: location[name] for name in names}}
    return read_target(fields)


def _find(name: str, location: Location, *, whole: bool = False) -> RunContext:
    """Find a run by its name; unless ``whole``, also by the beginning of its name.

    Raises:
        BadInputError: No run, or more than one, has such a name.
    """
    runs, place = _runs(location), _searched_place(location)
    similar = [ctx for ctx in runs if ctx.name.startswith(name)]
    matches = [ctx for ctx in similar if ctx.name == name]
    if not matches and not whole:
        matches = similar
    if len(matches) == 1:
        return matches[0]
    if not similar:
        known = ", ".join(ctx.name for ctx in runs)
        fix = f"Name a run, and not its --run-id: {known}. " if known else "No run is there. "
        fix += "A run that has ended leaves report.json and run.log beside its model"
        raise BadInputError(f"there is no run {name!r} in {place}", fix=fix)
    problem = f"there is no run {name!r}" if whole else f"{len(similar)} runs begin with {name!r}"
    fix = f"Give the whole name: {', '.join(ctx.name for ctx in similar)}"
    raise BadInputError(f"{problem} in {place}", fix=fix)


def _searched_place(location: Location) -> str:
    """Name the namespace or the folder in which runs are looked for."""
    return location["namespace"] or str(home(location["directory"]))


def _removable(ctx: RunContext, *, delete_model: bool) -> Lease | None:
    """Return the lease of a run that may be removed.

    None: the run is gone, or it must not be removed; then the reason is printed.
    """
    lease = None
    try:
        lease = ctx.ledger.lease()
        reason = _reason_to_keep(ctx, lease, delete_model=delete_model)
    except RunGoneError:  # another process has removed it
        return None
    except (ManycpuError, OSError, ValueError) as error:
        reason = str(error)
    if reason:
        click.echo(f"run {ctx.name} is left alone: {reason}")
    return None if reason else lease


def _reason_to_keep(ctx: RunContext, lease: Lease, *, delete_model: bool) -> str:
    """Return why `clean` must not remove a run with this lease; an empty text if it may.

    Raises:
        RunGoneError: Another process has removed it.
    """
    now = ctx.ledger.now()
    entry = ctx.ledger.read()
    handle = ctx.driver.present_handle(ctx, entry)
    current = attempt_status(ctx, handle, entry) if handle else None
    if current and current.state is RunState.UNKNOWN:
        command = ctx.typed("cancel", "--gone")
        return (
            f"whether it runs is unknown: {current.reason}; `{command}` records that this place is gone for "
            "good"
        )
    running = current is not None and not current.state.terminal
    # Held: a process works on the run. Running and not over: the holder may have died, but the training still
    # runs, and another process may resume the run until the time of the lease has passed.
    if lease.held(now) or (running and not lease.over(now)):
        return f"a process works on it; `{ctx.typed('cancel')}` ends that"
    remaining = Remains.NOTHING if delete_model else remains(ctx)
    if remaining is Remains.MODEL:
        return f"it has a model that was not exported; `{ctx.deletion}` deletes it"
    still_kept = lease.kept and not lease.no_longer_kept(now)  # the time for which results are kept lasts
    keeps_whole = ctx.run.keep in ("always", "on_failure") and not delete_model
    if still_kept and (remaining in _KEPT_FOR_A_TIME or keeps_whole):
        return f"{_KEPT_FOR_A_TIME.get(remaining, _KEPT)}; `{ctx.deletion}` deletes that"
    return ""


def _removable_folders(home_folder: Path, leaving: Container[str] = ()) -> list[Path]:
    """List the folders of staged data, models and code that may be removed.

    Folders of other programs, which may lie beside them, are not listed.

    If a run may still use them, prints its name and returns none.

    Args:
        home_folder: Manycpu's folder on this machine.
        leaving: Names of runs that are removed too: it does not matter what they use.
    """
    staying = [ledger for ledger in ledgers(home_folder / "runs") if ledger.directory.name not in leaving]
    users = [ledger.directory.name for ledger in staying if _may_use_staged(ledger)]
    if users:
        click.echo(f"staged data, models and code are left alone: {', '.join(users)} may use them")
        return []
    # Runs that other machines have here, as on a host, have no ledger, and record each folder that they use.
    uses = [path for path in home_folder.glob("runs/*/uses/*/*") if path.parents[2].name not in leaving]
    folders: list[Path] = []
    for part in ("data", "model", "code"):
        if (home_folder / part).is_dir():
            used = {path.name for path in uses if path.parent.name == part}
            paths = sorted(path for path in (home_folder / part).iterdir() if path.name not in used)
            folders += [path for path in paths if path.is_dir() and transfer.is_copy(path)]
    return folders


def _is_used(folder: Path, home_folder: Path) -> bool:
    """Whether a run may use a folder of staged data, a model or code."""
    return folder not in _removable_folders(home_folder)


def _may_use_staged(ledger: FileLedger) -> bool:
    """Whether a run may use staged folders: true if `clean` must leave the run, or if it cannot be read."""
    home_folder = str(ledger.directory.parents[1])
    try:
        ctx = reopen(ledger.read(), directory=home_folder)
        return bool(_reason_to_keep(ctx, ctx.ledger.lease(), delete_model=False))
    except RunGoneError:
        return False
    except (ManycpuError, OSError, ValueError):
        return True


COMMANDS = (status, logs, cancel, clean)
