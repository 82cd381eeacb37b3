"""The images and their labels: MNIST's files, or the digits that come with scikit-learn.

MNIST's files have the format IDX: a header of big-endian numbers, then one byte for each value.
"""

import gzip
import math
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name

from manycpu.pipeline.recipes.hogwild.files import DIMENSIONS, find
from manycpu.pipeline.spec.errors import BadInputError

_SIZE: Final = 28  # pixels of an image's side, which the network is made for
_CLASSES: Final = 10


class Array(NamedTuple):
    """An array of unsigned bytes."""

    shape: tuple[int, ...]
    content: bytes


class Images(NamedTuple):
    """Images with their labels."""

    pixels: torch.Tensor
    """(images, 1, 28, 28), bytes: a quarter of the memory that floats take."""
    labels: torch.Tensor
    """(images,), from 0 to 9."""

    def batch(self, indices: torch.Tensor, mean: float, std: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images of some indices, normalised as the network's input, and their labels."""
        return (self.pixels[indices].float() / 255 - mean) / std, self.labels[indices]

    def scale(self) -> tuple[float, float]:
        """Compute mean and standard deviation of all pixels, from 0 to 1; of MNIST 0.1307 and 0.3081."""
        # How often each of the 256 values occurs: the values are then weighted by it.
        counts = torch.bincount(self.pixels.flatten(), minlength=256).double()
        values = torch.arange(256).double() / 255
        mean = float((counts * values).sum() / counts.sum())
        return mean, float(((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt())

    def __len__(self) -> int:
        return len(self.labels)


def load(env: Mapping[str, str]) -> tuple[Images, Images]:
    """Return the images to train on, and those for the test: MNIST's in MANYCPU_DATA, else scikit-learn's."""
    if not env.get("MANYCPU_DATA"):
        return _load_digits()
    files = find(Path(env["MANYCPU_DATA"]))
    train_images = _read_images(files["train-images"], files["train-labels"])
    return train_images, _read_images(files["t10k-images"], files["t10k-labels"])


def read(path: Path) -> Array:
    """Read an IDX file of bytes: images or labels, as its name says.

    Raises:
        BadInputError: The file cannot be read, or its header does not fit its name or its size.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, f"cannot be read: {error}") from error
    dimensions = DIMENSIONS["images" if "images" in path.name else "labels"]
    header_bytes = 4 + 4 * dimensions
    # Two zeros, the type unsigned byte, and the number of dimensions.
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < header_bytes:
        raise _unreadable(
            path, f"is no IDX file of bytes with {dimensions} dimensions: its header is different"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header_bytes])
    if len(content) != header_bytes + math.prod(shape):
        sizes = " x ".join(map(str, shape))
        raise _unreadable(path, f"has {len(content) - header_bytes:,} values, and promises {sizes}")
    return Array(shape, content[header_bytes:])


def _unreadable(path: Path, why: str) -> BadInputError:
    return BadInputError(f"{path} {why}", field="run.data", fix="Get the file again")


def _read_images(images: Path, labels: Path) -> Images:
    """Read images with their labels; raises BadInputError if they do not fit each other or the network."""
    image_array, label_array = read(images), read(labels)
    problem = None
    if image_array.shape != (*label_array.shape, _SIZE, _SIZE) or not label_array.content:
        sizes = " x ".join(map(str, image_array.shape))
        problem = f"{images} has images of {sizes}, for {label_array.shape[0]} labels"
    elif max(label_array.content) >= _CLASSES:
        problem = f"{labels} has the label {max(label_array.content)}"
    if problem:
        fix = f"Give images of {_SIZE} x {_SIZE} pixels, each with a label from 0 to {_CLASSES - 1}"
        raise BadInputError(problem, field="run.data", fix=fix)
    # A bytearray: torch warns of a buffer that cannot be written.
    pixels = torch.frombuffer(bytearray(image_array.content), dtype=torch.uint8)
    label_numbers = torch.frombuffer(bytearray(label_array.content), dtype=torch.uint8)
    return Images(pixels.view(-1, 1, _SIZE, _SIZE), label_numbers.long())


def _load_digits() -> tuple[Images, Images]:
    """Load scikit-learn's 1797 digits, enlarged from 8 x 8 pixels, to train on and to test on.

    Raises:
        BadInputError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise BadInputError(
            "there is no data, and scikit-learn, which brings digits, is not installed",
            field="run.data",
            fix="Give a folder with MNIST's four IDX files, or install scikit-learn",
        ) from error
    digits = load_digits()
    # Their pixels are 0 to 16, those of MNIST 0 to 255.
    small = torch.from_numpy(digits.images).unsqueeze(1) * (255 / 16)
    pixels = F.interpolate(small, size=(_SIZE, _SIZE), mode="bilinear").round().byte()
    labels = torch.from_numpy(digits.target).long()
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    is_test[4::5] = True  # every fifth
    return Images(pixels[~is_test], labels[~is_test]), Images(pixels[is_test], labels[is_test])
