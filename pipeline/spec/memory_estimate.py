"""Estimate the memory of a run whose program is a recipe, and judge whether its nodes have it.

Reads the run's arguments and the folder of its model on this machine; knows no torch and asks no network.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from manycpu.pipeline.spec import memory_plan, model_shape, recipe_options
from manycpu.pipeline.spec.errors import BadInputError, Finding
from manycpu.pipeline.spec.memory_plan import Model, Nodes, Shard, Training
from manycpu.pipeline.spec.recipe_options import Options, is_on, value_of
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.spec.words import counted, format_bytes


class _Recipe(NamedTuple):
    """The defaults of a recipe's options."""

    batch: int
    """Samples of a rank's step."""
    length: int
    """Tokens of a sample."""
    causal: bool
    """Whether the model learns to predict each next token."""
    outputs: int = 0
    """Outputs for each token of the head that the training adds; 0: it adds none."""
    method: str = "full"
    """``full``, or with adapters: ``lora``, ``dora``."""


RECIPES: Final[Mapping[str, _Recipe]] = {
    "causal_lm": _Recipe(8, 1024, causal=True, method="lora"),
    "question_answering": _Recipe(8, 384, causal=False, outputs=2),
}
"""The recipes that train transformers; the memory of others is not estimated."""
DEFAULT_SHARD: Final = "auto"
"""What recipes do without ``--shard``."""
_LORA_RANK: Final = 16
_LENGTH_OPTIONS: Final = ("max_seq_length", "max_length", "block_size", "sequence_length")
# Bytes for each trained parameter of the optimizers that keep less than AdamW; Adafactor keeps rows and sums.
_OPTIMIZER_BYTES: Final = {"adafactor": 0, "adagrad": 4, "lion_32bit": 4, "rmsprop": 4, "sgd": 0}


class Row(NamedTuple):
    """A line of the table that ``manycpu plan`` shows."""

    name: str
    replica: str
    """The amount if each rank holds a replica of the model, as text."""
    sharded: str
    """The amount if the model is sharded over ranks, as text."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The arithmetic of a run: its model, how it trains, and its option ``--shard``."""

    model: Model
    training: Training
    nodes: int
    """The least number of nodes that train."""
    processes: int
    """Ranks of each node."""
    shard: str = DEFAULT_SHARD
    excluded: str | None = None
    """The option of the run with which sharding is impossible, such as ``--fsdp``; None: there is none."""

    def on(self, memory: int) -> Nodes:
        """Return the run's nodes, each with ``memory`` bytes."""
        return Nodes(nodes=self.nodes, processes=self.processes, memory=memory)

    @property
    def over(self) -> str:
        """The ranks that a sharded model is divided among, in words."""
        if self.shard == "hybrid":
            return f"the {counted(self.processes, 'rank')} of a node"
        return counted(self.nodes * self.processes, "rank")

    @property
    def sharding(self) -> Shard:
        """How ranks share the model if the run is sharded: ``hybrid`` if the run says so, else ``full``."""
        return "hybrid" if self.shard == "hybrid" else "full"

    @property
    def ways(self) -> tuple[Shard, ...]:
        """The ways in which the ranks may hold the model, in the order in which they are tried.

        ``no``: a replica in each rank. If no way fits the memory, the last one is reported.
        """
        if self.shard == "no" or self.nodes * self.processes == 1:
            return ("no",)
        return ("no", "full") if self.shard == "auto" else (self.sharding,)


def estimate(
    run: TrainingRun, base: Path, parameters: int | None = None, *, has_bf16: bool | None = None
) -> Estimate | str:
    """Collect what the memory of a run depends on; if some of it is unknown, return a text that says what.

    Args:
        run: The run.
        base: The folder that a relative ``run.model`` starts from.
        parameters: The number of parameters, where the user gives it; the program may then be any.
        has_bf16: Whether the nodes' processors have instructions for bf16, which recipes use by themselves;
            None: that is not known, and what takes less memory is assumed.
    """
    if run.dtype is None and has_bf16 is not None:
        run = run.model_copy(update={"dtype": "bf16" if has_bf16 else "fp32"})
    recipe = RECIPES.get(run.program)
    if recipe is None and parameters is None:
        return f"the memory of {run.program} is not known: give --parameters to see that of its model"
    try:
        options = recipe_options.read(run.args, base)
    except BadInputError:  # the recipe says what is wrong with the file
        options = {}
    defaults = recipe or _Recipe(batch=1, length=1, causal=False)  # for a program that is no recipe
    name = value_of(options, "model_name_or_path") or run.model
    folder = base / name if name else None
    model = None
    config = overrides = _overrides(options)  # all of the configuration, unless there is a config.json
    if folder is not None and folder.is_dir():
        model = model_shape.read(folder, causal=defaults.causal, overrides=overrides)
        config = model_shape.config_of(folder) | overrides
    if parameters is not None:  # the user's number wins
        model = replace(model or Model(parameters=parameters), parameters=parameters)
    elif model is not None:
        model = model_shape.with_head(model, defaults.outputs)
    else:
        why = f"{name} is not a folder here with config.json or safetensors" if name else "there is none"
        return f"the size of the model is not known ({why}): give --parameters"
    shard = value_of(options, "shard") or DEFAULT_SHARD
    excluded = unshardable(options)
    # The ranks choose in the same way: if they cannot count the parameters from the configuration, `auto`
    # does not shard.
    if shard == "auto" and (excluded or model_shape.of_config(config, causal=defaults.causal) is None):
        shard = "no"
    return Estimate(
        model=model,
        training=_training(run, defaults, options, model, config),
        nodes=run.nodes.least,
        processes=run.processes,
        shard=shard,
        excluded=excluded,
    )


