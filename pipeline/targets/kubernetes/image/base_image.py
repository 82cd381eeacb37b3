"""Find or build the image under a run's own layers: the user's finished image, or one from a Dockerfile.

A program on the worker, buildah or docker, writes an archive that manycpu pushes; a pod pushes by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from manycpu.pipeline.adapters.archive import Archive
from manycpu.pipeline.adapters.commands import follow, run
from manycpu.pipeline.adapters.registry import of_bytes
from manycpu.pipeline.spec.errors import BadInputError, BuildError, LaunchError, RegistryError
from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.targets.kubernetes.image import builder_pod
from manycpu.pipeline.targets.kubernetes.image.build_inputs import (
    TIMEOUT,
    Build,
    LastLines,
    Stage,
    log,
    recipe,
)
from manycpu.pipeline.targets.kubernetes.image.builders import PODS, WORKERS, Place, access
from manycpu.pipeline.targets.kubernetes.image.registries import Registries, own_repository, registries

if TYPE_CHECKING:
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext

_LOOK_TIMEOUT_S: Final = 5.0  # to look up the digest of a Dockerfile's base image


def finished_image(ctx: "ClusterContext", stage: Stage) -> Reference | None:
    """Return the finished image that the target names for a stage; None: it names none.

    Without an image of their own, helper pods use the training's.
    """
    target = ctx.target
    if stage == "helper" and target.helper_image:
        return Reference.parse(target.helper_image, "target.helper_image")
    if target.image:
        return Reference.parse(target.image, "target.image")
    return None


def image(ctx: "ClusterContext", stage: Stage, opened: Registries) -> Reference:
    """Return the base image of a stage, with Python and the packages; build it if the registry lacks it.

    It is the finished image that the target names, or else one from a Dockerfile.

    Raises:
        BadInputError: The target names neither a finished image nor a registry to push one to.
        BuildError: The image cannot be built.
    """
    if reference := finished_image(ctx, stage):
        return reference
    push_repository = own_repository(ctx)
    if push_repository is None:
        raise BadInputError(
            "there is neither a registry to push images to nor a finished image",
            field="target.registry",
            fix="Name a registry in target.registry, or an image in target.image",
        )
    build = plan(ctx, stage, push_repository)
    repository = opened.repository(push_repository)
    if repository.digest(build.reference.version) is None:  # the registry has no image with this tag
        log.info("building %s", build.reference)
        build_and_push = builder_pod.build if ctx.target.builder in PODS else _build_here
        build_and_push(ctx, build, opened)
        if repository.digest(build.reference.version) is None:
            raise BuildError(
                f"{build.reference} was built, and the registry does not have it", field="target.builder"
            )
    return build.reference


def plan(ctx: "ClusterContext", stage: Stage, push_repository: Reference) -> Build:
    """Return the image to build for a stage, in a repository; its tag has a hash of all inputs."""
    build_recipe = recipe(ctx, stage)
    digests: dict[str, str] = {}  # base image -> its present digest, part of the hash; empty: it has none
    with registries(ctx, deadline=_LOOK_TIMEOUT_S) as opened:
        for base_image, reference in build_recipe.references.items():
            try:
                present_digest = reference.digest or opened.repository(reference).digest(reference.version)
                digests[base_image] = present_digest or ""
            except RegistryError as error:  # the tag then does not depend on its digest
                log.warning("whether %s has changed cannot be seen from here: %s", base_image, error.message)
    from_registry = all(digests.get(base_image) for base_image in build_recipe.bases)
    return Build(build_recipe, push_repository.at(build_recipe.tag(digests)), from_registry)


def _build_here(ctx: "ClusterContext", image_build: Build, opened: Registries) -> None:
    """Build an image with a program on this machine, and push it: its layers first, its manifest last."""
    with archived(ctx, image_build, opened) as archive:
        image = archive.image
        repository = opened.repository(image_build.reference)
        for layer in image.layers:
            repository.push(archive.content(layer))
        repository.push(of_bytes(image.config_bytes, image.manifest["config"]["digest"]))
        repository.push_image(image, image_build.reference.version)


@contextmanager
def archived(ctx: "ClusterContext", image_build: Build, opened: Registries) -> Iterator[Archive]:
    """Build an image with a program on this machine, and open the archive with it.

    Raises:
        BadInputError: The builder does not support the Dockerfile.
        BuildError: The build failed; the message has its last lines.
    """
    program, lines = ctx.target.builder, LastLines()
    # Only this user can read the folder, which has the registries' logins.
    with TemporaryDirectory(prefix="manycpu-build-") as folder, image_build.recipe.folder() as context:
        for name, content in access(ctx, image_build, opened).items():
            Path(folder, name).write_text(content)
        # A name of its own: other processes may build the same image, and the first to end removes its own.
        name = f"localhost/manycpu:{image_build.reference.tag}-{token_hex(4)}"
        place = Place(name, context, Path(folder))
        try:
            WORKERS[program].check(image_build.recipe)
            commands, env = WORKERS[program].commands(image_build, place)
            for command in commands:
                if code := follow(command, lines, timeout=TIMEOUT, env=env):
                    raise lines.failed(image_build, f"{command[0]} {command[1]} ended with {code}")
        except LaunchError as error:
            raise lines.failed(image_build, error.message) from error
        finally:
            with suppress(LaunchError):  # the archive has the image: remove it from the program's storage
                run([program, "rmi", "--force", place.name], timeout=60)
        yield Archive(place.archive)
