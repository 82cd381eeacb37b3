"""Append layers to an image in our repository: nothing is built, and only what is new is sent."""

from collections.abc import Callable, Sequence
from typing import Final

from manycpu.pipeline.adapters.registry import Repository, of_blob, of_bytes
from manycpu.pipeline.spec.image import Change, Image, Reference
from manycpu.pipeline.targets.kubernetes.image.layers import Tree
from manycpu.pipeline.targets.kubernetes.image.registries import Registries

__all__ = ["append", "tag_of"]

_DIGITS: Final = 12


def append(
    base: Reference,
    ours: Reference,
    trees: Sequence[Tree],
    change: Callable[[], Change],
    opened: Registries,
) -> tuple[str, bool]:
    """Append trees to an image and push it if it is missing; its name by digest, and whether it existed.

    Args:
        base: The image.
        ours: The repository to push to.
        trees: What is put upon it, which names the result.
        change: Makes what is put upon it; called when it is needed.
        opened: The registries.

    Raises:
        RegistryError: A registry refuses a call.
    """
    source, target = opened.repository(base), opened.repository(ours)
    image = source.pull(base.version)
    tag = tag_of(image.digest, trees)
    if digest := target.digest(tag):
        return str(ours.at(digest)), True
    if (base.registry, base.repository) != (ours.registry, ours.repository):
        _bring(image, source, target)
    new = change()
    for layer in new.layers:
        target.push(of_bytes(layer.content, layer.digest))
    return str(ours.at(_push(target, image.changed(new), tag))), False


def tag_of(base: str, trees: Sequence[Tree]) -> str:
    """Hash the digests of a base image and of the trees upon it into a tag."""
    parts = (base.removeprefix("sha256:"), *(tree.digest for tree in trees))
    return "-".join(part[:_DIGITS] for part in parts)


def _bring(image: Image, source: Repository, target: Repository) -> None:
    """Copy the base image into our repository, whole: under a tag of its own, which is pushed last."""
    tag = f"base-{image.digest.removeprefix('sha256:')[:_DIGITS]}"
    if target.digest(tag):
        return
    same = source.connection is target.connection
    for layer in image.layers:
        digest = layer["digest"]
        if target.has(digest) or (same and target.mount(digest, source.name)):
            continue
        target.push(of_blob(source, layer))
    _push(target, image, tag)


def _push(target: Repository, image: Image, tag: str) -> str:
    target.push(of_bytes(image.config_bytes, image.manifest["config"]["digest"]))
    return target.push_image(image, tag)
