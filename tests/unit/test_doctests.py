"""The examples in the docstrings of every module are true."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules() -> list[str]:
    """Name the modules that have examples."""
    files = [path for part in ("operators", "pipeline") for path in sorted((ROOT / part).rglob("*.py"))]
    shown = [path for path in files if re.search(r"^\s*>>> ", path.read_text(), re.MULTILINE)]
    return [".".join(("manycpu", *path.relative_to(ROOT).with_suffix("").parts)) for path in shown]


@pytest.mark.parametrize("name", modules())
def test_examples_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert result.failed == 0


def test_there_are_examples() -> None:
    assert len(modules()) > 5
