"""The examples in the docstrings of every module are true."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"^\s*>>> ", re.MULTILINE)


def examples() -> dict[str, int]:
    """Count the examples in the source of each module that has any."""
    files = [
        path for part in ("dags", "operators", "pipeline") for path in sorted((ROOT / part).rglob("*.py"))
    ]
    counts = {_module(path): len(EXAMPLE.findall(path.read_text())) for path in files}
    return {name: count for name, count in counts.items() if count}


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("manycpu", *(part for part in parts if part != "__init__")))


@pytest.mark.parametrize(("name", "count"), examples().items())
def test_examples_are_true(name: str, count: int) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert (result.attempted, result.failed) == (count, 0)


def test_there_are_examples() -> None:
    assert len(examples()) > 5
