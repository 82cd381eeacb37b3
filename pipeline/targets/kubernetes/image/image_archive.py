"""Write a run's image to a file, for clusters without a registry: nodes load it, and pods name its tag."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from manycpu.pipeline.adapters import archive
from manycpu.pipeline.adapters.registry import Content, of_blob, of_bytes
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image import Image, Reference
from manycpu.pipeline.targets.kubernetes.build import code_tree
from manycpu.pipeline.targets.kubernetes.image import base_image, builder_worker
from manycpu.pipeline.targets.kubernetes.image.append_layers import tag_of
from manycpu.pipeline.targets.kubernetes.image.builders import PODS
from manycpu.pipeline.targets.kubernetes.image.images import change
from manycpu.pipeline.targets.kubernetes.image.layers import library
from manycpu.pipeline.targets.kubernetes.image.registries import Registries, registries
from manycpu.pipeline.targets.program_code import program_of

if TYPE_CHECKING:
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext

__all__ = ["save"]

_HERE = Reference("manycpu.local", "train")


def save(ctx: "ClusterContext", file: Path) -> str:
    """Write the training image, with manycpu and the code, as an OCI archive; return the image's name.

    Raises:
        BadInputError: The target's builder is a pod, which can only push to a registry.
        BuildError: The image cannot be built.
    """
    root, program = program_of(ctx)
    trees = [library(), *([code_tree(ctx, root, program)] if root else [])]
    with registries(ctx) as opened, _base(ctx, opened) as (base, layers):
        new = change(trees)
        name = str(_HERE.at(tag_of(base.digest, trees)))
        mine = [of_bytes(layer.content, layer.digest) for layer in new.layers]
        archive.write(file, name, base.changed(new), [*layers, *mine])
    return name


@contextmanager
def _base(ctx: "ClusterContext", opened: Registries) -> Iterator[tuple[Image, Sequence[Content]]]:
    """Open the image with Python and the packages: the user's, or one that is built on this machine."""
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
    with builder_worker.archived(ctx, base_image.plan(ctx, "train", _HERE), opened) as built:
        yield built.image, [built.content(layer) for layer in built.image.layers]
