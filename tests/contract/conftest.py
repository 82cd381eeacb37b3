"""What tests of real processes share."""

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import processes_of, until


@pytest.fixture
def nothing_runs_afterwards(tmp_path: Path) -> Iterator[None]:
    """See that the test leaves no process; an mpirun may end a moment before its ranks."""
    yield
    until(lambda: not list(processes_of(tmp_path)), 10)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script."""

    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write
