"""The options that commands share, and what they describe: a run and a target, or a run that has begun."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import BaseModel

from manycpu.pipeline.runfile import read_run_file
from manycpu.pipeline.spec.targets import BareMetal, Kubernetes, Local
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.verbs.context import RunContext, open_context

__all__ = ["Command", "described", "fields", "fields_of", "place", "run_id"]

Command = Callable[..., Any]


def fields(command: Command) -> Command:
    """Give a command the run file, and an option for every field of a run and of the targets."""
    targets = Local.model_fields | BareMetal.model_fields | Kubernetes.model_fields
    options = [("run", "--", TrainingRun.model_fields), ("target", "--target-", targets)]
    for part, dashes, known in reversed(options):
        for name, field in reversed(known.items()):
            flag = dashes + name.replace("_", "-")
            help_text = field.description or "local, baremetal or kubernetes."
            command = click.option(flag, f"{part}__{name}", metavar="VALUE", help=help_text)(command)
    file = click.argument("file", required=False, type=click.Path(path_type=Path))
    return file(command)


run_id = click.option("--run-id", help="Tells this run from others; the same again attaches to it.")


def place(command: Command) -> Command:
    """Give a command the options that say where to look for runs."""
    for name, help_text in reversed(_PLACES.items()):
        command = click.option(f"--{name}", metavar="VALUE", help=help_text)(command)
    return command


_PLACES = {
    "directory": "The folder of runs; default: $MANYCPU_HOME, or ~/.manycpu.",
    "namespace": "Look for runs on Kubernetes, in this namespace.",
    "connection": "Path of a kubeconfig; default: $KUBECONFIG, or ~/.kube/config.",
}


def described(file: Path | None, options: dict[str, str | None], name: str) -> RunContext:
    """Open the run that a file and options describe; its name tells it from others."""
    parts = fields_of(file, options)
    base = file.parent if file else Path.cwd()
    return open_context(parts["run"], parts["target"], "cli", name, base=base)


def fields_of(file: Path | None, options: dict[str, str | None]) -> dict[str, dict[str, Any]]:
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
