"""Run a recipe, or a script, on several ranks of this machine, in the way in which a run starts it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

import psutil
from support.killable_programs import Program

NODE = Path(__file__).parents[1] / "scripts" / "warm_node.py"
_HANGS = 600.0  # seconds; the longest of these trainings takes one minute on a quiet machine
MODULES = (
    "torch._dynamo",  # which every optimizer imports
    "manycpu.pipeline.recipes.causal_lm.training",
    "manycpu.pipeline.recipes.image_classification.training",
    "manycpu.pipeline.recipes.question_answering.training",
)


class WarmNode:
    """Starts ranks as forks of a process that has imported what they need: imports take most of the time."""

    def __init__(self, program: Program[str]) -> None:
        self._program = program

    def run(self, ranks: int, env: Mapping[str, str], *program: str) -> subprocess.CompletedProcess[str]:
        """Run ``-m MODULE ARGS...`` or ``SCRIPT ARGS...`` on these ranks, to its end."""
        world = {"MANYCPU_NNODES": "1", "MANYCPU_NPROC_PER_NODE": str(ranks)}
        argv = [f"--nproc-per-node={ranks}", *program]
        with tempfile.TemporaryDirectory() as folder:
            request = {"argv": argv, "env": {**os.environ, **world, **env}, "folder": folder}
            assert self._program.stdin is not None
            assert self._program.stdout is not None
            self._program.stdin.write(json.dumps(request) + "\n")
            self._program.stdin.flush()
            end = Timer(_HANGS, self._end_ranks)
            end.start()
            try:
                code = int(self._program.stdout.readline())
            finally:
                end.cancel()  # else it would end the ranks of a later test
            out, err = (Path(folder, name).read_text(errors="replace") for name in ("out", "err"))
        return subprocess.CompletedProcess(argv, code, out, err)

    def _end_ranks(self) -> None:
        """Have each rank print where it hangs, and end: the next test needs this process too."""
        for process in psutil.Process(self._program.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if not process.children():
                    process.send_signal(signal.SIGABRT)

    def recipe(
        self, recipe: str, ranks: int, env: Mapping[str, str], *words: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a recipe with these options over gloo, to its end."""
        module = f"manycpu.pipeline.recipes.{recipe}"
        return self.run(ranks, {"MANYCPU_BACKEND": "gloo", **env}, "-m", module, *words)


@contextmanager
def warm_node(caches: Path) -> Iterator[WarmNode]:
    """Start a process that imports what recipes need, for all ranks of this block; ``caches`` is HF_HOME."""
    command = [sys.executable, str(NODE), *MODULES]
    # What libraries read when they are imported.
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(caches)}
    with Program(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        yield WarmNode(program)
