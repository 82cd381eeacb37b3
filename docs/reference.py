"""Write the reference pages (fields, command line, operators) from the code: ``python docs/reference.py``."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from manycpu.pipeline.cli import cli
from manycpu.pipeline.spec import memory_plan, model_shape
from manycpu.pipeline.spec.memory_plan import Model, Nodes, Shard, Training
from manycpu.pipeline.spec.targets import BareMetal, Kubernetes, Local
from manycpu.pipeline.spec.training_run import Resources, TrainingRun

FOLDER: Final = Path(__file__).parent
OPERATORS: Final = FOLDER.parent / "operators"
PARTS: Final[dict[str, type[BaseModel]]] = {
    "run": TrainingRun,
    "run.resources": Resources,
    "target, kind: local": Local,
    "target, kind: baremetal": BareMetal,
    "target, kind: kubernetes": Kubernetes,
}
OF_A_RUN: Final = ("run", "preflight", "plan", "render", "image")  # commands that take all fields as options
DOCUMENTED: Final = (
    "training_pipeline",
    "TrainingPipeline",
    "training_params",
    "RunOperator",
    "PrepareOperator",
    "StageDatasetOperator",
    "BuildImageOperator",
    "TrainOperator",
    "ExportModelOperator",
    "CleanupOperator",
    "ReportOperator",
    "manycpu_task",
)
"""What the page of operators shows, in this order."""
WIDTH: Final = 88  # of a signature that stays on one line
SHOWN_AS: Final = {"manycpu_task": "@task.manycpu"}
TABLE: Final = "<!-- The table is written by `make docs`. -->\n\n"
TABLE_END: Final = "\n<!-- end of the table -->"
NODE_GIB: Final = (64, 128, 256, 512, 1024)
LORA_RANK: Final = 16


def _llama(
    hidden: int, layers: int, intermediate: int, heads: int, keys: int, **others: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": 128_256,
    } | others


MODELS: Final[dict[str, dict[str, Any]]] = {
    "BERT-large": {
        "model_type": "bert",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "vocab_size": 30_522,
    },
    "Llama 3.2 1B": _llama(2048, 16, 8192, 32, 8, tie_word_embeddings=True, head_dim=64),
    "Llama 3.2 3B": _llama(3072, 28, 8192, 24, 8, tie_word_embeddings=True, head_dim=128),
    "Llama 3.1 8B": _llama(4096, 32, 14_336, 32, 8),
    "Llama 2 13B": _llama(5120, 40, 13_824, 40, 40, vocab_size=32_000),
    "Llama 3.1 70B": _llama(8192, 80, 28_672, 64, 8),
}
"""The models of the page on large models, as their config.json describes them."""
GENERATED: Final = "<!-- Written by `make docs`. Do not edit this page: edit the code. -->\n"


def pages() -> dict[str, str]:
    """Return the reference pages: file name in docs/ -> text."""
    return {
        "fields.md": _fields_page(),
        "cli.md": _command_page(),
        "operators.md": _operators_page(),
        "large_models.md": _large_models_page(),
    }


def _fields_page() -> str:
    head = (
        f"{GENERATED}# Fields of a run and of a target\n\n"
        "A run file has two parts, `run` and `target`. The same names are options of the command "
        "([command line](cli.md)), keyword arguments in Python, and parameters of the trigger form.\n"
    )
    return "\n".join([head, *(_part(name, model) for name, model in PARTS.items())])


def _part(name: str, model: type[BaseModel]) -> str:
    rows = [_row(field, info, model) for field, info in model.model_fields.items() if field != "kind"]
    head = f"## `{name}`\n\n{(model.__doc__ or '').strip()}\n\n"
    return head + "| field | what it is |\n| --- | --- |\n" + "".join(rows)


def _row(name: str, info: FieldInfo, model: type[BaseModel]) -> str:
    schema = model.model_json_schema()["properties"][name]
    named = [value for kind in schema.get("anyOf", [schema]) for value in kind.get("enum", ())]
    choices = f" One of: {', '.join(f'`{value}`' for value in named)}." if named else ""
    examples = ", ".join(f"`{example}`" for example in info.examples or ())
    example = f" Example: {examples}." if examples else ""
    return f"| `{name}` | {_linked(info.description or '')}{choices}{_default(info)}{example} |\n"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return " **Required.**"
    value = info.get_default(call_default_factory=True)
    said = value is None or value in ((), {}) or isinstance(value, BaseModel)  # by the description, if at all
    return "" if said else f" Default: `{value}`."


def _command_page() -> str:
    head = (
        f"{GENERATED}# Command line\n\n"
        "`manycpu COMMAND --help` prints what this page shows. The commands "
        f"{', '.join(f'`{name}`' for name in OF_A_RUN)} take every field of a run and of its target "
        "[as an option](#fields-as-options).\n\n"
        "Exit codes: 0 if the training and every step succeeded, 1 if the run failed, 2 on bad input, "
        "130 if a person interrupted the run.\n"
    )
    return "\n".join([head, *(_command(name) for name in cli.commands), _field_options()])


def _command(name: str) -> str:
    command = cli.commands[name]
    context = _context(name)
    usage = " ".join([f"manycpu {name}", *command.collect_usage_pieces(context)])
    text = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    own = [one for one in command.get_params(context) if not _is_field(one)]
    return f"## `manycpu {name}`\n\n```text\n{usage}\n```\n\n{_linked(text)}\n\n{_options(own, context)}"


def _field_options() -> str:
    context = _context("run")
    context.meta["manycpu.help_all"] = True
    panels: dict[str, list[click.Parameter]] = {}
    for one in cli.commands["run"].get_params(context):
        if _is_field(one):
            panels.setdefault(getattr(one, "panel", ""), []).append(one)
    head = (
        "## Fields as options\n\n"
        f"The commands {', '.join(f'`{name}`' for name in OF_A_RUN)} take these options. "
        "An option wins over the run file.\n"
    )
    parts = [f"### {panel}\n\n{_options(options, context)}" for panel, options in panels.items()]
    return "\n".join([head, *parts])


def _context(name: str) -> click.Context:
    above = click.Context(cli, info_name="manycpu", **cli.context_settings)
    return click.Context(cli.commands[name], parent=above, info_name=name)


def _is_field(parameter: click.Parameter) -> bool:
    return hasattr(parameter, "panel")


def _options(parameters: Iterable[click.Parameter], context: click.Context) -> str:
    options = [one for one in parameters if isinstance(one, click.Option)]
    records = [record for one in options if (record := one.get_help_record(context))]
    rows = "".join(f"| {_code(names)} | {_linked(_cell(text))} |\n" for names, text in records)
    return f"| option | what it does |\n| --- | --- |\n{rows}"


def _code(text: str) -> str:
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _linked(text: str) -> str:
    """Make links of the pages that a help text names, and code of its options."""
    coded = re.sub(r"(?<![`\w-])(--[a-z][a-z-]+)", r"`\1`", text)
    return re.sub(r"docs/([a-z_-]+)\.md", r"[\1](\1.md)", coded)


def _operators_page() -> str:
    head = (
        f"{GENERATED}# Operators for Airflow\n\n"
        "Import them from `manycpu.operators`. Most DAGs need `training_pipeline` alone. The decorator "
        "`@task.manycpu` comes with the package and needs no import. Each operator also takes what every "
        "operator of Airflow takes, such as `retries`, `queue` and `pool`. "
        "[Which tasks share a run](behaviour.md#which-tasks-share-a-run) explains `training`.\n"
    )
    defined = _definitions()
    return "\n".join([head, *(_definition(defined[name]) for name in DOCUMENTED)])


def _definitions() -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """Read the classes and functions of the package from their sources: an import would bring Airflow."""
    trees = [ast.parse(path.read_text()) for path in sorted(OPERATORS.glob("*.py"))]
    nodes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return {node.name: node for node in nodes}


def _definition(node: ast.ClassDef | ast.FunctionDef) -> str:
    return _class(node) if isinstance(node, ast.ClassDef) else _function(node)


def _function(node: ast.FunctionDef) -> str:
    shown = SHOWN_AS.get(node.name, node.name)
    return f"## `{shown}`\n\n```py\n{_signature(shown, node.args)}\n```\n\n{_docstring(node)}"


def _class(node: ast.ClassDef) -> str:
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    parts = [f"## `{node.name}`\n"]
    if init := methods.get("__init__"):
        parts.append(f"```py\n{_signature(node.name, init.args)}\n```\n")
    parts += [_docstring(node), *_attributes(node)]
    if execute := methods.get("execute"):
        parts.append(f"**Execution.** {_docstring(execute)}")
    return "\n".join(parts)


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for field, text in zip(node.body, node.body[1:], strict=False):
        documented = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and documented:
            yield f"- `{ast.unparse(field.target)}`: {_plain(str(ast.literal_eval(text.value)))}\n"


def _signature(name: str, args: ast.arguments) -> str:
    """Write a call as Python has it, without ``self``; a long one has a line for each argument."""
    parts = [*_written(args.args, args.defaults)]
    parts += ["*"] if args.kwonlyargs else []
    parts += [*_written(args.kwonlyargs, args.kw_defaults)]
    parts += [f"**{args.kwarg.arg}"] if args.kwarg else []
    line = f"{name}({', '.join(parts)})"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + ")"


def _written(arguments: list[ast.arg], defaults: Sequence[ast.expr | None]) -> Iterator[str]:
    padding: list[ast.expr | None] = [None] * (len(arguments) - len(defaults))
    for one, default in zip(arguments, [*padding, *defaults], strict=True):
        if one.arg != "self":
            yield ast.unparse(one) + (f" = {ast.unparse(default)}" if default else "")


def _docstring(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Write a docstring in Google's style as Markdown: sections become lists."""
    text = ast.get_docstring(node) or ""
    body, *sections = re.split(r"^(Args|Returns|Raises):\n", text, flags=re.MULTILINE)
    parts = [_plain(body.strip()) + "\n"]
    for title, lines in zip(sections[::2], sections[1::2], strict=True):
        heading = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises"}[title]
        parts.append(f"{heading}:\n\n{_entries(lines, listed=title != 'Returns')}")
    return "\n".join(parts)


