"""Options that several commands share: the fields of a run and its target, and where to look for runs."""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import click
import yaml
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from manycpu.pipeline.accelerate_config import read_accelerate_config
from manycpu.pipeline.runfile import parse_yaml, read_run_file
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.naming import is_key
from manycpu.pipeline.spec.targets import KINDS
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import open_context

Command = Callable[..., Any]
Options = Mapping[str, Any]
"""``run__field`` or ``target__field`` -> the given text, a tuple if the option may be repeated; and the
parameters in ``_SCRIPT_PARAMETERS``."""
Shape = Literal["value", "mapping", "list", "words"]

_CONFIG: Final = "--accelerate-config"
_SCRIPT_PARAMETERS: Final = ("accelerate_config", "module", "words")
_TARGET_PANEL: Final = "Target {}"
_OTHER_PANEL: Final = "Options"  # of options that name no panel
_HELP_ALL: Final = "manycpu.help_all"  # key in click's context: --help-all was given
_CLAUSE_END: Final = re.compile(r"[.;] ")
_SHAPES: Final[dict[Shape, tuple[str, str]]] = {
    "value": ("VALUE", ""),
    "mapping": ("NAME=VALUE", " May be repeated; a whole mapping in YAML replaces the file's."),
    "list": ("VALUE", " May be repeated."),
    "words": ("VALUE", " May be repeated."),
}
"""How the help shows a value, and what it adds if the option may be repeated."""
_MODELS: Final[dict[str, tuple[type[BaseModel], ...]]] = {
    "run": (TrainingRun,),
    "target": tuple(KINDS.values()),
}
_FIELDS: Final[dict[tuple[str, str], tuple[type[BaseModel], FieldInfo]]] = {}
"""Part and name of a field -> its model (of several targets the first that has it) and its description."""
for _part, _models in _MODELS.items():
    for _model in _models:
        for _name, _field in _model.model_fields.items():
            _FIELDS.setdefault((_part, _name), (_model, _field))


