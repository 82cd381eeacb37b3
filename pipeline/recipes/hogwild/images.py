"""The images and their labels: MNIST's files, or the digits that come with scikit-learn."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name

from manycpu.pipeline.recipes.hogwild import idx
from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["Images", "load"]

_SIZE: Final = 28  # of an image's side, which the network is made for
_CLASSES: Final = 10
_TESTED: Final = 5  # every fifth of scikit-learn's digits is for the test


class Images(NamedTuple):
    """Images with their labels."""

    pixels: torch.Tensor
    """(images, 1, 28, 28), bytes: a quarter of the memory that floats take."""
    labels: torch.Tensor
    """(images,), from 0 to 9."""

    def batch(self, indices: torch.Tensor, mean: float, std: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Take some of them, as the network gets them."""
        return (self.pixels[indices].float() / 255 - mean) / std, self.labels[indices]

    def scale(self) -> tuple[float, float]:
        """Compute mean and standard deviation of all pixels, from 0 to 1; of MNIST 0.1307 and 0.3081."""
        counts = torch.bincount(self.pixels.flatten(), minlength=256).double()
        values = torch.arange(256).double() / 255
        mean = float((counts * values).sum() / counts.sum())
        return mean, float(((counts * (values - mean) ** 2).sum() / counts.sum()).sqrt())

    def share(self) -> None:
        """Move them to shared memory, where all processes find them."""
        self.pixels.share_memory_()  # type: ignore[no-untyped-call]
        self.labels.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.labels)


def load(env: Mapping[str, str]) -> tuple[Images, Images]:
    """Load the images to train on, and those for the test.

    Args:
        env: Environment; MANYCPU_DATA is the folder of MNIST's files.

    Raises:
        BadInputError: The files cannot be used, or there are none and scikit-learn is not installed.
    """
    return _of_files(Path(env["MANYCPU_DATA"])) if env.get("MANYCPU_DATA") else _of_scikit_learn()


def _of_files(folder: Path) -> tuple[Images, Images]:
    files = idx.find(folder)
    return _of(files["train-images"], files["train-labels"]), _of(files["t10k-images"], files["t10k-labels"])


def _of(images: Path, labels: Path) -> Images:
    pictures, classes = idx.read(images), idx.read(labels)
    if pictures.shape != (*classes.shape, _SIZE, _SIZE) or not classes.content:
        sizes = " x ".join(map(str, pictures.shape))
        raise _unusable(images, f"has images of {sizes}, for {classes.shape[0]} labels")
    if max(classes.content) >= _CLASSES:
        raise _unusable(labels, f"has the label {max(classes.content)}")
    pixels = torch.frombuffer(bytearray(pictures.content), dtype=torch.uint8)
    numbers = torch.frombuffer(bytearray(classes.content), dtype=torch.uint8)
    return Images(pixels.view(-1, 1, _SIZE, _SIZE), numbers.long())


def _unusable(path: Path, why: str) -> BadInputError:
    fix = f"Give images of {_SIZE} x {_SIZE} pixels, each with a label from 0 to {_CLASSES - 1}"
    return BadInputError(f"{path} {why}", field="run.data", fix=fix)


def _of_scikit_learn() -> tuple[Images, Images]:
    """Enlarge the 1797 digits of 8 x 8 pixels, each from 0 to 16."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise BadInputError(
            "there is no data, and scikit-learn, which brings digits, is not installed",
            field="run.data",
            fix="Give a folder with MNIST's four IDX files, or install scikit-learn",
        ) from error
    digits = load_digits()
    small = torch.from_numpy(digits.images).unsqueeze(1) * (255 / 16)
    pixels = F.interpolate(small, size=(_SIZE, _SIZE), mode="bilinear").round().byte()
    labels = torch.from_numpy(digits.target).long()
    tested = torch.arange(len(labels)) % _TESTED == _TESTED - 1
    return Images(pixels[~tested], labels[~tested]), Images(pixels[tested], labels[tested])
