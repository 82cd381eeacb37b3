"""Training programs that come with manycpu; each runs as ``python -m manycpu.pipeline.recipes.NAME``."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from manycpu.pipeline.spec.errors import BadInputError, install

__all__ = ["start"]


def start(recipe: str, argv: Sequence[str], extras: str = "train") -> int:
    """Run a recipe: parse its options and train.

    Args:
        recipe: Name of the recipe's package, which has ``options.parse`` and ``training.run``.
        argv: The program's arguments.
        extras: The extras of manycpu that the recipe needs, for the message if a package is missing.

    Returns:
        The exit code: 0, or 2 if BadInputError was raised, whose message goes to stderr.
    """
    # Imported late: `--help` and spawned processes, which import the program too, need not wait for torch.
    try:
        parsed = _recipe_module(recipe, "options", extras).parse(argv, os.environ)
        _recipe_module(recipe, "training", extras).run(parsed, os.environ)
    except BadInputError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _recipe_module(recipe: str, name: str, extras: str) -> Any:
    """Import the module ``name`` of a recipe.

    Raises:
        BadInputError: A package that the module needs is not installed; ``extras`` bring it.
    """
    try:
        return import_module(f"{__name__}.{recipe}.{name}")
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed"
        raise BadInputError(message, field="run.program", fix=install(extras)) from error
