"""The images of a run: a base image that is seldom built, with layers for manycpu and the program's code.

Pushing these layers takes a second. An image's tag has the digests of its base, of manycpu and of the code:
an image that the registry has already is not pushed again. Pods name images by digest.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image import Change, Reference
from manycpu.pipeline.spec.placement import CODE, LIB
from manycpu.pipeline.targets.kubernetes.image import base_image
from manycpu.pipeline.targets.kubernetes.image.build_inputs import Stage
from manycpu.pipeline.targets.kubernetes.image.layers import Tree, append, library
from manycpu.pipeline.targets.kubernetes.image.registries import Registries, own_repository, registries

if TYPE_CHECKING:
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext

VERSION_LABEL: Final = "manycpu.version"
_LIB_LABEL, _CODE_LABEL = "manycpu.lib", "manycpu.code"
_DIGITS: Final = 12  # number of digits of a digest that a tag has


def helper(ctx: "ClusterContext") -> str:
    """Push the image of helper pods, with manycpu, unless the registry has it; return its name by digest.

    Raises:
        BuildError: The image cannot be built or pushed.
        RegistryError: A registry refuses a call.
        BadInputError: There is no registry to push to, and no finished image has this manycpu.
    """
    reference, _ = _image(ctx, "helper", [library()])  # _: whether the registry had it
    return reference


def train(ctx: "ClusterContext", code: Tree | None) -> tuple[str, bool]:
    """Push the image of training pods, unless the registry has it.

    Args:
        ctx: The run.
        code: The program's code; None: the program is in the image or in manycpu.

    Returns:
        The image's name by digest, and whether the registry had it already; True also for a finished image.

    Raises:
        BuildError: The image cannot be built or pushed.
        RegistryError: A registry refuses a call.
        BadInputError: There is no registry to push to, and no finished image has this manycpu and this code.
    """
    return _image(ctx, "train", [library(), *([code] if code else [])])


def _image(ctx: "ClusterContext", stage: Stage, trees: Sequence[Tree]) -> tuple[str, bool]:
    """Push a stage's image with these trees; return its name by digest, and whether the registry had it.

    Without a registry to push to, nothing is pushed: the finished image must have the trees already.
    """
    push_repository = own_repository(ctx)
    with registries(ctx) as opened:
        base = base_image.image(ctx, stage, opened)
        if push_repository is None:
            return _check_finished(ctx, base, trees, opened), True
        return append(base, push_repository, trees, change=lambda: change(trees), opened=opened)


def _check_finished(ctx: "ClusterContext", base: Reference, trees: Sequence[Tree], opened: Registries) -> str:
    """Return the name of a finished image; raise BadInputError if it lacks this manycpu or this code.

    The name is by digest, except with ``target.pull_policy: Never``: then it stays as the target has it.
    """
    needed_digests = {tree.digest[:_DIGITS] for tree in trees}  # shortened, as in a tag
    if ctx.target.pull_policy == "Never":  # only the nodes have the image: read the digests in its tag
        reference = base
        present_digests = set((base.tag or "").split("-"))  # a tag that `tag_of` built
    else:
        image = opened.repository(base).pull(base.version)
        reference = base.at(image.digest)
        present_digests = {image.labels.get(label, "")[:_DIGITS] for label in (_LIB_LABEL, _CODE_LABEL)}
    if needed_digests <= present_digests:
        return str(reference)
    raise BadInputError(
        f"{base} does not have this manycpu {version('manycpu')} with the present code in it, and there is "
        "no registry to push it to",
        field="target.registry",
        fix="Name a registry that takes pushes, or build the image again with `manycpu image`",
    )


def change(trees: Sequence[Tree]) -> Change:
    """Build what to append to an image: layers and settings for manycpu and, as the second tree, the code."""
    library_tree, *code_trees = trees
    labels = {VERSION_LABEL: version("manycpu"), _LIB_LABEL: library_tree.digest}
    for tree in code_trees:  # one, or none
        labels[_CODE_LABEL] = tree.digest
    return Change(
        layers=[tree.layer for tree in trees],
        env={"PYTHONPATH": LIB},
        labels=labels,
        working_folder=CODE if code_trees else None,  # None: that of the base image stays
    )