def unshardable(options: Options) -> str | None:
    """Return the first of a recipe's options that cannot be used with sharding; None: all can."""
    # Without the switch --torch_compile, its backend or mode turns it on.
    compiles = value_of(options, "torch_compile_backend", "torch_compile_mode") is not None
    excludes = {
        "--method dora": value_of(options, "method") == "dora",
        "--from_scratch": is_on(options, "from_scratch"),
        "--torch_compile": is_on(options, "torch_compile", default=compiles),
        "--gradient_compression": (value_of(options, "gradient_compression") or "no") != "no",
        "--fsdp": value_of(options, "fsdp") is not None,
        "--optim adafactor": value_of(options, "optim") == "adafactor",
    }
    return next((name for name, is_given in excludes.items() if is_given), None)


def _training(
    run: TrainingRun, recipe: _Recipe, options: Options, model: Model, config: model_shape.Config
) -> Training:
    """Read from a run's options how the model is trained; the recipe's defaults replace missing options."""
    requested = _integer(value_of(options, *_LENGTH_OPTIONS))
    if recipe.causal and requested:
        length = requested  # a length above the model's positions stretches them, or is refused
    else:
        wanted = requested or recipe.length
        length = min(wanted, model_shape.length_limit(config) or wanted)
    has_adapters = (value_of(options, "method") or recipe.method) != "full"
    trained: int | None = None  # all parameters of the model
    adapters = 0
    if has_adapters:
        rank = _integer(value_of(options, "lora_r")) or _LORA_RANK
        trained = 0
        adapters = memory_plan.adapter_parameters(model.layout, rank)
    elif model.layout and is_on(options, "freeze_embeddings"):
        trained = model.parameters - model.layout.vocabulary * model.layout.hidden
    # With adapters, weights that are stored as bf16 stay so if the training computes in bf16; else they are
    # kept in fp32.
    may_be_half = has_adapters and config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    # No dtype: the nodes' processors are not known (`estimate`). What takes less memory is assumed.
    bf16_by_default = may_be_half if run.dtype is None else run.dtype == "bf16"
    bf16 = is_on(options, "bf16", default=bf16_by_default)
    optimizer = value_of(options, "optim") or "adamw_torch_fused"
    return Training(
        batch=_integer(value_of(options, "per_device_train_batch_size")) or recipe.batch,
        evaluated=_integer(value_of(options, "per_device_eval_batch_size")) or 0,
        length=length,
        bf16=bf16,
        checkpointing=is_on(options, "activation_checkpointing"),
        causal=recipe.causal,
        trained=trained,
        adapters=adapters,
        frozen=memory_plan.HALF if may_be_half and bf16 else memory_plan.FLOAT,
        optimizer=_OPTIMIZER_BYTES.get(optimizer, memory_plan.ADAMW),
    )


def _integer(text: str | None) -> int | None:
    """Parse a whole number; None: the text is missing, or is no whole number."""
    return int(text) if text and text.isdecimal() else None


def _overrides(options: Options) -> dict[str, Any]:
    """Parse the option config_overrides (``name=value,name=value``): name -> value."""
    parts = (value_of(options, "config_overrides") or "").split(",")
    return {
        name.strip(): _value(text) for name, equals, text in (part.partition("=") for part in parts) if equals
    }