def _entries(lines: str, *, listed: bool) -> str:
    entries = re.split(r"^    (?=\S)", lines.rstrip(), flags=re.MULTILINE)
    joined = [_plain(" ".join(entry.split())) for entry in entries if entry.strip()]
    if not listed:
        return " ".join(joined) + "\n"
    named = [re.sub(r"^([*A-Za-z_]+): ", r"`\1`: ", entry) for entry in joined]
    return "".join(f"- {entry}\n" for entry in named)


def _plain(text: str) -> str:
    """Turn roles and double backquotes into Markdown."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")


def _large_models_page() -> str:
    """Write the table of the page, whose other parts are written by hand."""
    head, _, rest = (FOLDER / "large_models.md").read_text().partition(TABLE)
    _, end, tail = rest.partition(TABLE_END)
    columns = [f"{memory} GiB" for memory in NODE_GIB]
    lines = [f"| model | parameters | {' | '.join(columns)} |", f"| --- | --- |{' --- |' * len(columns)}"]
    for name, config in MODELS.items():
        causal = config["model_type"] == "llama"
        model = model_shape.of_config(config, causal=causal)
        assert model is not None, name  # noqa: S101 - for mypy
        cells = [_nodes(model, memory << 30, causal=causal) for memory in NODE_GIB]
        lines.append(f"| {name} | {model.parameters / 1e9:.2f}B | {' | '.join(cells)} |")
    return "".join([head, TABLE, "\n".join(lines), "\n", end, tail])


def _nodes(model: Model, memory: int, *, causal: bool) -> str:
    """Write the nodes that a training needs: by replicas, sharded, and with LoRA."""
    assert model.layout is not None  # noqa: S101 - for mypy
    nodes = Nodes(nodes=1, processes=1, memory=memory)
    batch = {"batch": 1, "length": 2048} if causal else {"batch": 8, "length": 512}
    whole = Training(**batch, causal=causal, checkpointing=True)
    adapters = memory_plan.adapter_parameters(model.layout, LORA_RANK)
    lora = replace(whole, bf16=True, trained=0, adapters=adapters, frozen=memory_plan.HALF)
    ways: list[tuple[Training, Shard]] = [(whole, "no"), (replace(whole, bf16=True), "full"), (lora, "no")]
    counts = [memory_plan.nodes_needed(model, training, nodes, shard) for training, shard in ways]
    return " / ".join("-" if count is None else str(count) for count in counts)


def main() -> None:
    """Write every page."""
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
