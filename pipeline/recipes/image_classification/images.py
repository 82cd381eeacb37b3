"""Find the images of a folder and their classes, and split them. Imports no torch.

Finding them needs the standard library alone, so that preflight can check the data before a run starts.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from manycpu.pipeline.recipes.files import below
from manycpu.pipeline.spec.errors import BadInputError

if TYPE_CHECKING:
    from PIL.Image import Image as OpenImage

LABEL_PATTERN: Final = r"^(.*)_\d+\.jpg$"
"""Finds the class in a file's name, as in Accelerate's tutorial."""
BATCH_SIZE: Final = 64
_SPLIT_NAMES: Final = frozenset({"dev", "eval", "test", "train", "val", "valid", "validation"})
_SUFFIXES: Final = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})


class Labelled(NamedTuple):
    """Images in the order of their names, which is the same on every node, and the class of each."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    classes: tuple[str, ...]


class Split(NamedTuple):
    """What to train on, and what to evaluate on."""

    train: Labelled
    evaluation: Labelled


def read(folder: str | Path | None, pattern: str) -> Labelled:
    """Return the images of a folder with their classes.

    If the folder itself has images, the pattern is searched in their names, and its first group is the class.
    Else each folder in it is a class, with the images below it.

    Raises:
        BadInputError: There are no images, a file's name has no class, all are of one class, or the classes
            are names of splits.
    """
    if folder is None:
        fix = "Name a folder of images there, or give --data_dir in run.args"
        raise BadInputError("there are no images", field="run.data", fix=fix)
    root = Path(folder)
    files = sorted(path for path in root.iterdir() if _is_image(path)) if root.is_dir() else []
    if files:
        named = list(_by_name(files, pattern))
    else:
        folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        named = [
            (path, subfolder.name) for subfolder in folders for path in below(subfolder) if _is_image(path)
        ]
    if not named:
        raise BadInputError(
            f"there is no image in {root}, nor in a folder of it",
            field="run.data",
            fix=f"Name a folder with files such as beagle_32.jpg, or with one folder per class; images are "
            f"{', '.join(sorted(_SUFFIXES))}",
        )
    classes = sorted({name for _, name in named})
    if _SPLIT_NAMES.issuperset(map(str.lower, classes)):
        raise BadInputError(
            f"the classes of the images in {root} would be {', '.join(classes)}, which are names of splits",
            field="run.data",
            fix="Name the folder of one split: the recipe splits off a fifth of its images to evaluate on",
        )
    if len(classes) == 1:
        raise BadInputError(
            f"all images in {root} are of one class, {classes[0]!r}",
            field="run.data",
            fix="Name the folder that has the images, or one folder per class, of two classes at least",
        )
    numbers = {name: number for number, name in enumerate(classes)}
    labels = (numbers[name] for _, name in named)
    return Labelled(tuple(file for file, _ in named), tuple(labels), tuple(classes))


def split(images: Labelled, seed: int) -> Split:
    """Split off a random fifth of the images for evaluation; the same on every rank."""
    # Late: preflight needs no numpy.
    import numpy as np

    order = [int(index) for index in np.random.default_rng(seed).permutation(len(images.files))]
    train_size = train_count(len(order))
    train, evaluation = (
        Labelled(tuple(images.files[i] for i in part), tuple(images.labels[i] for i in part), images.classes)
        for part in (order[:train_size], order[train_size:])
    )
    return Split(train, evaluation)


def train_count(images: int) -> int:
    """Return how many of this number of images are trained on: four fifths, rounded down."""
    return int(0.8 * images)


def check_sizes(count: int, batch_size: int, ranks: int) -> None:
    """Raise BadInputError if ``count`` images to train on are fewer than all ranks take in one step."""
    needed = batch_size * ranks
    if count < needed:
        fitting = count // ranks
        raise BadInputError(
            f"{count} images to train on are too few: a step takes {needed}, --batch_size {batch_size} on "
            f"each of {ranks} ranks",
            field="run.data",
            fix=f"Give --batch_size {fitting} or less" if fitting else "Give more images, or use fewer ranks",
        )


@contextmanager
def opened(file: str | Path) -> Iterator["OpenImage"]:
    """Open an image of 8 bits per channel.

    Raises:
        OSError: It is no such image, or decoding it inside the ``with`` block failed.
    """
    # Late: preflight needs no Pillow.
    from PIL import Image

    try:
        with Image.open(file) as image:
            _check_depth(image)
            yield image
    # What Pillow raises for files that are broken or too large, and _check_depth.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise OSError(f"{file}: {error}") from error


def _check_depth(image: "OpenImage") -> None:
    if image.mode.startswith(("I", "F")):  # convert() would cut off what is brighter than 255
        raise ValueError(f"it has more than 8 bits per channel ({image.mode}); convert it")


def broken(files: Sequence[Path]) -> str | None:
    """Name the first image that :func:`opened` cannot read, and why; None where there is none.

    Each is decoded as a whole, a JPEG at an eighth of its size, to find files that are cut short.
    """
    for file in files:
        try:
            with opened(file) as image:
                image.draft("RGB", (1, 1))
                image.load()
        except OSError as error:
            return str(error)
    return None


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _SUFFIXES and not path.name.startswith(".") and path.is_file()


def _by_name(files: Sequence[Path], pattern: str) -> Iterator[tuple[Path, str]]:
    """Yield each file with its class, which the first group of the pattern finds in its name.

    Raises:
        BadInputError: The pattern is wrong or has no group, or finds no class in a name.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise BadInputError(f"--label_pattern {pattern}: {error}", field="run.args") from error
    if compiled.groups == 0:
        fix = r"Put what is the class into parentheses, as in ^(.*)_\d+\.jpg$"
        raise BadInputError(f"--label_pattern {pattern} has no group", field="run.args", fix=fix)
    for file in files:
        match = compiled.search(file.name)
        if match is None or not match[1]:
            raise BadInputError(
                f"the name {file.name!r} has no class by the pattern {pattern}",
                field="run.data",
                fix="Give --label_pattern with a group for the class, or use one folder per class",
            )
        yield file, match[1]
