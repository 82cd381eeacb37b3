"""Build on Kubernetes: the code becomes a layer of the training image, which pods name by digest."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from manycpu.pipeline.spec.placement import CODE
from manycpu.pipeline.targets.kubernetes.image import images, layers
from manycpu.pipeline.targets.program_code import code_of, installed_digest, program_of
from manycpu.pipeline.targets.results import Built

if TYPE_CHECKING:
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext

__all__ = ["build", "code_tree"]

_log = logging.getLogger(__name__)


def build(ctx: "ClusterContext") -> tuple[Built, bool]:
    """Push the training image with the program's code; return whether the registry had it already.

    Raises:
        BuildError: The image cannot be built or pushed.
        BadInputError: The folder contains more than code; or there is no registry to push to, and the image
            does not contain this code.
    """
    root, arguments = program_of(ctx)
    if root is None:
        image, reused = images.train(ctx, None)
        return Built(code=None, program=arguments, digest=installed_digest(), image=image), reused
    tree = code_tree(ctx, root, arguments)
    image, reused = images.train(ctx, tree)
    return Built(code=CODE, program=arguments, digest=tree.digest, image=image), reused


def code_tree(ctx: "ClusterContext", root: Path, program: tuple[str, ...]) -> layers.Tree:
    """Pack the code of a program's folder.

    Raises:
        BadInputError: The folder contains more than code.
        BuildError: A file of it cannot be read.
    """
    code = code_of(ctx, root, program)
    _log.info("the code: %s", code)
    return layers.code(code.location)
