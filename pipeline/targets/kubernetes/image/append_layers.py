"""Append layers to an image in the run's repository; only blobs that the registry lacks are pushed."""

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
    """Append trees to an image, and push the result unless the registry has it.

    Args:
        base: The image.
        ours: The repository to push to.
        trees: The files to append; their digests are part of the result's tag.
        change: Builds the layers and settings to append; called only if the registry lacks the result.
        opened: The run's registries.

    Returns:
        The result's name by digest, and whether the registry had it already.

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
    """Build a tag from the first digits of the digests of a base image and of the trees on it."""
    parts = (base.removeprefix("sha256:"), *(tree.digest for tree in trees))
    return "-".join(part[:_DIGITS] for part in parts)


def _bring(image: Image, source: Repository, target: Repository) -> None:
    """Copy the whole base image to the run's repository; its own tag is pushed last."""
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
