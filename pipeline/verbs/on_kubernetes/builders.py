"""Building on the worker, with buildah or docker; and what every builder is given of the registries."""

import json
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final, NamedTuple

from manycpu.pipeline.adapters import process
from manycpu.pipeline.adapters.archive import Archive
from manycpu.pipeline.adapters.registry import of_bytes
from manycpu.pipeline.spec.errors import BuildError, LaunchError
from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.verbs.on_kubernetes.recipe import Recipe
from manycpu.pipeline.verbs.on_kubernetes.registries import Registries

if TYPE_CHECKING:
    from manycpu.pipeline.verbs.context import ClusterContext

__all__ = ["TIMEOUT", "Build", "LastLines", "access", "archived", "build_here", "log"]

TIMEOUT: Final = 3600.0  # seconds for a build
log: Final = logging.getLogger("manycpu.build")
_LINES: Final = 30


class Build(NamedTuple):
    """An image to build, and where it goes."""

    recipe: Recipe
    reference: Reference
    """The image's name, with its tag."""

    @property
    def options(self) -> list[str]:
        """What docker and buildah alike are told of the recipe."""
        arguments = [
            word for name, value in self.recipe.arguments for word in ("--build-arg", f"{name}={value}")
        ]
        return [*(("--target", self.recipe.target) if self.recipe.target else ()), *arguments]


class LastLines:
    """Logs lines, and keeps the last for an error."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)

    def __call__(self, line: str) -> None:
        """Log a line."""
        self._lines.append(line)
        log.info(line)

    def failed(self, build: Build, why: str) -> BuildError:
        """Say that a build failed."""
        said = "\n".join(self._lines)
        field = "target.image" if build.recipe.target else "target.dockerfile"
        return BuildError(f"image {build.reference} could not be built: {why}\n{said}", field=field)


def access(ctx: "ClusterContext", build: Build, opened: Registries) -> dict[str, str]:
    """Write what a builder must know to reach the registries of a build: file name -> content.

    `config.json` has the logins, `registries.conf` says what speaks plain HTTP, `ca.crt` is the authority.
    """
    names = [Reference.parse(base, "target.build_args") for base in build.recipe.bases]
    hosts = {reference.registry: reference for reference in (*names, build.reference)}
    auths: dict[str, object] = {}
    for host in sorted(hosts):
        if login := opened.login(host):
            auths |= login.as_config(host)["auths"]
    plain = [host for host, name in hosts.items() if opened.repository(name).connection.plain]
    files = {"config.json": json.dumps({"auths": auths}), "registries.conf": _conf(plain)}
    if ctx.target.registry_ca:
        files["ca.crt"] = Path(ctx.target.registry_ca).read_text()
    return files


def _conf(plain: Sequence[str]) -> str:
    lines = ['unqualified-search-registries = ["docker.io"]']
    for host in plain:
        lines += ["[[registry]]", f'location = "{host}"', "insecure = true"]
    return "\n".join((*lines, ""))


def build_here(ctx: "ClusterContext", build: Build, opened: Registries) -> None:
    """Build with buildah or docker on this machine, and push.

    Raises:
        BuildError: It failed; the message has its last lines.
        RegistryError: A registry refuses a call.
    """
    with archived(ctx, build, opened) as archive:
        image, target = archive.image, opened.repository(build.reference)
        for layer in image.layers:
            target.push(archive.content(layer))
        target.push(of_bytes(image.config_bytes, image.manifest["config"]["digest"]))
        target.push_image(image, build.reference.version)


@contextmanager
def archived(ctx: "ClusterContext", build: Build, opened: Registries) -> Iterator[Archive]:
    """Build with buildah or docker on this machine, and have the image as a file.

    Raises:
        BuildError: It failed; the message has its last lines.
    """
    with _files(ctx, build, opened) as known, build.recipe.folder() as context:
        name, file = f"localhost/manycpu:{build.reference.tag}", known / "image.tar"
        commands, env = _BUILDERS[ctx.target.builder](build, name, context, known)
        last = [ctx.target.builder, "rmi", "--force", name]
        _run(build, commands, last, env)
        yield Archive(file)


Commands = tuple[list[list[str]], dict[str, str]]


def _buildah(build: Build, name: str, context: Path, known: Path) -> Commands:
    env = {
        "REGISTRY_AUTH_FILE": str(known / "config.json"),
        "CONTAINERS_REGISTRIES_CONF": str(known / "registries.conf"),
        "BUILDAH_ISOLATION": "chroot",
    }
    certificates = ["--cert-dir", str(known)] if (known / "ca.crt").exists() else []
    make = ["buildah", "bud", "--format", "oci", *certificates, *build.options, "-t", name, str(context)]
    return [make, ["buildah", "push", "--quiet", name, f"oci-archive:{known / 'image.tar'}"]], env


def _docker(build: Build, name: str, context: Path, known: Path) -> Commands:
    env = {"DOCKER_BUILDKIT": "1"}
    if json.loads((known / "config.json").read_text())["auths"]:
        env["DOCKER_CONFIG"] = str(known)
    make = ["docker", "build", "--progress", "plain", *build.options, "-t", name, str(context)]
    return [make, ["docker", "save", "-o", str(known / "image.tar"), name]], env


_BUILDERS: Final = {"buildah": _buildah, "docker": _docker}


@contextmanager
def _files(ctx: "ClusterContext", build: Build, opened: Registries) -> Iterator[Path]:
    """Have what a builder must know in a folder that only this user can read."""
    with TemporaryDirectory(prefix="manycpu-build-") as folder:
        for name, content in access(ctx, build, opened).items():
            Path(folder, name).write_text(content)
        yield Path(folder)


def _run(
    build: Build, commands: Sequence[Sequence[str]], last: Sequence[str], env: Mapping[str, str]
) -> None:
    lines = LastLines()
    try:
        for command in commands:
            if code := process.follow(command, lines, timeout=TIMEOUT, env=env):
                raise lines.failed(build, f"{command[0]} {command[1]} ended with {code}")
    except LaunchError as error:
        raise lines.failed(build, error.message) from error
    finally:
        with suppress(LaunchError):
            process.run(last, timeout=60)
