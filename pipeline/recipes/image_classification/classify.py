"""Classify images: ``python -m manycpu.pipeline.recipes.image_classification.classify MODEL IMAGE...``."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch

from manycpu.pipeline.recipes.image_classification import model


class Guess(NamedTuple):
    """The likeliest class of an image, and how likely it is, 0 to 1."""

    name: str
    probability: float


class Classifier:
    """A trained model that classifies images.

    Args:
        folder: A model as the recipe leaves it.

    Raises:
        OSError: There is no such model.
    """

    def __init__(self, folder: str | Path) -> None:
        self._model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        config: Any = self._model.pretrained_cfg
        self._classes: list[str] = config["label_names"]
        self._transform = model.evaluation_transform(config["input_size"][-1])
        self._mean, self._std = model.normalization(self._model)

    def classify(self, images: Sequence[str | Path]) -> list[Guess]:
        """Return the likeliest class of each image.

        Raises:
            OSError: One cannot be read.
        """
        batch = torch.stack([model.pixels(file, self._transform) for file in images])
        with torch.inference_mode():
            probabilities = self._model((batch - self._mean) / self._std).softmax(dim=-1)
        likeliest = probabilities.max(dim=-1)
        return [
            Guess(self._classes[number], probability)
            for number, probability in zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        ]


def main(argv: list[str]) -> int:
    """Print each image's class; return the exit code: 0, or 2 on wrong input."""
    if len(argv) < 2:  # noqa: PLR2004 - as in the usage
        sys.stderr.write(f"usage: {__spec__.name} MODEL IMAGE...\n")
        return 2
    try:
        guesses = Classifier(argv[0]).classify(argv[1:])
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for file, guess in zip(argv[1:], guesses, strict=True):
        sys.stdout.write(f"{file}: {guess.name} {guess.probability:.2f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
