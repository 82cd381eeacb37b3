"""Load images in batches: how each is cropped, and how many processes of a rank load them."""

from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import (  # type: ignore[import-untyped]
    Compose,
    RandomResizedCrop,
    Resize,
    ToTensor,
)

from manycpu.pipeline.recipes.image_classification.images import Labelled, Split
from manycpu.pipeline.recipes.image_classification.options import ImageOptions

__all__ = ["for_evaluation", "loaders", "threads", "workers"]

_MAX_WORKERS = 4
"""Processes that load images, as Accelerate's tutorial has it."""
_THREADS_PER_WORKER = 4
"""Threads of a rank for each of these processes; with fewer the rank loads images itself."""


class Images(Dataset[dict[str, Any]]):
    """Images as tensors, and their classes.

    Args:
        images: Which ones.
        transform: Makes a tensor of an image.
    """

    def __init__(self, images: Labelled, transform: Any) -> None:
        self._images, self._transform = images, transform

    def __len__(self) -> int:
        return len(self._images.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with Image.open(self._images.files[index]) as image:
            return {"image": self._transform(image.convert("RGB")), "label": self._images.labels[index]}


def for_evaluation(size: int) -> Any:
    """Return the transform of an image for evaluation, which is not random."""
    return Compose([Resize((size, size)), ToTensor()])


def loaders(split: Split, options: ImageOptions, workers: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Make the loaders: for training with random crops, for evaluation with batches twice as large."""
    size, batch = options.image_size, options.batch_size
    crop = Compose([RandomResizedCrop(size, scale=(0.5, 1.0)), ToTensor()])
    train, evaluation = Images(split.train, crop), Images(split.evaluation, for_evaluation(size))
    return (
        DataLoader(train, batch_size=batch, shuffle=True, num_workers=workers),
        DataLoader(evaluation, batch_size=2 * batch, num_workers=workers),
    )


def threads(env: Mapping[str, str]) -> int:
    """Return the threads that the CPU plan gives to this rank, or else torch's default."""
    return int(env.get("MANYCPU_THREADS") or torch.get_num_threads())


def workers(asked: int | None, threads: int) -> int:
    """Choose how many processes load images, each in place of one of the rank's threads (docs/speed.md).

    >>> [workers(None, threads) for threads in (1, 3, 4, 16, 56)]
    [0, 0, 1, 4, 4]
    >>> [workers(4, threads) for threads in (1, 3, 4, 16)]
    [0, 2, 3, 4]
    """
    return min(threads // _THREADS_PER_WORKER, _MAX_WORKERS) if asked is None else min(asked, threads - 1)
