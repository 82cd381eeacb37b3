"""Commands for runs that have begun: status, logs, cancel and clean."""

import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column, Table

from manycpu.pipeline import transfer
from manycpu.pipeline.cli.options import location_options
from manycpu.pipeline.ledger.file import FileLedger, ledgers
from manycpu.pipeline.listeners import ReadableLog, tell
from manycpu.pipeline.spec.errors import BadInputError, ManycpuError, RunGoneError
from manycpu.pipeline.targets import runs
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import RunContext, home
from manycpu.pipeline.verbs import launch, wait
from manycpu.pipeline.verbs.cancel import cancel as end_run
from manycpu.pipeline.verbs.cancel import withhold
from manycpu.pipeline.verbs.cleanup import cleanup, undelivered

__all__ = ["COMMANDS"]

_CANCEL = "manycpu cancel"


def _some(ctx: click.Context, parameter: click.Parameter, name: str | None) -> str | None:  # noqa: ARG001
    """Refuse an empty NAME, such as that of a variable which is not set: every run's name begins with it."""
    if name is not None and not name.strip():
        raise BadInputError("NAME is empty", fix="Give a run's name: `manycpu status` lists them")
    return name


@click.command()
@click.argument("name", required=False, callback=_some)
@location_options
def status(name: str | None, **location: str | None) -> None:
    """List the runs of this machine or of a namespace, or look at one."""
    table = Table("run", "state", "attempt", "begun", Column("reason", overflow="fold"))
    for ctx in [_find(name, location)] if name else _runs(location):
        entry = ctx.ledger.read()
        handle = launch.present_handle(ctx, entry)
        current = attempt_status(ctx, handle, entry) if handle else None
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created))
        state, reason = (str(current.state), current.reason) if current else ("not launched", "")
        table.add_row(entry.name, state, str(entry.attempt), began, reason)
    if not table.rows:
        click.echo(f"no run in {_place(location)}; what a run leaves beside its model is its report.json")
        return
    Console().print(table)


@click.command()
@click.argument("name", callback=_some)
@click.option("--follow", "-f", is_flag=True, help="Go on until the training ends.")
@location_options
def logs(name: str, *, follow: bool, **location: str | None) -> None:
    """Print the log of a run's present attempt; of its progress, a line every ten seconds."""
    ctx = _find(name, location)
    handle = launch.present_handle(ctx, ctx.ledger.read())
    if handle is None:
        raise BadInputError(f"run {ctx.name} has launched nothing yet", fix="See `manycpu status`")
    if follow:
        wait.wait(ctx, handle, ReadableLog(click.echo))
        return
    watching, log = wait.watch(ctx, handle), ReadableLog(click.echo)
    while True:
        tell(watching.look()[0], log)
        if not watching.behind:
            log.flush()
            return


@click.command()
@click.argument("name", callback=_some)
@location_options
def cancel(name: str, **location: str | None) -> None:
    """End a run's training; `manycpu clean` may remove it then, unless somebody goes on with it.

    What is not launched yet will not be.
    """
    ctx = _find(name, location)
    outcome = "ended" if end_run(ctx, by=_CANCEL) else "nothing was running"
    if outcome != "ended" and withhold(ctx, by=_CANCEL):
        outcome += "; nothing more of it will be launched"
    with suppress(RunGoneError):  # its process lived, and has cleaned up meanwhile
        lease = ctx.ledger.lease()
        if lease.holder is None or not lease.held(time.time()):  # else it lives, and cleans up itself
            ctx.ledger.change_lease(ended=True)
    click.echo(f"{ctx.name}: {outcome}")


