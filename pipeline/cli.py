"""The command ``manycpu``: the verbs without Airflow."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click
import yaml
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from manycpu.pipeline import display, transfer
from manycpu.pipeline.render import as_yaml
from manycpu.pipeline.report import Report
from manycpu.pipeline.runfile import read_run_file
from manycpu.pipeline.spec import cpu_plan, description, events
from manycpu.pipeline.spec.errors import BadInputError, ManycpuError
from manycpu.pipeline.spec.machine import Machine
from manycpu.pipeline.spec.targets import BareMetal, Kubernetes, Local
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.spec.validation import read_run
from manycpu.pipeline.verbs import context, launch, preflight, report, runs, train, wait
from manycpu.pipeline.verbs.cancel import cancel as end_run
from manycpu.pipeline.verbs.cleanup import cleanup

__all__ = ["main"]

_INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended
Command = Callable[..., Any]


def _fields(command: Command) -> Command:
    """Give a command the run file, and an option for every field of a run and of the targets."""
    targets = Local.model_fields | BareMetal.model_fields | Kubernetes.model_fields
    options = [("run", "--", TrainingRun.model_fields), ("target", "--target-", targets)]
    for part, dashes, fields in reversed(options):
        for name, field in reversed(fields.items()):
            flag = dashes + name.replace("_", "-")
            help_text = field.description or "local, baremetal or kubernetes."
            command = click.option(flag, f"{part}__{name}", metavar="VALUE", help=help_text)(command)
    file = click.argument("file", required=False, type=click.Path(path_type=Path))
    return file(command)


_run_id = click.option("--run-id", help="Tells this run from others; the same again attaches to it.")


def _place(command: Command) -> Command:
    """Give a command the options that say where to look for runs."""
    for name, help_text in reversed(_PLACES.items()):
        command = click.option(f"--{name}", metavar="VALUE", help=help_text)(command)
    return command


_PLACES = {
    "directory": "The folder of runs; default: $MANYCPU_HOME, or ~/.manycpu.",
    "namespace": "Look for runs on Kubernetes, in this namespace.",
    "connection": "Path of a kubeconfig; default: $KUBECONFIG, or ~/.kube/config.",
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="manycpu")
def cli() -> None:
    """Train PyTorch models on many CPUs: on this machine, on hosts of a hostfile, on Kubernetes."""


@cli.command()
@_fields
@_run_id
def run(file: Path | None, run_id: str | None, **options: str | None) -> None:
    """Do a whole run: stage, build, launch, wait, export, clean up.

    FILE is YAML with `run` and `target`; options win over it.
    """
    run_id = run_id or train.new_run_id()
    ctx = _context(file, options, run_id)
    console = Console()
    console.print(f"run {ctx.name} (--run-id {run_id})", markup=False, highlight=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, _interrupt)
    with display.Display(console) as shown:
        try:
            done = train.perform(ctx, shown)
        except BadInputError:
            raise
        except ManycpuError:
            _show_report(console, ctx)
            raise
    display.summary(console, done, report.report_path(ctx))


@cli.command(name="preflight")
@_fields
def preflight_(file: Path | None, **options: str | None) -> None:
    """Check a run against its target, and start nothing."""
    findings = preflight.preflight(_context(file, options, "preflight"))
    for finding in findings:
        click.echo(f"{'error' if finding.fatal else 'warning'}: {finding}")
    if any(finding.fatal for finding in findings):
        sys.exit(BadInputError.exit_code)
    click.echo("ready: nothing stands in the way of this run")


@cli.command()
@_fields
@click.option(
    "--node", metavar="TEXT", help=f"Another node than this machine, such as {description.EXAMPLE}."
)
def plan(file: Path | None, node: str | None, **options: str | None) -> None:
    """Show the CPU plan of a node: processes, threads, cores and memory, and why.

    Of this machine or of the one that --node describes; for the run of FILE, or for any.
    """
    machine = description.describe(node) if node else Machine.observe()
    run_fields = _parts(file, options)["run"]
    wanted = read_run({"program": "any", "output": "any", **run_fields}).wanted
    made = cpu_plan.plan(machine, wanted)
    table = Table("what", "value", "why")
    for row in made.rows:
        table.add_row(*map(escape, row))
    Console().print(table)
    for warning in made.warnings:
        click.echo(f"warning: {warning}")


@cli.command()
@_fields
@_run_id
def render(file: Path | None, run_id: str | None, **options: str | None) -> None:
    """Print what would be run, as YAML."""
    ctx = _context(file, options, run_id or "render")
    click.echo(as_yaml(launch.manifest(ctx)), nl=False)


@cli.command()
@_fields
@click.option("-o", "--output", type=click.Path(path_type=Path), default="image.tar", show_default=True)
def image(file: Path | None, output: Path, **options: str | None) -> None:
    """Write the training image as an OCI archive, for nodes without a registry; print its name."""
    ctx = _context(file, options, "image")
    if not isinstance(ctx, context.ClusterContext):
        raise BadInputError("only Kubernetes has images", field="target.kind")
    from manycpu.pipeline.verbs.on_kubernetes.save import save

    click.echo(save(ctx, output))


@cli.command()
@click.argument("name", required=False)
@_place
def status(name: str | None, **place: str | None) -> None:
    """List the runs of this machine or of a namespace, or look at one."""
    table = Table("run", "state", "attempt", "begun", "reason")
    for ctx in [_find(name, place)] if name else _runs(place):
        entry = ctx.ledger.read()
        handle = launch.present_handle(ctx, entry)
        seen = launch.status(ctx, handle, entry) if handle else None
        begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created))
        state, reason = (str(seen.state), seen.reason) if seen else ("not launched", "")
        table.add_row(entry.name, state, str(entry.attempt), begun, reason)
    Console().print(table)


@cli.command()
@click.argument("name")
@click.option("--follow", "-f", is_flag=True, help="Go on until the training ends.")
@_place
def logs(name: str, *, follow: bool, **place: str | None) -> None:
    """Print the log of a run's present attempt."""
    ctx = _find(name, place)
    handle = launch.present_handle(ctx, ctx.ledger.read())
    if handle is None:
        raise BadInputError(f"run {ctx.name} has launched nothing yet", fix="See `manycpu status`")
    if follow:
        wait.wait(ctx, handle, lambda line: click.echo(events.readable(line)))
        return
    for line in wait.watch(ctx, handle).look()[0]:
        click.echo(events.readable(line))


