"""Run as ``python -m manycpu.pipeline.recipes.hogwild``, alone or on every rank of a run."""

import sys
from functools import partial

from manycpu.pipeline.recipes import start

main = partial(start, "hogwild")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