class _PanelOption(click.Option):
    """An option in a panel of the help; without --help-all, the help shows the first clause of its text."""

    def __init__(self, *args: Any, panel: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.panel = panel

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option and its help text; without --help-all, only the text's first clause."""
        record = super().get_help_record(ctx)
        if record is None or ctx.meta.get(_HELP_ALL):
            return record
        return record[0], _CLAUSE_END.split(record[1], maxsplit=1)[0].rstrip(".") + "."


class _RunCommand(click.Command):
    """A command for a run: its help has panels, without the ``advanced`` ones unless --help-all is given.

    With a config of Accelerate, the command's own options end at the script: the words after it are the
    script's.
    """

    def __init__(self, *args: Any, advanced: tuple[str, ...], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._advanced = advanced
        advanced_panels = " and ".join(panel.lower() for panel in advanced)
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_show_all_help,
                help=f"Show every option, with all of its text, also of {advanced_panels}, and exit.",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of the command line: options may stand anywhere, but not after a script.

        What follows the script of an Accelerate config is the script's own.
        """
        ctx.allow_interspersed_args = all(word.partition("=")[0] != _CONFIG for word in args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help of the options, panel by panel; advanced panels only if --help-all is given."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Argument):
                continue
            panel = getattr(param, "panel", _OTHER_PANEL)
            record = param.get_help_record(ctx)
            if record and (ctx.meta.get(_HELP_ALL) or panel not in self._advanced):
                panels.setdefault(panel, []).append(record)
        without_panel = panels.pop(_OTHER_PANEL, [])  # shown last
        for panel, records in [*panels.items(), (_OTHER_PANEL, without_panel)]:
            with formatter.section(panel):
                formatter.write_dl(records)


def _show_all_help(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:  # noqa: ARG001
    """Print the help with every option, and exit, if the user gave --help-all."""
    if value:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def command(*args: Any, kind: str = "local", **attributes: Any) -> Callable[[Command], click.Command]:
    """Make a command as ``click.command`` does, for a run.

    Its help hides the options of targets, except those of the targets ``local`` and ``kind``.
    """
    advanced = tuple(_TARGET_PANEL.format(name) for name in KINDS if name not in ("local", kind))
    return click.command(*args, cls=_RunCommand, advanced=advanced, **attributes)


def fields(command: Command) -> Command:
    """Add to a command an option for every field, and the argument FILE.

    With a config of Accelerate, the arguments are SCRIPT and its ARGS instead.
    """
    # Here and below from last to first: click shows first what is added last.
    for (part, name), (_, field) in reversed(_FIELDS.items()):
        shape = _shape(field)
        metavar, repetition = _SHAPES[shape]
        # A target's `kind` has no description: its values are one.
        description = field.description or f"{' or '.join(KINDS)}."
        command = click.option(
            _option_name(part, name),
            f"{part}__{name}",
            cls=_PanelOption,
            panel=_panel(part, name),
            metavar="|".join(_choices(part, name)) or metavar,
            multiple=shape != "value",
            help=description + repetition,
        )(command)
    for add_parameter in (
        click.option("-m", "module", is_flag=True, help=f"With {_CONFIG}: SCRIPT is the name of a module."),
        click.option(
            _CONFIG,
            type=click.Path(path_type=Path),
            metavar="CONFIG",
            help="A config that `accelerate config` has written; SCRIPT and its ARGS come last.",
        ),
        # The two metavars together read as [FILE | --accelerate-config CONFIG SCRIPT [ARGS]...].
        click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...]"),
        click.argument(
            "file",
            required=False,
            type=click.Path(path_type=Path),
            metavar=f"[FILE | {_CONFIG} CONFIG SCRIPT",
        ),
    ):
        command = add_parameter(command)
    return command


def _panel(part: str, name: str) -> str:
    """Return the title of a field's panel: its section in the trigger form, or its target."""
    model, field = _FIELDS[part, name]
    if part == "target":
        if model is _MODELS[part][0]:  # the target `local` has the field
            return "Target"
        return _TARGET_PANEL.format(model.model_fields["kind"].default)
    extra = field.json_schema_extra
    return str(extra["section"]) if isinstance(extra, dict) else "Run"


def _option_name(part: str, name: str) -> str:
    """Return the option of a field: ``--nnodes`` for run.nnodes, ``--target-mpi`` for target.mpi."""
    return f"--{'target-' if part == 'target' else ''}{name.replace('_', '-')}"


def _choices(part: str, name: str) -> list[str]:
    """List the values that a field takes in any of the targets that have it; empty: all values."""
    choices: dict[str, None] = {}
    for field in (model.model_fields[name] for model in _MODELS[part] if name in model.model_fields):
        extra = field.json_schema_extra
        # The schema lists the values if the type does not.
        listed: Any = extra.get("enum", ()) if isinstance(extra, dict) else ()
        values = [str(value) for value in listed] or _literal_values(field.annotation)
        if not values:  # one target takes any value
            return []
        choices |= dict.fromkeys(values)
    return list(choices)


def _literal_values(kind: Any) -> list[str]:
    """List the values of every ``Literal`` in a type."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [value for inner in get_args(kind) for value in _literal_values(inner)]


def _shape(field: FieldInfo) -> Shape:
    """Return in which form an option gives a field's value; all but ``value`` may be repeated."""
    kind = field.annotation
    # Names with values, or a model that has fields of its own.
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "mapping"
    if get_origin(kind) is tuple:
        # Only fields of words have such a validator, which splits one text into words.
        splits_words = any(isinstance(validator, BeforeValidator) for validator in field.metadata)
        return "words" if splits_words else "list"
    return "value"


run_id = click.option(
    "--run-id", help="Identifies this run; the same id resumes it when its process is gone."
)


def location_options(command: Command) -> Command:
    """Add the options that say where to look for runs."""
    for name, help_text in (
        ("connection", "Path of a kubeconfig; default: $KUBECONFIG, or ~/.kube/config."),
        ("namespace", "Look for runs on Kubernetes, in this namespace."),
        ("directory", "The folder of runs; default: $MANYCPU_HOME, or ~/.manycpu."),
    ):
        command = click.option(f"--{name}", metavar="VALUE", help=help_text)(command)
    return command


def open_run(file: Path | None, options: Options, name: str) -> RunContext:
    """Open the run that a file and options describe.

    ``name`` distinguishes the run from others of the same description, as a run id does.
    """
    parts = fields_of(file, options)
    config = options.get("accelerate_config")
    # Relative paths start at a run file, but not at a script: with a config of Accelerate, `file` is one.
    base = Path.cwd() if config or not file else file.parent
    # "cli" and the name make the run's key, by which a later command finds the run.
    ctx = open_context(parts["run"], parts["target"], "cli", name, base=base)
    _refuse_name(ctx, name)
    return replace(ctx, run_file=config or file)


def _refuse_name(ctx: RunContext, run_id: str) -> None:
    """Raise BadInputError if a run id is the name of a run: a new run would begin beside it."""
    named = replace(ctx, name=run_id)
    if not is_key(run_id.rpartition("-")[2]) or not named.ledger.exists():
        return
    known = named.ledger.read().run_id
    fix = f"Give --run-id {known}" if known else "Clear its task in Airflow, or give the id that began it"
    raise BadInputError(f"{run_id} is the name of a run, and not its run id", field="--run-id", fix=fix)


def fields_of(file: Path | None, options: Options) -> dict[str, dict[str, Any]]:
    """Return the fields of ``run`` and of ``target`` from a file and from options; options win.

    With a config of Accelerate among the options, ``file`` is a script, and the fields are in the config.

    Raises:
        BadInputError: A file or an option cannot be read, or only a config of Accelerate takes the option.
    """
    if config := options.get("accelerate_config"):
        return _fields_of_accelerate(config, file, options)
    # Without a config of Accelerate, there is no script that words or `-m` could belong to.
    unusable = list(options.get("words", ()))
    if options.get("module"):
        unusable.insert(0, "-m")
    if unusable:
        fix = f"A script's own words come after {_CONFIG} CONFIG SCRIPT, or in --args"
        raise BadInputError(f"{' '.join(unusable)!r} cannot be used", fix=fix)
    run_fields, target_fields = read_run_file(file) if file else ({}, {})
    return _with_options({"run": run_fields, "target": target_fields}, options)


def _fields_of_accelerate(config: Path, script: Path | None, options: Options) -> dict[str, dict[str, Any]]:
    """Return the fields of run and target from a config of Accelerate, a script, its words and options.

    Prints notes on what of the config is read in another way.

    Raises:
        BadInputError: The config or an option cannot be read, the script is a folder, or it is given twice.
    """
    # First the options alone, since the translation depends on them; below they win over its result.
    from_options = _with_options({"run": {}, "target": {}}, options)
    translated = read_accelerate_config(config, from_options["run"], from_options["target"])
    # With -m, `script` is the name of a module, which may be that of a folder here.
    if script and script.is_dir() and not options["module"]:
        raise BadInputError(f"{script} is a folder", field="run.program", fix="Give the script that trains")
    for note in translated.notes:
        click.echo(f"{config}: {note}", err=True)
    script_fields: dict[str, Any] = {}
    if script:
        script_fields["program"] = f"-m {script}" if options["module"] else str(script)
    if options["words"]:
        script_fields["args"] = list(options["words"])
    given_twice = script_fields.keys() & from_options["run"].keys()
    if given_twice:
        name = next(iter(given_twice))
        raise BadInputError(
            "it is given twice", field=f"run.{name}", fix=f"Leave out {_option_name('run', name)}"
        )
    run_fields = {**translated.run, **script_fields}
    return _with_options({"run": run_fields, "target": translated.target}, options)


def _with_options(parts: dict[str, dict[str, Any]], options: Options) -> dict[str, dict[str, Any]]:
    """Set fields in ``parts`` to the options that were given, such as ``run__nnodes``; return ``parts``."""
    for option, value in options.items():
        if option not in _SCRIPT_PARAMETERS and value not in (None, ()):  # None, (): not given
            part, name = option.split("__", 1)
            parts[part][name] = _parse_option(part, name, value, parts[part].get(name))
    return parts


def _parse_option(part: str, name: str, raw: str | tuple[str, ...], before: Any) -> Any:
    """Parse the text of an option, or its texts if it may be repeated.

    A text that looks like YAML is parsed as YAML; any other text is left to the validation of the field. A
    mapping is added to ``before``, which is the field's value in the file.

    Raises:
        BadInputError: A text begins like YAML and is none, its words cannot be told apart, or it is no
            ``NAME=value`` of a mapping.
    """
    field = f"{part}.{name}"
    if isinstance(raw, str):
        return _parse_yaml_text(field, raw, begins="[")  # a brace begins a placeholder, not YAML
    shape = _shape(_FIELDS[part, name][1])
    values: list[Any] = []
    if shape == "words":
        for text in raw:
            parsed = _parse_yaml_text(field, text, begins="[")  # a list of words; a brace as above
            try:
                values += _words(parsed) if isinstance(parsed, str) else parsed
            except ValueError as error:
                raise BadInputError(f"its words cannot be told apart: {error}", field=field) from error
        return values
    if shape == "list":
        for text in raw:
            parsed = _parse_yaml_text(field, text)
            values += parsed if isinstance(parsed, list) else [parsed]
        return values
    fix = f"Write it as {_option_name(part, name)} NAME=value, once for each"
    mapping = dict(before) if isinstance(before, Mapping) else {}
    return _parse_mapping(field, raw, mapping, fix)


def _parse_mapping(field: str, texts: tuple[str, ...], mapping: dict[str, Any], fix: str) -> Any:
    """Add each ``NAME=value`` to ``mapping``; a text in braces is YAML, and replaces the whole mapping.

    Raises:
        BadInputError: A text is neither; ``fix`` says how to write it.
    """
    parsed: Any = mapping
    for text in texts:
        name, equals, value = text.partition("=")
        if text.lstrip().startswith("{"):
            parsed = _parse_yaml_text(field, text)
        elif equals and name:
            parsed[name] = value
        else:
            first_word = re.split(r"[=:\s]", text, maxsplit=1)[0]  # what follows may be a secret
            raise BadInputError(f"{first_word!r} is no NAME=value", field=field, fix=fix)
    return parsed


def _words(text: str) -> list[str]:
    """Split words as a shell does; an object of JSON, such as an option's value, is one word with its quotes.

    Raises:
        ValueError: A quote has no end.
    """
    with suppress(json.JSONDecodeError):
        if isinstance(json.loads(text), dict):
            return [text]
    return shlex.split(text)


def _parse_yaml_text(field: str, text: str, begins: tuple[str, ...] | str = ("{", "[")) -> Any:
    """Parse a text as YAML if it begins with one of some characters; else return it unchanged.

    Raises:
        BadInputError: It begins so, and is not YAML.
    """
    if not text.lstrip().startswith(begins):
        return text
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # the position only: the text there may be a secret
        where = f": see line {mark.line + 1}, column {mark.column + 1} of it" if mark else ""
        raise BadInputError(f"its value is not YAML{where}", field=field) from error