@cli.command()
@click.argument("name")
@_place
def cancel(name: str, **place: str | None) -> None:
    """End a run's training."""
    ctx = _find(name, place)
    ended = end_run(ctx, by="manycpu cancel")
    click.echo(f"{ctx.name}: {'ended' if ended else 'nothing was running'}")


@cli.command()
@click.argument("name", required=False)
@click.option(
    "--data", is_flag=True, help="On this machine, also staged data, models and code that no run uses."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@_place
def clean(name: str | None, *, data: bool, yes: bool, **place: str | None) -> None:
    """Remove what older runs left: shown first, and asked about. Running ones are left alone."""
    found = [_find(name, place)] if name else _runs(place)
    ended = [ctx for ctx in found if not _running(ctx)]
    here = place["namespace"] is None and len(ended) == len(found)
    folders = list(_unused(context.home(place["directory"]))) if data and here else []
    for what in [*(f"run {ctx.name}: {ctx.where}" for ctx in ended), *map(str, folders)]:
        click.echo(what)
    if not ended and not folders:
        click.echo("nothing to remove")
        return
    if not yes:
        click.confirm("remove these?", abort=True)
    for ctx in ended:
        cleanup(ctx, keep=False)
    for folder in folders:
        transfer.discard(folder)


def main() -> None:
    """Run the command; errors are one message and an exit code: 2 for bad input, otherwise 1."""
    try:
        cli(standalone_mode=False)
    except ManycpuError as error:
        click.echo(f"manycpu: {error}", err=True)
        sys.exit(_INTERRUPTED if isinstance(error.__cause__, KeyboardInterrupt) else error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_INTERRUPTED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)


def _context(file: Path | None, options: dict[str, str | None], run_id: str) -> context.RunContext:
    parts = _parts(file, options)
    base = file.parent if file else Path.cwd()
    return context.open_context(parts["run"], parts["target"], "cli", run_id, base=base)


def _parts(file: Path | None, options: dict[str, str | None]) -> dict[str, dict[str, Any]]:
    """Read the fields of run and target from a file, and from options, which win."""
    run_fields, target_fields = read_run_file(file) if file else ({}, {})
    parts = {"run": run_fields, "target": target_fields}
    for option, text in options.items():
        if text is not None:
            part, name = option.split("__", 1)
            parts[part][name] = _value(name, text)
    return parts


def _value(name: str, text: str) -> Any:
    """Read an option: mappings and lists are YAML, all else is left to the field."""
    field = TrainingRun.model_fields.get(name)
    kind = field.annotation if field else None
    composite = isinstance(kind, type) and issubclass(kind, BaseModel)
    if composite or text.lstrip().startswith(("{", "[")):
        return yaml.safe_load(text)
    return text


def _show_report(console: Console, ctx: context.RunContext) -> None:
    from manycpu.pipeline import report as reports

    written: Report | None = reports.read(ctx.output)
    if written is not None and written.key == ctx.key:
        display.summary(console, written, report.report_path(ctx))


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the shape of a signal handler
    raise KeyboardInterrupt


def _runs(place: dict[str, str | None]) -> list[context.RunContext]:
    if place["namespace"] is not None:
        return runs.in_namespace(place["namespace"], place["connection"])
    return runs.on_this_machine(context.home(place["directory"]))


def _find(name: str, place: dict[str, str | None]) -> context.RunContext:
    known = _runs(place)
    found = [ctx for ctx in known if ctx.ledger.read().name.startswith(name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(ctx.name for ctx in (found or known)) or "none"
    said = f"{len(found)} runs begin with {name!r}" if found else f"there is no run {name!r}"
    where = place["namespace"] or context.home(place["directory"])
    raise BadInputError(f"{said} in {where}", fix=f"Runs there: {names}")


def _running(ctx: context.RunContext) -> bool:
    entry = ctx.ledger.read()
    handle = launch.present_handle(ctx, entry)
    return handle is not None and not launch.status(ctx, handle, entry).state.terminal


def _unused(home: Path) -> Iterator[Path]:
    for part in ("data", "model", "code"):
        folder = home / part
        yield from sorted(path for path in folder.iterdir() if path.is_dir()) if folder.exists() else ()


if __name__ == "__main__":
    main()
