"""Golden files: the exact text that is written for a run; for a variant, only the lines that differ.

After an intended change, write them with ``MANYCPU_GOLDEN=write pytest tests/unit``, and read the diff.
"""

import difflib
import json
import os
from pathlib import Path
from typing import Any, Final

import pytest

_FOLDER: Final = Path(__file__).parents[1] / "unit" / "golden"


def golden(name: str, text: str) -> str:
    """Return the content of a golden file; with MANYCPU_GOLDEN=write, write ``text`` and fail the test."""
    path = _FOLDER / name
    if os.environ.get("MANYCPU_GOLDEN") == "write":
        path.write_text(text)
        pytest.fail(f"{name} was written: look at the difference, and run without MANYCPU_GOLDEN")
    return path.read_text()


def as_json(written: Any) -> str:
    """Return an object as JSON in the format of golden files."""
    return json.dumps(written, indent=2) + "\n"


def differences(one: str, other: str) -> str:
    r"""List the lines in which one text differs from another, with their line numbers.

    >>> print(differences("kind: A\nsize: 1\n", "kind: A\nsize: 2\n"), end="")
    @@ -2 +2 @@
    -size: 1
    +size: 2
    """
    lines = difflib.unified_diff(one.splitlines(True), other.splitlines(True), n=0)
    return "".join(list(lines)[2:])  # without the header with file names
