"""Run cases of tests/scripts/ccl_worlds.py: each in a world, which is a group of ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[1] / "scripts"
Found = Callable[[str], dict[str, Any]]


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without variables that manycpu, MPI or oneCCL read."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("CCL_", "I_MPI", "MANYCPU_"))
    }
    return kept | {"PYTHONPATH": str(SCRIPTS.parents[1] / ".dev"), "OMP_NUM_THREADS": "1"} | more


def run(folder: Path, *worlds: str) -> Found:
    """Run worlds (``CASE+CASE:SIZE``) from a process that imports torch once for all.

    Returns a function that returns the result of a case; it fails if the case has none, or if it hung.
    """
    command = [sys.executable, str(SCRIPTS / "ccl_worlds.py"), str(folder), *worlds]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=560, env=environment()
    )

    def of(case: str) -> dict[str, Any]:
        path = folder / f"{case.replace(':', '-')}.result"
        assert path.exists(), done.stdout + done.stderr
        result: dict[str, Any] = json.loads(path.read_text())
        assert "hung" not in result["codes"], f"{result}\n{done.stderr[-3000:]}"
        return result | {"stderr": done.stderr}

    return of
