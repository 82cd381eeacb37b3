"""What is done with the images of a folder before they are trained on. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image_folder import Labelled

__all__ = ["Split", "broken", "check_sizes", "split"]

_TRAINED = 0.8
"""Part of the images to train on."""


class Split(NamedTuple):
    """What to train on, and what to evaluate on."""

    train: Labelled
    evaluation: Labelled


def split(images: Labelled, seed: int) -> Split:
    """Split off a fifth of the images, by chance; the same on every rank, however many there are."""
    order = [int(index) for index in np.random.default_rng(seed).permutation(len(images.files))]
    cut = int(_TRAINED * len(order))
    return Split(images.part(order[:cut]), images.part(order[cut:]))


def check_sizes(split: Split, batch_size: int, ranks: int) -> None:
    """See that every rank has a whole batch to train on.

    Raises:
        BadInputError: There are too few images.
    """
    count, needed = len(split.train.files), batch_size * ranks
    if count < needed:
        fitting = count // ranks
        raise BadInputError(
            f"{count} images to train on are too few: a step takes {needed}, --batch_size {batch_size} on "
            f"each of {ranks} ranks",
            field="run.data",
            fix=f"Give --batch_size {fitting} or less" if fitting else "Give more images, or use fewer ranks",
        )


def broken(files: Sequence[Path]) -> str | None:
    """Name the first image that cannot be read, and why; None where there is none."""
    return next((fault for file in files if (fault := _fault(file))), None)


def _fault(file: Path) -> str | None:
    """Decode the whole image, of a JPEG with an eighth of its pixels: what is cut short ends too early."""
    try:
        with Image.open(file) as image:
            image.draft("RGB", (1, 1))
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return f"{file}: {error}"
    return None
