"""Check a run's data and model before anything is staged, by the standard library alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.recipes import base_folder
from manycpu.pipeline.recipes.causal_lm import records
from manycpu.pipeline.spec.errors import BadInputError, Finding
from manycpu.pipeline.spec.recipe_options import Options, is_on, value_of

_HEAD: Final = "lm_head"
_WITHOUT_TOKENS: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes whose tokenizers have the special tokens that their files name, and no others."""


def findings(data: Path | None, model: Path | None, options: Options) -> Iterator[Finding]:
    """Yield what the recipe would refuse, as far as files on this machine show it.

    Args:
        data: What the recipe trains on, if it is on this machine.
        model: The base checkpoint, if it is on this machine.
        options: The recipe's options.
    """
    folder = model if model and model.is_dir() else None
    settings: dict[str, Any] = {}  # of the tokenizer; empty: unknown
    if folder and "tokenizer_name" not in options:
        try:
            settings = base_folder.tokenizer_settings(folder)
        except BadInputError as error:
            yield Finding.of(error, "run.model")
    if data:
        yield from _data_findings(data, settings, options)
    has_pad_token = settings.get("pad_token") or value_of(options, "pad_token")
    if settings and not has_pad_token and not is_on(options, "packing", default=True):
        end = _text(settings.get("eos_token")) or "<pad>"
        fix = f"Add --pad_token '{end}' to run.args, or leave --packing on"
        # Other classes may have a pad token of their own, which only the recipe sees.
        is_fatal = settings.get("tokenizer_class") in _WITHOUT_TOKENS
        problem = "the tokenizer has no pad token, and batches are padded"
        yield Finding("run.model", problem, fix, fatal=is_fatal)
    targets = options.get("lora_target_modules", [])
    if folder and targets:
        yield from _target_findings(folder, targets, options)


def _data_findings(data: Path, settings: dict[str, Any], options: Options) -> Iterator[Finding]:
    """Check the records of the data; ``settings`` are the tokenizer's, empty if they are not known."""
    # An option such as text_column renames a column; its default is the column's name here.
    columns = records.Columns(
        *(value_of(options, f"{name}_column") or name for name in records.Columns._fields)
    )
    try:
        has_template = not settings or bool(settings.get("chat_template"))
        render, limits = records.renderer(settings), _limits(options)
        for note in records.check(data, columns, render, has_template=has_template, limits=limits):
            yield Finding("run.data", note, "The recipe checks it when it starts", fatal=False)
    except BadInputError as error:
        yield Finding.of(error, "run.data")
    except (OSError, UnicodeDecodeError) as error:
        yield Finding("run.data", f"it cannot be read: {error}", "Give UTF-8 text")


def _target_findings(folder: Path, targets: Sequence[str], options: Options) -> Iterator[Finding]:
    """Check that the layers which get adapters exist, and that no tied head is to be merged.

    Nothing is found if the folder does not show its layers.
    """
    layers = base_folder.layers_of(folder)
    # The files hold weights that head and embeddings share only once, as the embeddings'.
    if layers and _HEAD not in layers and base_folder.has_tied_head(folder):
        layers.append(_HEAD)
        if _HEAD in targets and is_on(options, "merge_adapter", default=True):
            yield Finding("run.args", *records.tied_target(_HEAD))
    if layers and (problem := records.missing_target(targets, layers)):
        yield Finding("run.args", *problem)


def _limits(options: Options) -> dict[str, int]:
    """Return how many records of a split are used, for each split that an option limits.

    A value that is no number, or 0, is left out: the recipe's parser refuses it.
    """
    texts = {
        "train": value_of(options, "max_train_samples"),
        "validation": value_of(options, "max_eval_samples"),
    }
    return {split: int(value) for split, value in texts.items() if value and value.isdecimal() and int(value)}


def _text(token: object) -> str:
    """Return the text of a token, which a tokenizer's settings have as a text or as an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
