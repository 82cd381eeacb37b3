"""Find or build the image under a run's own layers: the user's finished image, or one from a Dockerfile."""

from typing import TYPE_CHECKING, Final

from manycpu.pipeline.spec.errors import BadInputError, BuildError, RegistryError
from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.targets.kubernetes.image import builder_pod, builder_worker
from manycpu.pipeline.targets.kubernetes.image.build_inputs import Build, Recipe, Stage, log, recipe
from manycpu.pipeline.targets.kubernetes.image.builders import PODS
from manycpu.pipeline.targets.kubernetes.image.registries import Registries, own_repository, registries

if TYPE_CHECKING:
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext

__all__ = ["finished_image", "image", "plan"]

_LOOK: Final = 5.0  # seconds to look up the digest of a Dockerfile's base image


def finished_image(ctx: "ClusterContext", stage: Stage) -> Reference | None:
    """Return the target's finished image; helper pods use the training's if they have none of their own."""
    target = ctx.target
    if stage == "helper" and target.helper_image:
        return Reference.parse(target.helper_image, "target.helper_image")
    if target.image:
        return Reference.parse(target.image, "target.image")
    return None


def image(ctx: "ClusterContext", stage: Stage, opened: Registries) -> Reference:
    """Return the image with Python and the packages; build it if the registry lacks it.

    Raises:
        BadInputError: The target names neither a finished image nor a registry to push one to.
        BuildError: The image cannot be built.
    """
    if reference := finished_image(ctx, stage):
        return reference
    ours = own_repository(ctx)
    if ours is None:
        raise BadInputError(
            "there is neither a registry to push images to nor a finished image",
            field="target.registry",
            fix="Name a registry in target.registry, or an image in target.image",
        )
    build = plan(ctx, stage, ours)
    repository = opened.repository(ours)
    if repository.digest(build.reference.version) is None:
        log.info("building %s", build.reference)
        where = builder_pod if ctx.target.builder in PODS else builder_worker
        where.build(ctx, build, opened)
        if repository.digest(build.reference.version) is None:
            raise BuildError(
                f"{build.reference} was built, and the registry does not have it", field="target.builder"
            )
    return build.reference


def plan(ctx: "ClusterContext", stage: Stage, ours: Reference) -> Build:
    """Plan the build of an image, named by the hash of its inputs."""
    inputs = recipe(ctx, stage)
    digests = _digests(ctx, inputs)
    return Build(inputs, ours.at(inputs.tag(digests)), all(digests.get(base) for base in inputs.bases))


def _digests(ctx: "ClusterContext", inputs: Recipe) -> dict[str, str]:
    """Look up the current digests of the Dockerfile's base images; skip registries that do not answer."""
    digests = {}
    with registries(ctx, _LOOK) as opened:
        for base in inputs.bases:
            reference = Reference.parse(base, "target.build_args")
            try:
                digests[base] = (
                    reference.digest or opened.repository(reference).digest(reference.version) or ""
                )
            except RegistryError as error:
                log.warning("whether %s has changed cannot be seen from here: %s", base, error.message)
    return digests
