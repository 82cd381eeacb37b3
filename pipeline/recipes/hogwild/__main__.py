"""Run as ``python -m manycpu.pipeline.recipes.hogwild``, alone or on every rank of a run."""

import os
import sys

from manycpu.pipeline.spec.errors import BadInputError


def main(argv: list[str]) -> int:
    """Train; return what to exit with: 0, or 2 when the input cannot be used."""
    # Late: the processes that are spawned import this file too.
    from manycpu.pipeline.recipes.hogwild import options, training

    try:
        training.run(options.parse(argv, os.environ), os.environ)
    except BadInputError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
