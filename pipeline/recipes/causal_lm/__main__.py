"""Run as ``python -m manycpu.pipeline.recipes.causal_lm``, alone or on every rank of a run."""

import sys
from functools import partial

from manycpu.pipeline.recipes import start

main = partial(start, "causal_lm", extras="train,language")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