def _value(text: str) -> Any:
    """Parse a number or a truth value; any other text is returned unchanged."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def findings(estimate: Estimate, memory: int, field: str, node: str = "a node") -> Iterator[Finding]:
    """Yield one finding if a run's ranks need more memory than a node has; nothing if the memory is enough.

    Args:
        estimate: The run's arithmetic.
        memory: Bytes of a node.
        field: The field to change if only more memory helps.
        node: What has this memory, for the message.
    """
    model, training, nodes = estimate.model, estimate.training, estimate.on(memory)
    if any(memory_plan.fits(model, training, nodes, shard) for shard in estimate.ways):
        return
    needed = memory_plan.parts(model, training, nodes, estimate.ways[-1]).total * nodes.processes
    how_held = "with a replica in each rank" if estimate.ways == ("no",) else f"sharded over {estimate.over}"
    message = (
        f"the training takes about {format_bytes(needed)} of a node {how_held}, and {node} has "
        f"{format_bytes(memory)}, of which a tenth is kept free"
    )
    ranks_possible = memory_plan.processes_possible(model, training, nodes)
    nodes_needed = None if estimate.excluded else memory_plan.nodes_needed(model, training, nodes, "full")
    fixes = []  # alternatives
    field_to_change = field
    if nodes_needed:
        field_to_change = "run.args"
        steps = ["add --shard full to run.args"] if estimate.shard in ("no", "hybrid") else []
        if nodes_needed > nodes.nodes:
            field_to_change = "run.nnodes"
            steps.append(f"set run.nnodes to {nodes_needed}")
        fixes.append(" and ".join(steps))  # never empty: sharded over these nodes, the model would fit
    if 0 < ranks_possible < nodes.processes:
        if not nodes_needed:
            field_to_change = "run.nproc_per_node"
        fixes.append(f"set run.nproc_per_node to {ranks_possible}")
    if not fixes:
        fixes += ["no number of such nodes fits: give them more memory", "compute less at a time"]
    if estimate.excluded:
        fixes.append(f"leave out {estimate.excluded}, which excludes sharding")
    fix = ", or ".join(fixes)
    # A training that fits only if it uses the tenth that is kept free may still work: so that is not fatal.
    yield Finding(field_to_change, message, fix[0].upper() + fix[1:], fatal=needed > memory)


def rows(estimate: Estimate, memory: int | None) -> Iterator[Row]:
    """Yield the estimate as the rows of a table, for a replica in each rank and for a sharded model.

    ``memory``: bytes of a node; None: unknown, and there is no row that says whether it is enough.
    """
    nodes = estimate.on(memory or 0)  # 0: only the row `fits` depends on it
    columns = [  # of the table: for a replica in each rank, and for a sharded model
        memory_plan.parts(estimate.model, estimate.training, nodes, each)
        for each in ("no", estimate.sharding)
    ]

    def row(name: str, values: Sequence[int], reason: str) -> Row:
        replica, sharded = map(format_bytes, values)
        return Row(name, replica, sharded, reason)

    for name, reason in _reasons(estimate).items():
        yield row(name, [getattr(each, name) for each in columns], reason)
    yield row("a rank", [each.total for each in columns], "at its peak")
    ranks = counted(nodes.processes, "rank")
    yield row("a node", [each.total * nodes.processes for each in columns], ranks)
    if memory:
        answers = [_whether_it_fits(estimate, nodes, shard) for shard in ("no", estimate.sharding)]
        yield Row(
            "fits", answers[0], answers[1], f"{format_bytes(memory)} of a node, of which a tenth is kept free"
        )


def _reasons(estimate: Estimate) -> dict[str, str]:
    """Explain each part of a rank's memory: its name in :class:`memory_plan.Parts` -> the text."""
    model, training = estimate.model, estimate.training
    trained = training.adapters + (model.parameters if training.trained is None else training.trained)
    batch_of_rank = f"{training.batch} x {training.length} tokens"
    evaluation = f"; of an evaluation {training.evaluated} x" if training.evaluated > training.batch else ""
    recomputation = ", computed again in the backward pass" if training.checkpointing else ""
    formats = "fp32" if training.frozen == memory_plan.FLOAT else "bf16, and adapters in fp32"
    activations = f"{batch_of_rank} of each rank{recomputation}{evaluation}"
    bf16_weights = "bf16 weights of a step; " if training.bf16 else ""
    copies = f"{bf16_weights}sharded: gathered blocks, and their gradients"
    return {
        "parameters": f"{model.parameters / 1e6:,.1f}M in {formats}",
        "gradients": f"{trained / 1e6:,.1f}M in fp32",
        "optimizer": f"{training.optimizer} bytes for each trained parameter",
        "activations": activations if model.layout else "not known, not counted",
        "copies": copies if model.block else "not known, not counted",
        "process": "Python, torch and libraries",
    }


def _whether_it_fits(estimate: Estimate, nodes: Nodes, shard: Shard) -> str:
    """Say in words whether the training fits the nodes' memory; if not, on how many nodes it would fit.

    ``shard`` is the way in which the ranks hold the model. If they share it, and an option of the run makes
    sharding impossible (``estimate.excluded``), the text names that option.
    """
    if shard != "no" and estimate.excluded:
        return f"no: {estimate.excluded} excludes it"
    counts_all = bool(estimate.model.layout and estimate.model.block)  # activations and blocks are known
    if memory_plan.fits(estimate.model, estimate.training, nodes, shard):
        return "yes" if counts_all else "yes, without what is not counted"
    needed = memory_plan.nodes_needed(estimate.model, estimate.training, nodes, shard)
    least = "" if counts_all else "at least "
    return f"no: {least}{counted(needed, 'node')} would" if needed else "no, on no number of nodes"
