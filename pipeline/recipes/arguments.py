"""Parse a recipe's options, and translate those of older Trainers. Imports no torch."""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Final, NoReturn

from transformers import HfArgumentParser

from manycpu.pipeline.spec import recipe_options
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.machine import has_bf16, processor_flags
from manycpu.pipeline.spec.words import did_you_mean, is_true

_GONE_CHOICES: Final = {("ddp_backend", "ccl"), ("xpu_backend", "ccl")}
"""Old name and value, where the name is still known and the value is not."""

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

_FALSE: Final = ("0", "f", "false", "n", "no")
_MIN_RATIO: Final = 0.8
"""Least ratio of difflib at which an unknown option is taken for a misspelt known one."""


def option(default: Any, text: str) -> Any:
    """Make the dataclass field of an option, with its default and its help text."""
    return field(default=default, metadata={"help": text})


class Parser(HfArgumentParser):
    """Parses dataclasses of options; raises BadInputError for words that it cannot read.

    Args:
        kinds: The dataclasses.
        **defaults: Name of an option -> its default in this run; None: the dataclass has it.
    """

    def __init__(self, kinds: list[Any], **defaults: str | None) -> None:
        super().__init__(kinds, allow_abbrev=False)
        self.set_defaults(**{name: value for name, value in defaults.items() if value})

    def error(self, message: str) -> NoReturn:
        raise BadInputError(message, field="run.args", fix="`--help` lists all options")

    def read(self, words: Sequence[str]) -> tuple[Any, ...]:
        """Parse the words of a command line into one object of each dataclass.

        Raises:
            BadInputError: There is no such option, or its value is wrong.
        """
        try:
            *parsed, unknown = self.parse_args_into_dataclasses(
                list(words),
                return_remaining_strings=True,
                look_for_args_file=False,  # a file beside the program must not add words
            )
        except (ImportError, ValueError) as error:  # ImportError: an option needs a package, as deepspeed
            self.error(str(error).strip())
        if unknown:
            name = unknown[0].partition("=")[0]
            suggestion = did_you_mean(name, self._option_string_actions, min_ratio=_MIN_RATIO)
            hint = f". {suggestion}" if suggestion else ""
            self.error(f"unknown options: {' '.join(unknown)}{hint}")
        return tuple(parsed)


def bf16_by_default(given: recipe_options.Options, env: Mapping[str, str]) -> tuple[bool, list[str]]:
    """Return the default of the option bf16, and notes for the log.

    The default is False if ``given``, the user's options, choose a number format themselves. Otherwise
    ``run.dtype`` decides: ``auto`` means bf16 if the processor has instructions for it; only then is there a
    note.
    """
    if {"bf16", "mixed_precision"} & given.keys() or recipe_options.is_on(given, "fp16"):
        return False, []
    dtype = env.get("MANYCPU_DTYPE")
    if dtype == "auto" and has_bf16(processor_flags()):
        return True, ["in bf16, for which this processor has instructions; run.dtype: fp32 is more exact"]
    return dtype == "bf16", []


def check_least(options: Any, least: float, *names: str) -> None:
    """Raise BadInputError if one of the named options is below ``least``; one that is None passes."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= least:  # unlike `<`, this refuses NaN too
            fix = f"Give {least} or more, or leave it out"
            raise BadInputError(f"--{name} {value} is too small", field="run.args", fix=fix)


def folders(requested: str | None, env: Mapping[str, str]) -> tuple[str, str, list[str]]:
    """Return the folder of the model, the folder of checkpoints, and notes for the log.

    In a run, its environment names both. Otherwise the model goes to ``requested``, the value of
    ``--output_dir``, and checkpoints go beside it. A note says so if the model does not go to ``requested``.
    """
    named = requested or "trainer_output"
    output = env.get("MANYCPU_OUTPUT") or named
    checkpoints = env.get("MANYCPU_CHECKPOINTS") or f"{output.rstrip('/')}-checkpoints"
    note = f"--output_dir {named}: the model goes to {output}, from where the run exports it"
    return output, checkpoints, [] if Path(output) == Path(named) else [note]


def translate(words: Sequence[str], parser: ArgumentParser) -> tuple[list[str], list[str]]:
    """Replace options and values that only older versions of Hugging Face's Trainer know.

    Returns:
        The words of the new command line, and a note for each option that was replaced or left out.
    """
    accepted = parser._option_string_actions  # noqa: SLF001 - argparse has no other way to list its options
    groups: list[list[str]] = []  # each one is an option and its values; the first may have no option
    for word in words:
        head, equals, value = word.partition("=")
        if word.startswith("--"):
            groups.append([head, value] if equals else [head])
        elif groups:
            groups[-1].append(word)
        else:
            groups.append([word])
    translated: list[str] = []
    notes: list[str] = []
    for flag, *values in groups:
        new_words, note = _replacement(flag, values, known=flag in accepted)
        match new_words:  # argparse takes a value such as -1e-3 for an option, unless `=` is before it
            case [name, value] if value.startswith("-") and value not in accepted:
                new_words = [f"{name}={value}"]
        translated += new_words
        if note:
            notes.append(note)
    return translated, notes


def _replacement(flag: str, values: list[str], *, known: bool) -> tuple[list[str], str]:
    """Return the words that replace an option and its values, and a note; empty note: nothing changes.

    ``flag`` is the option as it was given. ``known``: this version of the Trainer has an option of that name.
    """
    name = flag.removeprefix("--").replace("-", "_")
    if (name, *values) in _GONE_CHOICES:
        return [], f"{flag} {values[0]} is left out: run.backend decides"
    is_off = bool(values) and values[0].lower() in _FALSE
    # With a value that is no switch, it is an old name of --token.
    if name == "use_auth_token" and (not values or is_off or is_true(values[0])):
        return [], f"{flag} is left out: the login of the Hub, or HF_TOKEN, is always used"
    if not known and name in _NEEDLESS:
        return [], f"{flag} is left out: {_NEEDLESS[name]}"
    if known or name not in recipe_options.RENAMED:
        return [flag, *values], ""
    new_option, fixed_value = recipe_options.RENAMED[name]
    if fixed_value is None:
        words = [new_option, *values]
    elif is_off:  # with a fixed value, the old option was a switch
        return [], f"{flag} is left out: it is switched off"
    else:
        words = [new_option, fixed_value]
    return words, f"{flag} is an old name: read as {' '.join(words)}"
