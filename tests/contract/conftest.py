"""What tests of real processes share."""

import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import processes_of, until
from pod_process import LARGE


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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make a folder with all kinds of files, to be copied."""
    folder = tmp_path / "source"
    (folder / "deep er").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"alpha")
    (folder / "deep er" / "große\nDatei.bin").write_bytes(os.urandom(LARGE))
    (folder / "deep er" / "z.bin").write_bytes(os.urandom(LARGE // 2))
    (folder / "empty").write_bytes(b"")
    (folder / "link").symlink_to(folder / "a.txt")
    (folder / "nothing in it").mkdir()
    return folder
