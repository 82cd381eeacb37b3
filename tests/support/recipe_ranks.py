"""Run a recipe on several ranks of this machine, as a run starts it."""

import os
import subprocess
import sys
from collections.abc import Mapping


def on_ranks(
    recipe: str, ranks: int, env: Mapping[str, str], *words: str
) -> subprocess.CompletedProcess[str]:
    """Run a recipe with these options over gloo, to its end."""
    program = ("-m", f"manycpu.pipeline.recipes.{recipe}", *words)
    world = {
        "MANYCPU_BACKEND": "gloo",
        "MANYCPU_NNODES": "1",
        "MANYCPU_NPROC_PER_NODE": str(ranks),
    }
    return subprocess.run(
        (sys.executable, "-m", "manycpu.pipeline.node", f"--nproc-per-node={ranks}", *program),
        env={**os.environ, **env, **world},
        capture_output=True,
        text=True,
        check=False,
    )
