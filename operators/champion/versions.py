"""Versions of a data set: each a folder that appears whole, with a part for each of those that use it."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["HOLDOUT", "TRAIN", "UNLABELLED", "Version", "newest", "read_version", "write_version"]

TRAIN, HOLDOUT, UNLABELLED = "train", "holdout", "unlabelled"
_PARTS: Final = (TRAIN, HOLDOUT, UNLABELLED)
_SEED: Final = 0
_SIZES: Final = {HOLDOUT: 300, UNLABELLED: 200}
"""Rows that are the same in every version, and that no version has among those to train on."""


class Version(NamedTuple):
    """A version of the data set."""

    number: int
    path: str


def write_version(folder: Path, more: int) -> Version:
    """Write the next version of scikit-learn's handwritten digits: with more rows to train on, up to all.

    Args:
        folder: Where all versions are.
        more: Rows to train on that each version has more than the one before.

    Raises:
        OSError: Another one wrote the same version meanwhile, or the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    last = newest(folder)
    number = last.number + 1 if last else 1
    partial = Path(tempfile.mkdtemp(prefix=".new.", dir=folder))
    try:
        for part, rows in _parts(number * more).items():
            _write(partial / part, rows)
        partial.chmod(0o755)
        path = partial.rename(folder / _name(number))  # refused where there is one
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Version(number, str(path))


def newest(folder: Path) -> Version | None:
    """Find the newest version; None where there is none yet."""
    paths = [path for path in folder.glob("v*") if path.name[1:].isdigit()]
    versions = [Version(int(path.name[1:]), str(path)) for path in paths]
    return max(versions, default=None)


def read_version(path: str) -> Version:
    """Open a version that somebody names.

    Raises:
        BadInputError: It lacks a part.
    """
    from manycpu.pipeline.spec.errors import BadInputError

    for part in _PARTS:
        if not Path(path, part).is_dir():
            fix = f"Give a folder with {', '.join(_PARTS)} in it, as DAG digits_dataset writes"
            raise BadInputError(
                f"{path} is no version of the data set: it has no {part}", field="path", fix=fix
            )
    digits = Path(path).name[1:]
    return Version(int(digits) if digits.isdigit() else 0, path)


def _name(number: int) -> str:
    return f"v{number:04}"


def _parts(count: int) -> dict[str, list[list[int]]]:
    rows = _digits()
    random.Random(_SEED).shuffle(rows)  # noqa: S311 - the same split for ever is the point
    parts = {}
    for part, size in _SIZES.items():
        parts[part], rows = rows[:size], rows[size:]
    parts[UNLABELLED] = [row[1:] for row in parts[UNLABELLED]]
    return {**parts, TRAIN: rows[:count]}


def _digits() -> list[list[int]]:
    """Read the digits: in each row the digit, and its pixels."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    images, labels = load_digits(return_X_y=True)
    pairs: Iterable[Any] = zip(labels, images, strict=True)
    return [[int(label), *map(int, image)] for label, image in pairs]


def _write(folder: Path, rows: list[list[int]]) -> None:
    folder.mkdir()
    lines = (",".join(map(str, row)) for row in rows)
    (folder / "digits.csv").write_text("\n".join(lines) + os.linesep)
