"""Write handwritten digits: ``python -m manycpu.pipeline.recipes.image_classification.generate FOLDER``.

They are the 1,797 digits that scikit-learn (extra ``demo``) carries, each named ``CLASS_NUMBER.jpg``.

Source: Alpaydin and Kaynak 1998, https://archive.ics.uci.edu/dataset/80
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

_SIZE = 32
_MAX_VALUE = 16
"""Greatest value of a pixel in scikit-learn's digits."""


def main(folder: str) -> None:
    """Write the digits as JPEG files into a folder, which is created."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        image = Image.fromarray((pixels * (255 / _MAX_VALUE)).astype(np.uint8)).resize((_SIZE, _SIZE))
        image.save(Path(folder, f"{label}_{number}.jpg"), quality=90)


if __name__ == "__main__":
    main(sys.argv[1])