@click.command()
@click.argument("name", required=False, callback=_some)
@click.option(
    "--data", is_flag=True, help="On this machine, also staged data, models and code that no run uses."
)
@click.option("--delete-model", is_flag=True, help="Of the run NAME, also a model that was not exported.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@location_options
def clean(name: str | None, *, data: bool, delete_model: bool, yes: bool, **location: str | None) -> None:
    """Remove what older runs left: shown first, and asked about.

    What somebody works on is left alone, whatever its step; so is a run with a model that was not exported.
    """
    if delete_model and name is None:
        raise BadInputError("--delete-model is for one run", fix="Name it: manycpu clean NAME --delete-model")
    candidates = [_find(name, location)] if name else _runs(location)
    ended = [ctx for ctx in candidates if _is_removable(ctx, delete_model=delete_model)]
    home_folder = home(location["directory"])
    folders = (
        _unused(home_folder, {ctx.name for ctx in ended}) if data and location["namespace"] is None else []
    )
    for line in [*(f"run {ctx.name}: {ctx.where}" for ctx in ended), *map(str, folders)]:
        click.echo(line)
    if not ended and not folders:
        click.echo("nothing to remove")
        return
    if not yes:
        click.confirm("remove these?", abort=True)
    for ctx in ended:
        if _is_removable(ctx, delete_model=delete_model):  # the answer may have taken its time
            cleanup(ctx, keep=False, delete_model=delete_model)
    for folder in folders:
        if _unused(home_folder):  # a run may have begun meanwhile
            transfer.discard(folder)


def _runs(location: dict[str, str | None]) -> list[RunContext]:
    if location["namespace"] is not None:
        return runs.in_namespace(location["namespace"], location["connection"])
    return runs.on_this_machine(home(location["directory"]))


def _find(name: str, location: dict[str, str | None]) -> RunContext:
    all_runs = _runs(location)
    matching = [ctx for ctx in all_runs if ctx.ledger.read().name.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(ctx.name for ctx in (matching or all_runs)) or "none"
    problem = f"{len(matching)} runs begin with {name!r}" if matching else f"there is no run {name!r}"
    raise BadInputError(f"{problem} in {_place(location)}", fix=f"Runs there: {names}")


def _place(location: dict[str, str | None]) -> str:
    return location["namespace"] or str(home(location["directory"]))


def _is_removable(ctx: RunContext, *, delete_model: bool) -> bool:
    """Whether a run may be removed; prints why where not."""
    try:
        why = _reason_to_keep(ctx, delete_model=delete_model)
    except RunGoneError:
        return False
    except ManycpuError as error:
        why = str(error)
    if why:
        click.echo(f"run {ctx.name} is left alone: {why}")
    return not why


def _reason_to_keep(ctx: RunContext, *, delete_model: bool) -> str:
    lease, now = ctx.ledger.lease(), time.time()
    if lease.held(now) or (_running(ctx) and not lease.over(now)):
        return f"somebody works on it; `manycpu cancel {ctx.name}` ends that"
    if not delete_model and undelivered(ctx):
        return f"it has a model that was not exported; `manycpu clean {ctx.name} --delete-model` deletes it"
    return ""


def _running(ctx: RunContext) -> bool:
    entry = ctx.ledger.read()
    handle = launch.present_handle(ctx, entry)
    return handle is not None and not attempt_status(ctx, handle, entry).state.terminal


def _unused(home_folder: Path, leaving: Container[str] = ()) -> list[Path]:
    """List staged data, models and code; none, and a line why, where another run may use them."""
    others = [ledger for ledger in ledgers(home_folder / "runs") if ledger.directory.name not in leaving]
    if using := [ledger.directory.name for ledger in others if _uses(ledger)]:
        click.echo(f"staged data, models and code are left alone: {', '.join(using)} may use them")
        return []
    folders = [folder for part in ("data", "model", "code") if (folder := home_folder / part).is_dir()]
    return [path for folder in folders for path in sorted(folder.iterdir()) if path.is_dir()]


def _uses(ledger: FileLedger) -> bool:
    """Whether a run may use what is staged: it is not over, or cannot be read."""
    try:
        return bool(_reason_to_keep(runs.reopen_folder(ledger.directory), delete_model=False))
    except RunGoneError:
        return False
    except ManycpuError:
        return True


COMMANDS = (status, logs, cancel, clean)
