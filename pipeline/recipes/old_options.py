"""Translate options of older versions of Hugging Face's Trainer that current ones do not have."""

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence

__all__ = ["translate"]

_RENAMED = {
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

_GONE_CHOICES = {("ddp_backend", "ccl"), ("xpu_backend", "ccl")}
"""Old name and value, where the name is still known and the value is not."""

_FALSE = ("0", "f", "false", "n", "no")

_NEEDLESS = {
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
"""Old name -> why nothing is lost without it."""


def translate(words: Sequence[str], parser: ArgumentParser) -> tuple[list[str], list[str]]:
    """Replace old options and choices that the parser does not know.

    Returns:
        The words to parse, and a note for each that was replaced or left out.
    """
    accepted = set(parser._option_string_actions)  # noqa: SLF001 - argparse tells its options in no other way
    translated: list[str] = []
    notes: list[str] = []
    for option, values in _options(words):
        replacement = _replacement(option, values, accepted)
        translated += [option, *values] if replacement is None else replacement[0]
        notes += [replacement[1]] if replacement else []
    return translated, notes


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
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


def _replacement(option: str, values: list[str], accepted: set[str]) -> tuple[list[str], str] | None:
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
