"""The images of a run: what is built rarely, and upon it, pushed in a second, manycpu and the program's code.

An image's tag is the hash of its base, of manycpu, and of the code: what is there is not pushed again. Pods
name images by digest.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from manycpu.pipeline.adapters.registry import Repository, of_blob, of_bytes
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image import Change, Image, Reference
from manycpu.pipeline.verbs.on_kubernetes import dependencies
from manycpu.pipeline.verbs.on_kubernetes.layers import CODE, LIB, Tree, library
from manycpu.pipeline.verbs.on_kubernetes.registries import Registries, own_repository, registries

if TYPE_CHECKING:
    from manycpu.pipeline.verbs.context import ClusterContext

__all__ = ["VERSION_LABEL", "helper", "train"]

VERSION_LABEL: Final = "manycpu.version"
_LIB_LABEL, _CODE_LABEL = "manycpu.lib", "manycpu.code"
_DIGITS: Final = 12


def helper(ctx: "ClusterContext") -> str:
    """Name the image of helper pods, by digest: manycpu without torch.

    Raises:
        BuildError: It cannot be built or pushed.
        RegistryError: A registry refuses a call.
        BadInputError: There is no registry, and the image is of another manycpu.
    """
    reference, _ = _image(ctx, "helper", [library()])
    return reference


def train(ctx: "ClusterContext", code: Tree | None) -> tuple[str, bool]:
    """Name the image of training pods, by digest, with the code in it; whether it was there before.

    Args:
        ctx: The run.
        code: The program's code; None where the program is in the image or in manycpu.

    Raises:
        BuildError: It cannot be built or pushed.
        RegistryError: A registry refuses a call.
        BadInputError: There is no registry, and the image is of another manycpu or has not this code.
    """
    return _image(ctx, "train", [library(), *([code] if code else [])])


def _image(ctx: "ClusterContext", stage: dependencies.Stage, trees: Sequence[Tree]) -> tuple[str, bool]:
    ours = own_repository(ctx)
    with registries(ctx) as opened:
        base = dependencies.image(ctx, stage)
        if ours is None:
            return _finished(ctx, base, trees, opened), True
        return _appended(base, ours, trees, opened)


def _appended(
    base: Reference, ours: Reference, trees: Sequence[Tree], opened: Registries
) -> tuple[str, bool]:
    source, target = opened.repository(base), opened.repository(ours)
    image = source.pull(base.version)
    tag = tag_of(image.digest, trees)
    if there := target.digest(tag):
        return str(ours.at(there)), True
    if base.repository != ours.repository or base.registry != ours.registry:
        _bring(image, source, target)
    changed = image.changed(_change(trees))
    for tree in trees:
        target.push(of_bytes(tree.layer.content, tree.layer.digest))
    digest = _push(target, changed, tag)
    return str(ours.at(digest)), False


def tag_of(base: str, trees: Sequence[Tree]) -> str:
    """Name an image by what it is made of: its base's digest, and those of the trees upon it."""
    parts = (base.removeprefix("sha256:"), *(tree.digest for tree in trees))
    return "-".join(part[:_DIGITS] for part in parts)


def _finished(ctx: "ClusterContext", base: Reference, trees: Sequence[Tree], opened: Registries) -> str:
    """Take an image as it is, if it has this very manycpu and code in it."""
    wanted = {tree.digest[:_DIGITS] for tree in trees}
    if ctx.target.pull_policy == "Never":  # on the nodes, and nowhere else: only its tag can be asked
        found, reference = set((base.tag or "").split("-")), base
    else:
        image = opened.repository(base).pull(base.version)
        labels = (image.labels.get(name, "") for name in (_LIB_LABEL, _CODE_LABEL))
        found, reference = {digest[:_DIGITS] for digest in labels}, base.at(image.digest)
    if wanted <= found:
        return str(reference)
    raise BadInputError(
        f"{base} does not have this manycpu {version('manycpu')} with the present code in it, and there is "
        "no registry to push it to",
        field="target.registry",
        fix="Name a registry that takes pushes, or make the image anew with `manycpu image`",
    )


def _change(trees: Sequence[Tree]) -> Change:
    labels = dict(zip((_LIB_LABEL, _CODE_LABEL), (tree.digest for tree in trees), strict=False))
    return Change(
        layers=[tree.layer for tree in trees],
        env={"PYTHONPATH": LIB},
        labels={VERSION_LABEL: version("manycpu"), **labels},
        working_folder=CODE if _CODE_LABEL in labels else None,
    )


def _bring(image: Image, source: Repository, target: Repository) -> None:
    """Have the base in our repository, whole: under a tag of its own, which is pushed last."""
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
