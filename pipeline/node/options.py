"""Translate options of older Hugging Face Trainers to those of the installed one.

>>> words, notes = translate(["--no_cuda", "--use_ipex", "True", "--ddp_backend=ccl", "--bf16"], "gloo")
>>> words
['--use_cpu', '--bf16']
>>> [note.partition(":")[0] for note in notes]
['--no_cuda', '--use_ipex', '--ddp_backend']
"""

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from manycpu.pipeline.node.emit import warn
from manycpu.pipeline.node.script import Program

__all__ = ["translate", "translated"]

_OPTION: Final = re.compile(r"--(ddp[_-]backend|no[_-]cuda|use[_-]ipex)(=.*)?", re.DOTALL)
_BOOLEANS: Final = {"true", "false", "yes", "no", "t", "f", "y", "n", "1", "0"}  # of HfArgumentParser
_TRAINER: Final = re.compile(r"\b(HfArgumentParser|TrainingArguments)\b")
_RECIPES: Final = "manycpu.pipeline.recipes."  # these translate old options by themselves
_DROPPED_IN: Final = 5  # the first major version of transformers without these options


def translated(program: Program, backend: str | None) -> Program:
    """Translate the arguments of a program that passes them to a current Trainer; others stay as they are."""
    if program.name.startswith(_RECIPES) or not any(_OPTION.fullmatch(word) for word in program.args):
        return program
    try:
        dropped = int(version("transformers").partition(".")[0]) >= _DROPPED_IN
    except (PackageNotFoundError, ValueError):
        dropped = False
    if not dropped or not _TRAINER.search(program.source()):
        return program
    words, notes = translate(program.args, backend)
    for note in notes:
        warn(note)
    return program._replace(args=tuple(words))


def translate(words: Sequence[str], backend: str | None) -> tuple[list[str], list[str]]:
    """Replace the old options; returns the new arguments, and a note for each change."""
    new: list[str] = []
    notes: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        match = _OPTION.fullmatch(word)
        if match is None:
            new.append(word)
            continue
        option, value = match[1].replace("-", "_"), match[2] or ""
        if not value and rest and (option == "ddp_backend" or rest[0].lower() in _BOOLEANS):
            value = f"={rest.pop(0)}"
        arguments, note = _replacement(option, value, backend)
        new.extend(arguments)
        notes.extend(note)
    return new, notes


def _replacement(option: str, value: str, backend: str | None) -> tuple[list[str], list[str]]:
    if option == "no_cuda":
        return [f"--use_cpu{value}"], ["--no_cuda: is called --use_cpu now, which is used"]
    if option == "use_ipex":
        note = "--use_ipex: dropped; --bf16 (autocast) and --optim adamw_torch_fused do what it did"
        return [], [note]
    if value.removeprefix("=") != "ccl":  # the Trainer still has the others; the backend is checked later
        return [f"--ddp_backend{value}"], []
    used = f"{backend!r} is used" if backend else "torch's default is used"
    return [], [f"--ddp_backend: ccl is no choice of today's Trainer; run.backend decides, {used}"]
