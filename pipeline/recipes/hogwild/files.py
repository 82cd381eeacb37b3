"""Find MNIST's four files by the standard library alone, so that preflight can before a run starts."""

import re
from pathlib import Path
from typing import Final

from manycpu.pipeline.recipes.files import below
from manycpu.pipeline.spec.errors import BadInputError

# As LeCun's page names them, or as some copies do (train-images.idx3-ubyte), also compressed.
_NAME: Final = re.compile(r"(train|t10k)-(?:(images)[-.]idx3|(labels)[-.]idx1)-ubyte(?:\.gz)?")
DIMENSIONS: Final = {"images": 3, "labels": 1}


def find(folder: Path) -> dict[str, Path]:
    """Return name -> path of the four files: ``train-images``, ``train-labels``, and the same of ``t10k``.

    Args:
        folder: They are in it or below it; of several copies of a file, the first one by path is taken.

    Raises:
        BadInputError: A file is missing.
    """
    path_of_part: dict[str, Path] = {}
    for path in below(folder):
        if match := _NAME.fullmatch(path.name):
            part, images, labels = match.groups()
            path_of_part.setdefault(f"{part}-{images or labels}", path)
    needed = {f"{part}-{kind}": kind for kind in DIMENSIONS for part in ("train", "t10k")}
    if missing := sorted(needed.keys() - path_of_part):
        names = [f"{name}-idx{DIMENSIONS[needed[name]]}-ubyte" for name in missing]
        raise BadInputError(
            f"{folder} has no file {', no '.join(names)}",
            field="run.data",
            fix="Give a folder with MNIST's four IDX files, as they are or packed (.gz); without "
            "run.data the digits of scikit-learn are taken",
        )
    return path_of_part
