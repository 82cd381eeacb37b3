"""The images of a run: what is built rarely, and upon it, pushed in a second, manycpu and the program's code.

An image's tag is the hash of its base, of manycpu, and of the code: what is there is not pushed again. Pods
name images by digest.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image import Change, Reference
from manycpu.pipeline.spec.placement import CODE, LIB
from manycpu.pipeline.targets.kubernetes.image import base_image
from manycpu.pipeline.targets.kubernetes.image.append_layers import append
from manycpu.pipeline.targets.kubernetes.image.build_inputs import Stage
from manycpu.pipeline.targets.kubernetes.image.layers import Tree, library
from manycpu.pipeline.targets.kubernetes.image.registries import Registries, own_repository, registries

if TYPE_CHECKING:
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext

__all__ = ["VERSION_LABEL", "change", "helper", "train"]

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


def _image(ctx: "ClusterContext", stage: Stage, trees: Sequence[Tree]) -> tuple[str, bool]:
    ours = own_repository(ctx)
    with registries(ctx) as opened:
        base = base_image.image(ctx, stage, opened)
        if ours is None:
            return _finished(ctx, base, trees, opened), True
        return append(base, ours, trees, lambda: change(trees), opened)


def _finished(ctx: "ClusterContext", base: Reference, trees: Sequence[Tree], opened: Registries) -> str:
    """Check that a finished image has this very manycpu and code in it; its name."""
    digests = {tree.digest[:_DIGITS] for tree in trees}
    if ctx.target.pull_policy == "Never":  # on the nodes, and nowhere else: only its tag can be asked
        present, reference = set((base.tag or "").split("-")), base
    else:
        image = opened.repository(base).pull(base.version)
        labels = (image.labels.get(name, "") for name in (_LIB_LABEL, _CODE_LABEL))
        present, reference = {digest[:_DIGITS] for digest in labels}, base.at(image.digest)
    if digests <= present:
        return str(reference)
    raise BadInputError(
        f"{base} does not have this manycpu {version('manycpu')} with the present code in it, and there is "
        "no registry to push it to",
        field="target.registry",
        fix="Name a registry that takes pushes, or make the image anew with `manycpu image`",
    )


def change(trees: Sequence[Tree]) -> Change:
    """Build what is put upon an image: manycpu, and the code where there is one."""
    labels = dict(zip((_LIB_LABEL, _CODE_LABEL), (tree.digest for tree in trees), strict=False))
    return Change(
        layers=[tree.layer for tree in trees],
        env={"PYTHONPATH": LIB},
        labels={VERSION_LABEL: version("manycpu"), **labels},
        working_folder=CODE if _CODE_LABEL in labels else None,
    )
