"""The commands run, preflight, plan, render and image, for a run that a file and options describe."""

import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from manycpu.pipeline import display
from manycpu.pipeline.cli import node_spec, options
from manycpu.pipeline.spec import cpu_plan, memory_estimate
from manycpu.pipeline.spec.credentials import redacted_description
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.machine import Machine, has_bf16
from manycpu.pipeline.spec.validation import read_run
from manycpu.pipeline.targets.open_run import find
from manycpu.pipeline.targets.program_code import main_file
from manycpu.pipeline.verbs import all_verbs, preflight
from manycpu.pipeline.verbs.source_checks import process_findings

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
"""Unit of a number of parameters -> its factor."""


@options.command()
@options.fields
@options.run_id
def run(file: Path | None, run_id: str | None, **values: Any) -> None:
    """Do a whole run: stage, build, launch, wait, export, clean up.

    FILE is YAML with `run` and `target`; options win over it. With --accelerate-config, SCRIPT is what to
    run, and the words after it are its own. The run then has an output only if --output names one.
    """
    # A closed terminal ends neither the run nor a library that prints.
    sys.stdout, sys.stderr = display.lossy(sys.stdout), display.lossy(sys.stderr)
    has_run_id = bool(run_id)
    run_id = run_id or all_verbs.new_run_id()
    ctx = options.open_run(file, values, run_id)
    if has_run_id:
        ctx = find(ctx)  # the run may have begun under another name
    console = Console()
    console.print(f"run {ctx.name} (--run-id {run_id})", markup=False, highlight=False, soft_wrap=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the run as Ctrl-C does
    with display.Display(console) as run_display:
        all_verbs.run_all(ctx, run_display)


@options.command(name="preflight")
@options.fields
@options.run_id
def preflight_(file: Path | None, run_id: str | None, **values: Any) -> None:
    """Check a run against its target, and start nothing."""
    ctx = options.open_run(file, values, run_id or "preflight")
    if run_id:
        ctx = find(ctx)  # the run may have begun under another name
    findings = preflight.preflight(ctx)
    for finding in findings:
        click.echo(f"{'error' if finding.fatal else 'warning'}: {finding}")
    if any(finding.fatal for finding in findings):
        sys.exit(BadInputError.exit_code)
    click.echo("ready: nothing stands in the way of this run")


def _count(ctx: click.Context, parameter: click.Parameter, text: str | None) -> int | None:  # noqa: ARG001
    """Return the count of parameters that a text such as 350M or 7B means; None: it was not given.

    Raises:
        BadInputError: The text means no count, or less than 1.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)([KMB]?)", text, flags=re.IGNORECASE)
    count = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if count < 1:
        fix = "Write it as 350M or 7B"
        raise BadInputError(f"{text!r} is no number of parameters", field="--parameters", fix=fix)
    return count


@options.command()
@options.fields
@click.option("--node", metavar="TEXT", help=f"Another node than this machine, such as {node_spec.EXAMPLE}.")
@click.option(
    "--parameters",
    metavar="COUNT",
    callback=_count,
    help="Parameters of the model, such as 7B or 350M, where its files are not here.",
)
def plan(file: Path | None, node: str | None, parameters: int | None, **values: Any) -> None:
    """Show the plan of a node: processes, threads, cores and memory, and why; and what a training takes.

    The node is this machine or the one that --node describes; the run is that of FILE, or any. The second
    table is the memory of a recipe's ranks, or of a model with --parameters (docs/large_models.md).
    """
    machine = node_spec.describe(node) if node else Machine.observe()
    base = file.parent if file else Path.cwd()  # where relative paths of the run start
    run_fields = options.fields_of(file, values)["run"]
    # The plan needs no program and no output, but a run has both.
    requested = read_run({"program": "any", "output": "any", **run_fields})
    node_plan = cpu_plan.plan(machine, requested.cpu_request)
    table = Table("what", "value", "why")
    for row in node_plan.rows:
        table.add_row(*map(escape, row))
    Console().print(table)
    for warning in node_plan.warnings:
        click.echo(f"warning: {warning}")
    if parameters is not None or requested.program in memory_estimate.RECIPES:
        # The run may leave the number of processes to the plan, and its memory to the node.
        sized_run = requested.model_copy(update={"nproc_per_node": node_plan.processes})
        memory = requested.cpu_request.memory or machine.memory
        estimated = memory_estimate.estimate(sized_run, base, parameters, has_bf16=has_bf16(machine.flags))
        _show_memory(estimated, memory)
    if path := main_file(requested, base):
        source = path.read_text(errors="replace")
        for finding in process_findings(source, path.name, requested.subprocesses, node_plan.threads):
            click.echo(f"warning: {finding}")


def _show_memory(estimated: memory_estimate.Estimate | str, memory: int | None) -> None:
    """Print an estimate as a table, or why there is none; ``memory``: bytes of the node, None: unknown."""
    if isinstance(estimated, str):  # why there is no estimate
        click.echo(f"memory: {estimated}")
        return
    table = Table("memory", "a replica each", f"sharded, {estimated.over}", "why")
    for row in memory_estimate.rows(estimated, memory):
        table.add_row(*map(escape, row))
    Console().print(table)


@options.command()
@options.fields
@options.run_id
def render(file: Path | None, run_id: str | None, **values: Any) -> None:
    """Print what would be run, as YAML; secrets are shown as ***."""
    ctx = options.open_run(file, values, run_id or "render")
    shown = redacted_description(ctx.run.model_dump(include={"env", "args"}))
    ctx = replace(ctx, run=ctx.run.model_copy(update=shown))
    click.echo(as_yaml(*ctx.driver.objects(ctx)), nl=False)


@options.command(kind="kubernetes")
@options.fields
@click.option("-o", "--archive", type=click.Path(path_type=Path), default="image.tar", show_default=True)
def image(file: Path | None, archive: Path, **values: Any) -> None:
    """Write the training image as an OCI archive, for nodes without a registry; print its name."""
    ctx = options.open_run(file, values, "image")
    with display.Display(Console(stderr=True)):  # shows the build's log; stdout has the name alone
        name = ctx.driver.save_image(ctx, archive)
    click.echo(name)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - repeated parts are written in full
        return True


# A text of several lines, such as a small file in a ConfigMap, is shown as such.
_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def as_yaml(*manifests: Any) -> str:
    """Write Kubernetes objects as YAML documents, for people and for ``kubectl create -f``."""
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=110)


COMMANDS = (run, preflight_, plan, render, image)
