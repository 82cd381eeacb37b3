"""The image that a run's own layers go upon."""

from typing import TYPE_CHECKING, Literal

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image import Reference

if TYPE_CHECKING:
    from manycpu.pipeline.verbs.context import ClusterContext

__all__ = ["Stage", "image"]

Stage = Literal["helper", "train"]


def image(ctx: "ClusterContext", stage: Stage) -> Reference:
    """Name the image with Python and the packages: the one given.

    Raises:
        BadInputError: None is given.
    """
    target = ctx.target
    if stage == "helper" and target.helper_image:
        return Reference.parse(target.helper_image, "target.helper_image")
    if target.image:
        return Reference.parse(target.image, "target.image")
    raise BadInputError(
        "no image is given", field="target.image", fix="Name one with torch and manycpu's packages"
    )
