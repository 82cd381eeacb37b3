"""Parse a recipe's options, with defaults from the environment of a run. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from transformers import HfArgumentParser

from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["Folders", "Parser", "check_least", "folders", "has_option", "option", "words"]


def option(default: Any, text: str) -> Any:
    """Describe an option of a recipe."""
    return field(default=default, metadata={"help": text})


class Parser(HfArgumentParser):
    """Parses dataclasses of options; what cannot be read is bad input.

    Args:
        kinds: The dataclasses.
    """

    def __init__(self, kinds: list[Any]) -> None:
        super().__init__(kinds, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Refuse the words."""
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
    return [word for name, value in options.items() if value is not None for word in _written(name, value)]


def _written(name: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def has_option(words: Sequence[str], name: str) -> bool:
    """Tell whether an option is among the words."""
    return any(word.partition("=")[0] in (f"--{name}", f"--{name.replace('_', '-')}") for word in words)


def check_least(options: Any, least: Mapping[str, float]) -> None:
    """See that no option is less than what it can be.

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
    """Where the model goes, and where checkpoints are kept, which are no part of it."""

    output: str
    checkpoints: str
    notes: tuple[str, ...] = ()


def folders(requested: str | None, env: Mapping[str, str]) -> Folders:
    """Separate the output from the checkpoints: a run has a folder for each, and they win."""
    named = requested or "trainer_output"
    output = env.get("MANYCPU_OUTPUT") or named
    moved = f"--output_dir {named}: the model goes to {output}, from where the run exports it"
    return Folders(
        output,
        env.get("MANYCPU_CHECKPOINTS") or f"{output.rstrip('/')}-checkpoints",
        () if Path(output) == Path(named) else (moved,),
    )
