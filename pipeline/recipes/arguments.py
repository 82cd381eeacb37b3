"""Parse a recipe's options, and translate those of older Trainers. Imports no torch."""

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from transformers import HfArgumentParser

from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["Folders", "Parser", "check_least", "folders", "has_option", "option", "translate", "words"]

_RENAMED: Final = {
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

_GONE_CHOICES: Final = {("ddp_backend", "ccl"), ("xpu_backend", "ccl")}
"""Old name and value, where the name is still known and the value is not."""

_FALSE: Final = ("0", "f", "false", "n", "no")

_NEEDLESS: Final = {
    "fp16_backend": "there is one backend for half precision",
    "fp16_opt_level": "it belonged to apex",
    "half_precision_backend": "there is one backend for half precision",
    "include_tokens_per_second": "samples per second are always reported",
    "jit_mode_eval": "evaluation runs as training does; --torch_compile is what replaced it",
    "logging_dir": "progress goes to the run's log; set TENSORBOARD_LOGGING_DIR for --report_to tensorboard",
    "overwrite_output_dir": "a run's output is its own; checkpoints in it are resumed from",
    "past_index": "no encoder has use for it",
    "ray_scope": "there is no hyper-parameter search here",
    "save_safetensors": "models are always saved so",
    "tpu_num_cores": "there are no TPUs here",
    "use_mps_device": "there is no such device here",
}
"""Old name -> why it is not needed any more."""


def option(default: Any, text: str) -> Any:
    """Describe an option of a recipe."""
    return field(default=default, metadata={"help": text})


class Parser(HfArgumentParser):
    """Parses dataclasses of options; raises BadInputError for words that it cannot read.

    Args:
        kinds: The dataclasses.
    """

    def __init__(self, kinds: list[Any]) -> None:
        super().__init__(kinds, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise BadInputError, where argparse would exit."""
        raise BadInputError(message, field="run.args", fix="`--help` lists all options")

    def read(self, words: Sequence[str]) -> tuple[Any, ...]:
        """Read words into one object of each dataclass.

        Raises:
            BadInputError: An option is unknown, or its value cannot be used.
        """
        try:
            *found, unknown = self.parse_args_into_dataclasses(
                list(words), return_remaining_strings=True, look_for_args_file=False
            )
        except ValueError as error:
            self.error(str(error))
        if unknown:
            self.error(f"unknown options: {' '.join(unknown)}")
        return tuple(found)


def words(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line, which may be one JSON file that holds the options.

    Raises:
        BadInputError: The file cannot be read.
    """
    if len(argv) != 1 or not argv[0].endswith(".json"):
        return list(argv)
    try:
        options = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{argv[0]} cannot be read: {error}", field="run.args") from error
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, list):
            found += [f"--{name}", *map(str, value)]
        elif value is not None:
            found += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def has_option(words: Sequence[str], name: str) -> bool:
    """Whether an option is among the words."""
    return any(word.partition("=")[0] in (f"--{name}", f"--{name.replace('_', '-')}") for word in words)


def check_least(options: Any, least: Mapping[str, float]) -> None:
    """Check that no option is below its least value.

    Raises:
        BadInputError: One is.
    """
    for name, lowest in least.items():
        value = getattr(options, name)
        if value is not None and value < lowest:
            raise BadInputError(
                f"--{name} {value} is too small",
                field="run.args",
                fix=f"Give {lowest} or more, or leave it out",
            )


class Folders(NamedTuple):
    """Where the model is written, and where checkpoints are kept, which are not part of the model."""

    output: str
    checkpoints: str
    notes: tuple[str, ...] = ()


def folders(requested: str | None, env: Mapping[str, str]) -> Folders:
    """Choose the folders of the model and of checkpoints; those of the run win over the one requested."""
    named = requested or "trainer_output"
    output = env.get("MANYCPU_OUTPUT") or named
    moved = f"--output_dir {named}: the model goes to {output}, from where the run exports it"
    return Folders(
        output,
        env.get("MANYCPU_CHECKPOINTS") or f"{output.rstrip('/')}-checkpoints",
        () if Path(output) == Path(named) else (moved,),
    )


def translate(words: Sequence[str], parser: ArgumentParser) -> tuple[list[str], list[str]]:
    """Replace options and choices of older Trainers that the parser does not know.

    Returns:
        The words to parse, and a note for each that was replaced or left out.
    """
    accepted = set(parser._option_string_actions)  # noqa: SLF001 - argparse has no other way to list its options
    translated: list[str] = []
    notes: list[str] = []
    for option, values in _group(words):
        replacement = _replace(option, values, accepted)
        translated += [option, *values] if replacement is None else replacement[0]
        notes += [replacement[1]] if replacement else []
    return translated, notes


def _group(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Group command-line words into options with their values; those before the first option stand alone."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group[0], group[1:]
            group = []
        head, equals, value = word.partition("=")
        group += [head, value] if word.startswith("--") and equals else [word]
    if group:
        yield group[0], group[1:]


def _replace(option: str, values: list[str], accepted: set[str]) -> tuple[list[str], str] | None:
    """Return the words to use instead, and why; None where the option still exists."""
    name = option.removeprefix("--").replace("-", "_")
    if (name, *values) in _GONE_CHOICES:
        return [], f"{option} {values[0]} is left out: run.backend decides"
    if option in accepted:
        return None
    if name in _NEEDLESS:
        return [], f"{option} is left out: {_NEEDLESS[name]}"
    if name not in _RENAMED:
        return None
    new, value = _RENAMED[name]
    if value is not None and values and values[0].lower() in _FALSE:
        return [], f"{option} is left out: it is switched off"
    words = [new, *values] if value is None else [new, value]
    return words, f"{option} is an old name: read as {' '.join(words)}"
