"""Versions of a data set: folders with one part for each use. A folder gets its name when it is complete."""

import random
import shutil
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from manycpu.pipeline.spec.errors import BadInputError

PARTS: Final = ("train", "holdout", "unlabelled")
_SEED: Final = 0
# Numbers of rows. These rows are the same in every version, and no model is trained on them.
_HOLDOUT_ROWS: Final = 300
_UNLABELLED_ROWS: Final = 200


class Version(NamedTuple):
    """A version of the data set."""

    number: int
    path: str


def write_version(folder: Path, more: int) -> Version:
    """Write the next version of scikit-learn's handwritten digits, with more rows to train on than the last.

    Args:
        folder: Folder of all versions; it is created if it does not exist.
        more: Version n has n times this number of rows to train on, until all rows are used.

    Raises:
        OSError: Another process wrote the same version meanwhile, or the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    last_version = newest(folder)
    number = last_version.number + 1 if last_version else 1
    partial_folder = Path(tempfile.mkdtemp(prefix=".new.", dir=folder))
    try:
        for part, rows in _parts(number * more).items():
            (partial_folder / part).mkdir()
            lines = (",".join(map(str, row)) for row in rows)
            (partial_folder / part / "digits.csv").write_text("\n".join(lines) + "\n")
        partial_folder.chmod(0o755)  # a temporary folder is readable by its owner only
        path = partial_folder.rename(folder / f"v{number:04}")  # fails if the version exists
    except BaseException:
        shutil.rmtree(partial_folder, ignore_errors=True)
        raise
    return Version(number, str(path))


def newest(folder: Path) -> Version | None:
    """Return the version with the highest number; None if there is none."""
    paths = [path for path in folder.glob("v*") if path.name[1:].isdecimal()]
    versions = [Version(int(path.name[1:]), str(path)) for path in paths]
    return max(versions, default=None)


def read_version(path: str) -> Version:
    """Return the version at a path; its number is 0 if the folder's name is not like ``v0001``.

    Raises:
        BadInputError: The folder lacks one of the parts.
    """
    for part in PARTS:
        if not Path(path, part).is_dir():
            fix = f"Give a folder with {', '.join(PARTS)} in it, as DAG digits_dataset writes"
            message = f"{path} is no version of the data set: it has no {part}"
            raise BadInputError(message, field="path", fix=fix)
    digits = Path(path).name[1:]
    return Version(int(digits) if digits.isdecimal() else 0, path)


def _parts(count: int) -> dict[str, list[list[int]]]:
    """Return the rows of each part: ``count`` rows to train on, or as many as there are.

    A row is a digit from 0 to 9 and its 64 pixels; an unlabelled row has only the pixels.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    images, labels = load_digits(return_X_y=True)
    rows = [[int(label), *map(int, image)] for label, image in zip(labels, images, strict=True)]
    random.Random(_SEED).shuffle(rows)  # noqa: S311 - every version needs the same split
    reserved = _HOLDOUT_ROWS + _UNLABELLED_ROWS
    return {
        "train": rows[reserved : reserved + count],
        "holdout": rows[:_HOLDOUT_ROWS],
        "unlabelled": [row[1:] for row in rows[_HOLDOUT_ROWS:reserved]],
    }
