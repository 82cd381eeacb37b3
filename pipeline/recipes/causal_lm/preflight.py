"""Check a run's data and model before anything is staged, by the standard library alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from manycpu.pipeline.recipes.causal_lm import records
from manycpu.pipeline.spec.errors import BadInputError, Finding
from manycpu.pipeline.spec.recipe_options import Options, first, is_on

_HEAD: Final = "lm_head"


def findings(data: Path | None, model: Path | None, options: Options) -> Iterator[Finding]:
    """Find what the recipe would refuse, as far as it can be seen from here: in files, not behind URLs.

    Args:
        data: What the recipe trains on, if it is on this machine.
        model: The base checkpoint, if it is on this machine.
        options: The recipe's options.
    """
    folder = model if model and model.is_dir() else None
    settings = records.tokenizer_settings(folder) if folder and "tokenizer_name" not in options else {}
    if data:
        columns = records.Columns(
            *(first(options, f"{name}_column") or name for name in records.Columns._fields)
        )
        try:
            has_template = not settings or "chat_template" in settings
            render = records.renderer(settings)
            for note in records.check(data, columns, render, has_template=has_template):
                yield Finding("run.data", note, "The recipe checks it when it starts", fatal=False)
        except BadInputError as error:
            yield Finding.of(error, "run.data")
        except (OSError, UnicodeDecodeError) as error:
            yield Finding("run.data", f"it cannot be read: {error}", "Give UTF-8 text")
    packing = is_on(options, "packing", default=True)
    if settings and not packing and not settings.get("pad_token") and not first(options, "pad_token"):
        end = _text(settings.get("eos_token")) or "<pad>"
        fix = f"Add --pad_token '{end}' to run.args, or leave --packing on"
        yield Finding("run.model", "the tokenizer has no pad token, and batches are padded", fix)
    targets = options.get("lora_target_modules", [])
    layers = records.layers_of(folder) if folder and targets else []
    if folder and layers and _HEAD not in layers and records.has_tied_head(folder):
        layers.append(_HEAD)
        if _HEAD in targets and is_on(options, "merge_adapter", default=True):
            yield Finding("run.args", *records.tied_target(_HEAD))
    if layers and (wrong := records.missing_target(targets, layers)):
        yield Finding("run.args", *wrong)


def _text(token: object) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
