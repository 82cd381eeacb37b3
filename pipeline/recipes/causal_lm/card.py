"""Write the model card: what was trained on what, how, and with which result."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from manycpu.pipeline.recipes.causal_lm.inputs import Documents, files_of
from manycpu.pipeline.recipes.causal_lm.options import Options

_PACKAGES = ("manycpu", "torch", "transformers", "peft", "datasets")
_SHOWN_RESULTS = ("train_loss", "train_steps", "train_tokens_per_second", "eval_loss", "eval_perplexity")

# Of revisions with a slash, the first two need no %2F.
_ON_THE_HUB: Final = re.compile(r"hf://([^/]+/[^/@]+)(?:@(refs/pr/\d+|refs/convert/[\w.-]+|[^/]+))?(/.+?)?/?")
"""Matches the URL of a model: its repository, revision and folder."""


class Base(NamedTuple):
    """The base model as the user named it."""

    name: str
    is_of_hub: bool
    revision: str | None = None
    """A branch, tag or commit of the Hub; None: its default branch."""


def card(
    options: Options,
    env: Mapping[str, str],
    prepared: Mapping[str, Documents],
    results: Mapping[str, Any],
    samples: Sequence[tuple[str, str]],
) -> str:
    """Return the model card as Markdown; the Hub reads the fields at its top.

    Args:
        options: The options of the training.
        env: The environment of the run.
        prepared: Split -> its documents.
        results: Results of the training by name; :data:`_SHOWN_RESULTS` are shown.
        samples: Prompts, each with the text by which the trained model continues it.
    """
    model, data, training = options.model, options.data, options.training
    base = base_of(options, env)
    fields = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [manycpu]"]
    if base.is_of_hub:
        fields.append(f"base_model: {base.name}")
    if data.dataset_name:
        fields.append(f"datasets: [{data.dataset_name}]")
    layers = ", ".join(model.lora_target_modules)
    adapter = f"{model.method}, rank {model.lora_r}, alpha {model.lora_alpha}, of {layers}"
    accumulation_steps = training.gradient_accumulation_steps
    is_stretched = bool(data.rope_scaling and data.max_seq_length)
    scheduler = getattr(training.lr_scheduler_type, "value", training.lr_scheduler_type)
    revision = f" at {base.revision}" if base.revision else ""
    rows = {
        "base": f"{base.name}{revision}{', random weights' if model.from_scratch else ''}",
        "trained": "all weights" if model.method == "full" else adapter,
        "sequences of a step": training.train_batch_size * accumulation_steps * training.world_size,
        "learning rate": f"{training.learning_rate:g}, {scheduler}",
        "number format": "bf16" if training.bf16 else "fp32",
        "seed": training.seed,
        **({"rope scaling": f"{data.rope_scaling}, to {data.max_seq_length} tokens"} if is_stretched else {}),
        **{name.replace("_", " "): round(results[name], 4) for name in _SHOWN_RESULTS if name in results},
    }
    lines = ["---", *fields, "---", "", f"# {env.get('MANYCPU_RUN') or Path(options.output).name}", ""]
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows.items()), ""]
    lines += ["## Data", "", *_data(options, env, prepared), ""]
    for prompt, continuation in samples:
        lines += ["## Sample", "", *_quoted(prompt), "", "It continues:", "", *_quoted(continuation), ""]
    return "\n".join([*lines, "Made by " + ", ".join(_versions()) + ".", ""])


def base_of(options: Options, env: Mapping[str, str]) -> Base:
    """Return the base model by the name that the user gave, and not by the folder of its staged copy."""
    model = options.model
    name = str(model.model_name_or_path)
    if name != env.get("MANYCPU_MODEL"):  # the option names another model than run.model
        if Path(name).is_dir():
            return Base(name, is_of_hub=False)
        revision = None if model.model_revision == "main" else model.model_revision
        return Base(name, is_of_hub=True, revision=revision)
    # `name` is the folder that run.model was staged to.
    run_model = env.get("MANYCPU_MODEL_NAME", name)
    found = _ON_THE_HUB.fullmatch(run_model)
    if not found:
        return Base(run_model, is_of_hub=False)
    repository, revision, folder = found.groups("")  # "": what the URL does not name
    return Base(repository + folder, is_of_hub=True, revision=unquote(revision) or None)


def _data(options: Options, env: Mapping[str, str], prepared: Mapping[str, Documents]) -> list[str]:
    """Return the card's lines on the data: the data set's name or files, and the documents of each split."""
    counts = [f"- {split}: {len(documents.table)} documents" for split, documents in prepared.items()]
    if name := options.data.dataset_name:
        return [f"- {name} of the Hub", *counts]
    files = [file for files_of_split in files_of(options.data, env).values() for file in files_of_split]
    return [*(f"- `{file.name}`, sha256 {_digest(file)}" for file in files), *counts]


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _quoted(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()] or ["    (nothing)"]


def _versions() -> list[str]:
    """List each of ``_PACKAGES`` that is installed, with its version."""
    installed = []
    for package in _PACKAGES:
        try:
            installed.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return installed
