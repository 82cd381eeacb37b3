"""Read the options in ``run.args`` of a recipe, without transformers.

>>> options = read(["--lora_target_modules", "q_proj", "v_proj", "--bf16", "--lora-r=8"])
>>> options["lora_target_modules"], value_of(options, "r", "lora_r"), is_on(options, "bf16")
(['q_proj', 'v_proj'], '8', True)
>>> is_on(read(["--no-packing", "--packing"]), "packing")
True
>>> is_on(read(["--no_packing"]), "packing", default=True)
False
>>> read(["--train_file=train.json"])
{'train_file': ['train.json']}
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.words import is_true

Options = Mapping[str, Sequence[str]]
"""Name of an option, with underscores -> its words: the one after ``=``, or those that follow the option.

The last use of an option counts. ``--no_NAME`` counts as NAME with the word ``false``.
"""

RENAMED: Final = {
    "adafactor": ("--optim", "adafactor"),
    "evaluate_during_training": ("--eval_strategy", "steps"),
    "evaluation_strategy": ("--eval_strategy", None),
    "group_by_length": ("--train_sampling_strategy", "group_by_length"),
    "gradient_checkpointing": ("--activation_checkpointing", None),
    "no_cuda": ("--use_cpu", None),
    "per_gpu_eval_batch_size": ("--per_device_eval_batch_size", None),
    "per_gpu_train_batch_size": ("--per_device_train_batch_size", None),
    "use_auth_token": ("--token", None),
    "warmup_ratio": ("--warmup_steps", None),
    "xpu_backend": ("--ddp_backend", None),
}
"""Old name -> new option, and its value where the old one was a switch; None: the value that was given."""


def words(args: Sequence[str], base: Path = Path()) -> list[str]:
    """Return a command line's words. If its one word is the name of a JSON file, return the file's options.

    Args:
        args: The command line.
        base: The folder that a relative path of the file starts from.

    Raises:
        BadInputError: The file cannot be read.
    """
    if len(args) != 1 or args[0].startswith("--") or not args[0].endswith(".json"):
        return list(args)
    try:
        options = json.loads((base / args[0]).read_text(encoding="utf-8"))
        pairs = list(options.items())
    except (OSError, ValueError, AttributeError) as error:
        raise BadInputError(f"{args[0]} cannot be read: {error}", field="run.args") from error
    option_words: list[str] = []
    for name, value in pairs:
        if isinstance(value, list):
            option_words += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            option_words += [f"--{name}", json.dumps(value)]
        elif value is not None:  # null: the option is left out
            option_words += [f"--{name}", str(value)]
    return option_words


def read(args: Sequence[str], base: Path = Path()) -> dict[str, list[str]]:
    """Parse a recipe's arguments: name of an option, with underscores -> its words.

    Old names of options become the new ones.

    Args:
        args: The arguments, or the name of one JSON file that has the options.
        base: The folder that a relative path of the file starts from.

    Raises:
        BadInputError: The file cannot be read.
    """
    options: dict[str, list[str]] = {}
    values: list[str] = []  # of the option before; words before the first option are dropped
    for word in words(args, base):
        if word.startswith("--"):
            name_as_written, equals, value = word.removeprefix("--").partition("=")
            name = name_as_written.replace("-", "_")
            values = [value] if equals else []
            if name.startswith("no_"):
                name, values = name.removeprefix("no_"), ["false"]
            options[name] = values  # the words that follow are added to this list
        else:
            values.append(word)
    for old, (new, switch_value) in RENAMED.items():
        if old not in options:
            continue
        new_words = options.pop(old)
        if switch_value is not None:
            if new_words and not is_true(new_words[0]):  # an old switch that is off gives no new option
                continue
            new_words = [switch_value]
        # An option that is given under its new name too keeps that value.
        options.setdefault(new.removeprefix("--"), new_words)
    return options


def value_of(options: Options, *names: str) -> str | None:
    """Return the first word of the first of these options that has one; None: none of them has."""
    return next((options[name][0] for name in names if options.get(name)), None)


def is_on(options: Options, *names: str, default: bool = False) -> bool:
    """Whether the first of these switches that is given is on; ``default`` if none is given."""
    for name in names:
        if name in options:
            return is_true(value_of(options, name) or "true")  # a switch without a word is on
    return default
