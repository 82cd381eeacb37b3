"""Find or build the base image of a run: the user's finished image, or one from a Dockerfile.

On the worker, buildah or docker writes the image to an archive, which manycpu pushes. A builder pod pushes
the image itself.
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
    BUILD_TIMEOUT_S,
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

_LOOK_TIMEOUT_S: Final = 5.0  # for the look-up of the digest of a Dockerfile's base image


def finished_image(ctx: "ClusterContext", stage: Stage) -> Reference | None:
    """Return the finished image that the target names for a stage; None: it names none.

    If the target names no helper image, helper pods use the training image.
    """
    target = ctx.target
    if stage == "helper" and target.helper_image:
        return Reference.parse(target.helper_image, "target.helper_image")
    if target.image:
        return Reference.parse(target.image, "target.image")
    return None


def image(ctx: "ClusterContext", stage: Stage, opened: Registries) -> Reference:
    """Return the base image of a stage, with Python and the packages.

    This is the finished image that the target names, or else an image from a Dockerfile, which is built and
    pushed if the registry lacks it.

    Raises:
        BadInputError: The target names neither a finished image nor a registry to push one to.
        BuildError: The image cannot be built, or the registry lacks it after the build.
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
    """Return what to build for a stage, and the name of the image in ``push_repository``.

    The image's tag has a hash of all inputs. Nothing is built here.
    """
    build_recipe = recipe(ctx, stage)
    digests: dict[str, str] = {}  # base image -> its present digest; empty: the registry lacks the image
    with registries(ctx, deadline=_LOOK_TIMEOUT_S) as opened:
        for base_image, reference in build_recipe.references.items():
            try:
                present_digest = reference.digest or opened.repository(reference).digest(reference.version)
                digests[base_image] = present_digest or ""
            except RegistryError as error:  # leave out the digest: the tag then does not depend on it
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
    """Build an image with a program on this machine, and open the archive with the image.

    The archive and the program's own copy of the image are deleted at the end.

    Raises:
        BadInputError: The builder does not support the Dockerfile.
        BuildError: The build failed; the message has the build's last lines.
    """
    program, lines = ctx.target.builder, LastLines()
    # The folder has the registries' logins: only this user can read a temporary folder.
    with TemporaryDirectory(prefix="manycpu-build-") as folder, image_build.recipe.folder() as context:
        for name, content in access(ctx, image_build, opened).items():
            Path(folder, name).write_text(content)
        # Other processes may build the same image, and remove it at the end: each build has its own name.
        name = f"localhost/manycpu:{image_build.reference.tag}-{token_hex(4)}"
        place = Place(name, context, Path(folder))
        try:
            WORKERS[program].check(image_build.recipe)
            commands, env = WORKERS[program].commands(image_build, place)
            for command in commands:
                if code := follow(command, lines, timeout=BUILD_TIMEOUT_S, env=env):
                    raise lines.failed(image_build, f"{command[0]} {command[1]} ended with {code}")
        except LaunchError as error:
            raise lines.failed(image_build, error.message) from error
        finally:
            with suppress(LaunchError):  # the archive has the image: remove it from the program's storage
                run([program, "rmi", "--force", place.name], timeout=60)
        yield Archive(place.archive)
