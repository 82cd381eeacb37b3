"""Check a run's data and model before anything is staged, by the standard library alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from manycpu.pipeline.recipes.causal_lm import records
from manycpu.pipeline.spec.errors import BadInputError, Finding

_HEAD: Final = "lm_head"


def findings(data: str | None, model: str | None, args: Sequence[str]) -> Iterator[Finding]:
    """Find what the recipe would refuse, as far as it can be seen from here: in files, not behind URLs.

    Args:
        data: ``run.data``.
        model: ``run.model``.
        args: The recipe's arguments.
    """
    folder = Path(model) if model and Path(model).is_dir() and not values(args, "tokenizer_name") else None
    settings = records.tokenizer_settings(folder) if folder else {}
    is_elsewhere = any(values(args, name) for name in ("dataset_name", "train_file"))
    if data and Path(data).exists() and not is_elsewhere:
        given = (values(args, f"{name}_column")[:1] or [name] for name in records.Columns._fields)
        columns = records.Columns(*(each[0] for each in given))
        try:
            for note in records.check(data, columns, records.renderer(settings)):
                yield Finding("run.data", note, "The recipe checks it when it starts", fatal=False)
        except BadInputError as error:
            yield Finding(error.field or "run.data", error.message, error.fix or "")
        except (OSError, UnicodeDecodeError) as error:
            yield Finding("run.data", f"it cannot be read: {error}", "Give UTF-8 text")
    packing = is_on(args, "packing")
    if settings and not packing and not settings.get("pad_token") and not values(args, "pad_token"):
        end = _text(settings.get("eos_token")) or "<pad>"
        fix = f"Add --pad_token '{end}' to run.args, or leave --packing on"
        yield Finding("run.model", "the tokenizer has no pad token, and batches are padded", fix)
    targets = values(args, "lora_target_modules")
    layers = records.layers_of(folder) if folder and targets else []
    if folder and layers and _HEAD not in layers and records.has_tied_head(folder):
        layers.append(_HEAD)
        if _HEAD in targets and is_on(args, "merge_adapter"):
            yield Finding("run.args", *records.tied_target(_HEAD))
    if layers and (wrong := records.missing_target(targets, layers)):
        yield Finding("run.args", *wrong)


def is_on(args: Sequence[str], name: str) -> bool:
    """Whether a switch is on, which is so by default."""
    given = (values(args, name) or ["true"])[0].lower() in ("true", "1", "yes", "y", "t")
    return given and not {f"--no_{name}", f"--no-{name.replace('_', '-')}"} & set(args)


def values(args: Sequence[str], name: str) -> list[str]:
    """Return the values of an option, after ``=`` or in the words that follow.

    >>> values(["--lora_target_modules", "q_proj", "v_proj", "--bf16"], "lora_target_modules")
    ['q_proj', 'v_proj']
    """
    found: list[str] = []
    reads = False
    for word in args:
        if word.startswith("--"):
            head, equals, value = word.partition("=")
            reads = head.removeprefix("--").replace("-", "_") == name
            found = ([value] if equals else []) if reads else found
        elif reads:
            found.append(word)
    return found


def _text(token: object) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
