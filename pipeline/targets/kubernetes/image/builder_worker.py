"""Build images on the worker with buildah or docker, as an archive file that manycpu pushes."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from manycpu.pipeline.adapters.archive import Archive
from manycpu.pipeline.adapters.commands import follow, run
from manycpu.pipeline.adapters.registry import of_bytes
from manycpu.pipeline.spec.errors import LaunchError
from manycpu.pipeline.targets.kubernetes.image.build_inputs import TIMEOUT, Build, LastLines
from manycpu.pipeline.targets.kubernetes.image.builders import WORKERS, Place, access
from manycpu.pipeline.targets.kubernetes.image.registries import Registries

if TYPE_CHECKING:
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext

__all__ = ["archived", "build"]


def build(ctx: "ClusterContext", image_build: Build, opened: Registries) -> None:
    """Build an image with a program on this machine, and push it.

    Raises:
        BadInputError: The builder does not support the Dockerfile.
        BuildError: The build failed; the message has its last lines.
        RegistryError: A registry refuses a call.
    """
    with archived(ctx, image_build, opened) as archive:
        image, target = archive.image, opened.repository(image_build.reference)
        for layer in image.layers:
            target.push(archive.content(layer))
        target.push(of_bytes(image.config_bytes, image.manifest["config"]["digest"]))
        target.push_image(image, image_build.reference.version)


@contextmanager
def archived(ctx: "ClusterContext", image_build: Build, opened: Registries) -> Iterator[Archive]:
    """Build an image with a program on this machine, and open the archive with it.

    Raises:
        BadInputError: The builder does not support the Dockerfile.
        BuildError: The build failed; the message has its last lines.
    """
    with _files(ctx, image_build, opened) as folder, image_build.recipe.folder() as context:
        place = Place(f"localhost/manycpu:{image_build.reference.tag}", context, folder)
        _run(ctx.target.builder, image_build, place)
        yield Archive(place.archive)


@contextmanager
def _files(ctx: "ClusterContext", image_build: Build, opened: Registries) -> Iterator[Path]:
    """Write the registries' logins and settings to a folder that only this user can read."""
    with TemporaryDirectory(prefix="manycpu-build-") as folder:
        for name, content in access(ctx, image_build, opened).items():
            Path(folder, name).write_text(content)
        yield Path(folder)


def _run(program: str, image_build: Build, place: Place) -> None:
    builder, lines = WORKERS[program], LastLines()
    try:
        builder.check(image_build.recipe)
        commands, env = builder.commands(image_build, place)
        for command in commands:
            if code := follow(command, lines, timeout=TIMEOUT, env=env):
                raise lines.failed(image_build, f"{command[0]} {command[1]} ended with {code}")
    except LaunchError as error:
        raise lines.failed(image_build, error.message) from error
    finally:
        with suppress(LaunchError):
            run([program, "rmi", "--force", place.name], timeout=60)
