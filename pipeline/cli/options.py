"""Options that several commands share: the fields of a run and its target, or where to look for runs."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
import yaml
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from manycpu.pipeline.accelerate_config import read_accelerate_config
from manycpu.pipeline.cli.panels import PanelCommand, PanelOption
from manycpu.pipeline.runfile import parse_yaml, read_run_file
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.targets import KINDS
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import open_context

__all__ = ["Command", "command", "fields", "fields_of", "location_options", "open_run", "run_id"]

Command = Callable[..., Any]
Options = Mapping[str, Any]
"""``run__field`` or ``target__field`` -> what was given; several where it may be repeated. Beside them what
``_OF_ACCELERATE`` names."""
_CONFIG = "--accelerate-config"
_OF_ACCELERATE = ("accelerate_config", "module", "words")


class _BeforeAScript(PanelCommand):
    """A command whose options end where a script begins: what follows is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.allow_interspersed_args = all(word.partition("=")[0] != _CONFIG for word in args)
        return super().parse_args(ctx, args)


_TARGET = "Target {}"  # title of a panel


def command(*args: Any, kind: str = "local", **attributes: Any) -> Callable[[Command], click.Command]:
    """Make a command, as ``click.command`` does; its short help has the options of one kind of target."""
    advanced = tuple(_TARGET.format(other) for other in KINDS if other not in ("local", kind))
    return click.command(*args, cls=_BeforeAScript, advanced=advanced, **attributes)


def fields(command: Command) -> Command:
    """Give a command the run file, or a config of Accelerate and a script, and an option for every field."""
    for (part, name), field in reversed(_FIELDS.items()):
        flag = _flag(part, name)
        metavar, more = _SHAPES[_shape(field)]
        metavar = "|".join(_choices(part, name)) or metavar
        help_text = (field.description or "local, baremetal or kubernetes.") + more
        command = click.option(
            flag,
            f"{part}__{name}",
            cls=PanelOption,
            panel=_panel(part, name),
            metavar=metavar,
            multiple=bool(more),
            help=help_text,
        )(command)
    for add in _FILES:
        command = add(command)
    return command


_FILES: tuple[Callable[[Command], Command], ...] = (
    click.option("-m", "module", is_flag=True, help=f"With {_CONFIG}: SCRIPT is the name of a module."),
    click.option(
        _CONFIG,
        type=click.Path(path_type=Path),
        metavar="CONFIG",
        help="A config that `accelerate config` has written; SCRIPT and its ARGS come last.",
    ),
    click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...]"),
    click.argument("file", required=False, type=click.Path(path_type=Path), metavar="[FILE | SCRIPT"),
)


Shape = Literal["value", "mapping", "list"]
_SHAPES: dict[Shape, tuple[str, str]] = {
    "value": ("VALUE", ""),
    "mapping": ("NAME=VALUE", " May be repeated; a whole mapping in YAML replaces the file's."),
    "list": ("VALUE", " May be repeated."),
}
_MODELS: dict[str, tuple[type[BaseModel], ...]] = {
    "run": (TrainingRun,),
    "target": tuple(KINDS.values()),
}


def _first_with(part: str, name: str) -> type[BaseModel]:
    """Find the model whose words on a field count: of several targets that have it, the first."""
    return next(model for model in _MODELS[part] if name in model.model_fields)


_FIELDS = {
    (part, name): _first_with(part, name).model_fields[name]
    for part, models in _MODELS.items()
    for model in models
    for name in model.model_fields
}


def _panel(part: str, name: str) -> str:
    """Name the panel of a field: its section in the trigger form, or its target."""
    model = _first_with(part, name)
    if part == "target":
        return "Target" if model is _MODELS[part][0] else _TARGET.format(model.model_fields["kind"].default)
    extra = model.model_fields[name].json_schema_extra
    return str(extra["section"]) if isinstance(extra, dict) else "Run"


def _flag(part: str, name: str) -> str:
    return f"--{'target-' if part == 'target' else ''}{name.replace('_', '-')}"


def _choices(part: str, name: str) -> list[str]:
    """List the values that a field takes, of all targets that have it; none where one takes any."""
    fields = [model.model_fields[name] for model in _MODELS[part] if name in model.model_fields]
    values = [_enumerated(field) or _literals(field.annotation) for field in fields]
    return list(dict.fromkeys(chain(*values))) if all(values) else []


def _enumerated(field: FieldInfo) -> list[str]:
    """Read the values that a field's schema lists, where its type does not."""
    extra = field.json_schema_extra
    return [str(value) for value in extra.get("enum", ())] if isinstance(extra, dict) else []  # type: ignore[union-attr]


