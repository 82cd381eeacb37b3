"""Style, types and the dependency rule: what `make lint` proves."""

import subprocess
from pathlib import Path

PROJECT = Path(__file__).parents[2]


def test_lint() -> None:
    done = subprocess.run(["make", "lint"], cwd=PROJECT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
