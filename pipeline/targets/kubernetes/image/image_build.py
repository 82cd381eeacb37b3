"""An image to build: what every builder is told of it, and the log of the build."""

import logging
from collections import deque
from typing import Final, NamedTuple

from manycpu.pipeline.spec.errors import BuildError
from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.targets.kubernetes.image.build_inputs import Recipe

__all__ = ["TIMEOUT", "Build", "LastLines", "log"]

TIMEOUT: Final = 3600.0  # seconds for a build
log: Final = logging.getLogger("manycpu.build")
_LINES: Final = 30


class Build(NamedTuple):
    """An image to build, and where it goes."""

    recipe: Recipe
    reference: Reference
    """The image's name, with its tag."""
    from_registry: bool = False
    """Whether registries have all that it starts from; its tag is made from those digests."""


class LastLines:
    """Logs lines, and keeps the last for an error."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)

    def __call__(self, line: str) -> None:
        """Log a line."""
        self._lines.append(line)
        log.info(line)

    def failed(self, build: Build, why: str) -> BuildError:
        """Say that a build failed."""
        said = "\n".join(self._lines)
        field = "target.image" if build.recipe.target else "target.dockerfile"
        return BuildError(f"image {build.reference} could not be built: {why}\n{said}", field=field)