def _literals(kind: Any) -> list[str]:
    inner = get_args(kind)
    return (
        list(inner) if get_origin(kind) is Literal else [value for each in inner for value in _literals(each)]
    )


def _shape(field: FieldInfo) -> Shape:
    kind, words = field.annotation, any(isinstance(each, BeforeValidator) for each in field.metadata)
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "mapping"
    return "list" if get_origin(kind) is tuple and not words else "value"


run_id = click.option(
    "--run-id", help="Tells this run from others; the same again goes on with it when its process is gone."
)


def location_options(command: Command) -> Command:
    """Add the options that say where to look for runs."""
    for name, help_text in reversed(_PLACES.items()):
        command = click.option(f"--{name}", metavar="VALUE", help=help_text)(command)
    return command


_PLACES = {
    "directory": "The folder of runs; default: $MANYCPU_HOME, or ~/.manycpu.",
    "namespace": "Look for runs on Kubernetes, in this namespace.",
    "connection": "Path of a kubeconfig; default: $KUBECONFIG, or ~/.kube/config.",
}


def open_run(file: Path | None, options: Options, name: str) -> RunContext:
    """Open the run that a file and options describe; ``name`` tells it from others."""
    parts = fields_of(file, options)
    config = options.get("accelerate_config")
    base = file.parent if file and not config else Path.cwd()
    ctx = open_context(parts["run"], parts["target"], "cli", name, base=base)
    return replace(ctx, run_file=config or file)


def fields_of(file: Path | None, options: Options) -> dict[str, dict[str, Any]]:
    """Read the fields of run and target from a file and from options, which win.

    Args:
        file: The run file; beside a config of Accelerate, the script.
        options: What else was given.

    Raises:
        BadInputError: Something of it cannot be read.
    """
    if config := options.get("accelerate_config"):
        return _with_config(config, file, options)
    if extra := [*(["-m"] if options.get("module") else []), *options.get("words", ())]:
        fix = f"A script's own words come after {_CONFIG} CONFIG SCRIPT, or in --args"
        raise BadInputError(f"{' '.join(extra)!r} cannot be used", fix=fix)
    run_fields, target_fields = read_run_file(file) if file else ({}, {})
    return _over({"run": run_fields, "target": target_fields}, options)


def _with_config(config: Path, script: Path | None, options: Options) -> dict[str, dict[str, Any]]:
    given = _over({"run": {}, "target": {}}, options)
    told = read_accelerate_config(config, given["run"], given["target"])
    if script and script.is_dir() and not options["module"]:
        raise BadInputError(f"{script} is a folder", field="run.program", fix="Give the script that trains")
    for note in told.notes:
        click.echo(f"{config}: {note}", err=True)
    program = {"program": f"-m {script}" if options["module"] else str(script)} if script else {}
    words = {"args": list(options["words"])} if options["words"] else {}
    for name in {**program, **words}.keys() & given["run"].keys():
        raise BadInputError("it is given twice", field=f"run.{name}", fix=f"Leave out {_flag('run', name)}")
    return _over({"run": {**told.run, **program, **words}, "target": told.target}, options)


def _over(parts: dict[str, dict[str, Any]], options: Options) -> dict[str, dict[str, Any]]:
    """Lay options over the fields of a file."""
    for option, value in options.items():
        if option not in _OF_ACCELERATE and value not in (None, ()):
            part, name = option.split("__", 1)
            parts[part][name] = _value(part, name, value, parts[part].get(name))
    return parts


def _value(part: str, name: str, raw: str | tuple[str, ...], before: Any) -> Any:
    """Parse an option: repeated values are merged; YAML where it looks so, else left to the field."""
    field, shape = f"{part}.{name}", _shape(_FIELDS[part, name])
    if isinstance(raw, str):
        return _read(field, raw, "[")  # a brace begins a placeholder
    if shape == "list":
        read = [_read(field, text) for text in raw]
        return [each for item in read for each in (item if isinstance(item, list) else [item])]
    mapping = dict(before) if isinstance(before, Mapping) else {}
    for text in raw:
        name, equals, value = text.partition("=")
        if text.lstrip().startswith("{"):
            mapping = _read(field, text)
        elif equals and name:
            mapping[name] = value
        else:
            fix = f"Write it as {_flag(*field.split('.'))} NAME=value, once for each"
            raise BadInputError(f"{text!r} is no NAME=value", field=field, fix=fix)
    return mapping


def _read(field: str, text: str, begins: tuple[str, ...] | str = ("{", "[")) -> Any:
    if not text.lstrip().startswith(begins):
        return text
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise BadInputError(f"{text!r} is not YAML: {error}", field=field) from error
