"""A recipe's check of its options in the test's own process: a new process would import torch first."""

import io
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

import pytest

from manycpu.pipeline import recipes
from manycpu.pipeline.adapters import commands


def check_here(patch: pytest.MonkeyPatch) -> None:
    """Let preflight run the module of the check in this process, with the same stdin and stdout."""

    def run(argv: Sequence[str], *, timeout: float, input: bytes) -> commands.Completed:  # noqa: A002
        del timeout
        assert list(argv) == [sys.executable, "-P", "-m", recipes.__name__]
        written, stdin = io.StringIO(), io.StringIO(input.decode())
        with redirect_stdout(written), pytest.MonkeyPatch.context() as here:
            here.setattr(sys, "stdin", stdin)
            runpy.run_module(recipes.__name__, run_name="__main__")
        return commands.Completed(0, written.getvalue().encode())

    patch.setattr("manycpu.pipeline.verbs.preflight.commands.run", run)
