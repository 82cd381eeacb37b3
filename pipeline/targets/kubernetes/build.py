"""Build on Kubernetes: add the code as a layer to the training image, and push the image or save it."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.archive import write as write_archive
from manycpu.pipeline.adapters.registry import Content, of_blob, of_bytes
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image import Image, Reference
from manycpu.pipeline.spec.placement import CODE
from manycpu.pipeline.targets.context import Built
from manycpu.pipeline.targets.kubernetes.image import base_image, images, layers
from manycpu.pipeline.targets.kubernetes.image.builders import PODS
from manycpu.pipeline.targets.kubernetes.image.registries import Registries, registries
from manycpu.pipeline.targets.program_code import code_of, installed_digest, program_of

if TYPE_CHECKING:
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext

_log = logging.getLogger(__name__)
_LOCAL_IMAGE = Reference("manycpu.local", "train")  # name of an image that is in no registry


def build(ctx: "ClusterContext") -> tuple[Built, bool]:
    """Push the training image with the program's code, unless the registry has it already.

    Returns:
        What was built, and whether the registry had the image already.

    Raises:
        BuildError: The image cannot be built or pushed.
        BadInputError: The program's folder contains more than code; or there is no registry to push to, and
            the finished image lacks this code.
    """
    root, program = program_of(ctx)
    tree = code_tree(ctx, root, program) if root else None
    image, reused = images.train(ctx, tree)
    digest = tree.digest if tree else installed_digest()
    return Built(code=CODE if tree else None, program=program, digest=digest, image=image), reused


def code_tree(ctx: "ClusterContext", root: Path, program: tuple[str, ...]) -> layers.Tree:
    """Pack the code in a program's folder ``root`` as a layer of an image, and log a summary of its files."""
    code = code_of(ctx, root, program)
    _log.info("the code: %s", code)
    return layers.code(code.location)


def save_image(ctx: "ClusterContext", archive: Path) -> str:
    """Write the training image, with manycpu and the code, as an OCI archive; return the image's name.

    This is for clusters without a registry: nodes load the file, and pods name its tag.

    Raises:
        BadInputError: The target's builder is a pod, which can only push to a registry; or ``archive`` is a
            folder, or its folder does not exist.
        BuildError: The image cannot be built.
        OSError: No file can be written to the archive's folder.
    """
    problem = ""
    if archive.is_dir():
        problem = "is a folder"
    elif not archive.parent.is_dir():
        problem = "is in no folder that exists"
    if problem:
        raise BadInputError(f"{archive} {problem}", field="--archive", fix="Give a file in a folder")
    disk.try_out(archive)  # raises OSError now, and not after a build that takes minutes
    root, program = program_of(ctx)
    trees = [layers.library(), *([code_tree(ctx, root, program)] if root else [])]
    with registries(ctx) as opened, _base(ctx, opened) as (base, contents):
        additions = images.change(trees)  # the layers and settings that are added to the base
        name = str(_LOCAL_IMAGE.at(layers.tag_of(base.digest, trees)))
        new_contents = [of_bytes(layer.content, layer.digest) for layer in additions.layers]
        write_archive(archive, name, base.changed(additions), [*contents, *new_contents])
    return name


@contextmanager
def _base(ctx: "ClusterContext", opened: Registries) -> Iterator[tuple[Image, Sequence[Content]]]:
    """Open the base image, with Python and the packages, and the contents of its layers.

    This is the finished image that the target names, or else one that is built on this machine.

    Raises:
        BadInputError: The target's builder is a pod, and it names no finished image.
    """
    if reference := base_image.finished_image(ctx, "train"):
        source = opened.repository(reference)
        image = source.pull(reference.version)
        yield image, [of_blob(source, layer) for layer in image.layers]
        return
    if ctx.target.builder in PODS:
        raise BadInputError(
            "what a pod builds goes to a registry, not into a file",
            field="target.builder",
            fix="Set target.builder to buildah or docker, or name an image in target.image",
        )
    image_build = base_image.plan(ctx, "train", _LOCAL_IMAGE)
    with base_image.archived(ctx, image_build, opened) as built:
        yield built.image, [built.content(layer) for layer in built.image.layers]
