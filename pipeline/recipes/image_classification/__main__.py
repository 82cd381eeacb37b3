"""Run as ``python -m manycpu.pipeline.recipes.image_classification``, alone or on every rank of a run."""

import os
import sys
from typing import Any

from manycpu.pipeline.spec.errors import BadInputError


def main(argv: list[str]) -> int:
    """Train; return what to exit with: 0, or 2 when the input cannot be used."""
    # Late: `--help` of the node, and errors of the interpreter, need not wait for what it imports.
    from manycpu.pipeline.recipes.image_classification import options

    try:
        parsed = options.parse(argv, os.environ)
        _training().run(parsed, os.environ)
    except BadInputError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _training() -> Any:
    try:
        from manycpu.pipeline.recipes.image_classification import training
    except ModuleNotFoundError as error:
        fix = "Install manycpu[train,vision]"
        raise BadInputError(f"{error.name} is not installed", field="run.program", fix=fix) from error
    return training


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
