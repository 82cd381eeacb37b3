"""The builders of images, by the names of `target.builder`: all in which one differs from another."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from manycpu.pipeline.adapters.registry_login import has_buildkit, write_docker_settings
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image import Reference, needs_buildkit
from manycpu.pipeline.targets.kubernetes.image.build_inputs import Build, Recipe
from manycpu.pipeline.targets.kubernetes.image.registries import Registries

if TYPE_CHECKING:
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext

__all__ = ["ACCESS", "CERTIFICATE", "CONTEXT", "PODS", "WORKERS", "InPod", "OnWorker", "Place", "access"]

ACCESS: Final = "/run/manycpu"
"""Where a pod has the files of :func:`access`."""
CONTEXT: Final = "/opt/manycpu/build"
"""Where a pod has the build's context."""
CERTIFICATE: Final = "ca.crt"
Commands = tuple[list[list[str]], dict[str, str]]
"""What to run, and the environment that it needs."""
Settings = Callable[[Sequence[str], Sequence[str]], dict[str, str]]
"""Writes a builder's file on registries: those that speak plain HTTP, and those of the target's authority."""


class Place(NamedTuple):
    """Where a worker builds: the image's name, its context, and the folder of logins."""

    name: str
    """The image's name until it is pushed."""
    context: Path
    access_folder: Path
    """The folder with the files of :func:`access`."""

    @property
    def archive(self) -> Path:
        """The file with the built image."""
        return self.access_folder / "image.tar"


class OnWorker(NamedTuple):
    """A builder on the worker, which leaves the image in a file."""

    settings: Settings
    commands: Callable[[Build, Place], Commands]
    check: Callable[[Recipe], None] = lambda _: None
    """Raises BadInputError where the program does not build such a Dockerfile."""


class InPod(NamedTuple):
    """A builder in a pod, which pushes the image itself."""

    image: str
    """The image with the builder, where the target gives none."""
    level: Literal["baseline", "privileged"]
    """The Pod Security level that takes the pod."""
    settings: Settings
    script: str
    """Gets the image's name and the options."""
    options: Callable[[Recipe], list[str]]
    env: Mapping[str, str]
    security: Mapping[str, Any]
    """The container's securityContext."""
    storage: str
    """Folder that is to be a volume."""
    readable: int
    """Mode of the files of :func:`access`, which are root's."""


def access(ctx: "ClusterContext", build: Build, opened: Registries) -> dict[str, str]:
    """Build the files that a builder reaches registries with: file name -> content.

    `config.json` has the logins, `ca.crt` is the authority; a file of the builder's own says how to ask whom.
    """
    names = [Reference.parse(base, "target.build_args") for base in build.recipe.bases]
    hosts = {reference.registry: reference for reference in (*names, build.reference)}
    auths: dict[str, object] = {}
    for host in sorted(hosts):
        if login := opened.login(host):
            auths |= login.as_config(host)["auths"]
    plain = [host for host, name in hosts.items() if opened.repository(name).connection.plain]
    files = {"config.json": json.dumps({"auths": auths})}
    if ctx.target.registry_ca:
        files[CERTIFICATE] = Path(ctx.target.registry_ca).read_text()
    trusted = [host for host in hosts if CERTIFICATE in files and host == opened.own and host not in plain]
    return files | BUILDERS[ctx.target.builder].settings(plain, trusted)


def _of_buildah(plain: Sequence[str], _: Sequence[str]) -> dict[str, str]:
    lines = ['unqualified-search-registries = ["docker.io"]']
    for host in plain:
        lines += ["[[registry]]", f'location = "{host}"', "insecure = true"]
    return {"registries.conf": "\n".join((*lines, ""))}


def _of_buildkit(plain: Sequence[str], trusted: Sequence[str]) -> dict[str, str]:
    secure = f'http = false\nca = ["{ACCESS}/{CERTIFICATE}"]'
    settings = dict.fromkeys(plain, "http = true") | dict.fromkeys(trusted, secure)
    return {"buildkitd.toml": "".join(f'[registry."{host}"]\n{how}\n' for host, how in settings.items())}


def _of_docker(_: Sequence[str], __: Sequence[str]) -> dict[str, str]:
    return {}  # its daemon's, which no client can change


def _options(recipe: Recipe) -> list[str]:
    """Build the options that docker and buildah have in common."""
    arguments = [word for name, value in recipe.arguments for word in ("--build-arg", f"{name}={value}")]
    return [*(("--target", recipe.target) if recipe.target else ()), *arguments]


def _buildkit_options(recipe: Recipe) -> list[str]:
    words = [f"target={recipe.target}"] if recipe.target else []
    words += [f"build-arg:{name}={value}" for name, value in recipe.arguments]
    return [part for word in words for part in ("--opt", word)]


def _buildah(build: Build, place: Place) -> Commands:
    env = {
        "REGISTRY_AUTH_FILE": str(place.access_folder / "config.json"),
        "CONTAINERS_REGISTRIES_CONF": str(place.access_folder / "registries.conf"),
        "BUILDAH_ISOLATION": "chroot",
    }
    trusted = ["--cert-dir", str(place.access_folder)] if (place.access_folder / CERTIFICATE).exists() else []
    make = ["buildah", "bud", "--format", "oci", *trusted, *_options(build.recipe), "-t", place.name]
    save = ["buildah", "push", "--quiet", place.name, f"oci-archive:{place.archive}"]
    return [[*make, str(place.context)], save], env


def _docker(build: Build, place: Place) -> Commands:
    settings = place.access_folder / "docker"
    write_docker_settings(settings, json.loads((place.access_folder / "config.json").read_text())["auths"])
    # An attestation would make the image an index of several.
    env = {"DOCKER_CONFIG": str(settings), "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    if buildkit := has_buildkit():
        env["DOCKER_BUILDKIT"] = "1"
    options = _options(build.recipe)
    if build.from_registry:
        options.append("--pull")  # what docker has by that name may be older
    if not buildkit:
        options.append("--force-rm")  # BuildKit leaves no containers, and knows no such option
    make = ["docker", "build", *options, "-t", place.name, str(place.context)]
    return [make, ["docker", "save", "-o", str(place.archive), place.name]], env


def _check_docker(recipe: Recipe) -> None:
    if needs_buildkit(recipe.text) and not has_buildkit():
        raise BadInputError(
            "the Dockerfile needs BuildKit, and docker on this machine builds without it",
            field="target.builder",
            fix="Install docker's component buildx (and unset DOCKER_BUILDKIT=0), or set target.builder to "
            "buildah or pod",
        )


WORKERS: Final[Mapping[str, OnWorker]] = {
    "buildah": OnWorker(_of_buildah, _buildah),
    "docker": OnWorker(_of_docker, _docker, _check_docker),
}

PODS: Final[Mapping[str, InPod]] = {
    "pod": InPod(
        image="quay.io/buildah/stable:latest",
        level="baseline",
        settings=_of_buildah,
        # Overlay where the node's kernel lets a user namespace mount it; vfs, which copies, where not.
        script=f"""
set -eu
name=$1; shift
export STORAGE_DRIVER=overlay
buildah info >/dev/null 2>&1 || STORAGE_DRIVER=vfs
echo "$(buildah --version), storage $STORAGE_DRIVER"
trust=
[ ! -e {ACCESS}/{CERTIFICATE} ] || trust="--cert-dir {ACCESS}"
buildah bud --format oci $trust "$@" -t "$name" {CONTEXT}
buildah push --quiet $trust "$name" "docker://$name"
""",
        options=_options,
        env={
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_REGISTRIES_CONF": f"{ACCESS}/registries.conf",
            "REGISTRY_AUTH_FILE": f"{ACCESS}/config.json",
            "TMPDIR": "/var/lib/containers",
        },
        # root of a user namespace that buildah makes itself: it needs what containers have by default.
        security={"runAsUser": 0, "runAsGroup": 0},
        storage="/var/lib/containers",
        readable=0o400,
    ),
    # As BuildKit's documentation of its rootless mode has it: user 1000, no privileges, and no profiles of
    # seccomp and AppArmor, which would forbid to make a user namespace and to mount in it.
    "buildkit": InPod(
        image="docker.io/moby/buildkit:rootless",
        level="privileged",
        settings=_of_buildkit,
        script=f"""
set -eu
name=$1; shift
buildkitd --version
set -- --local context={CONTEXT} --local dockerfile={CONTEXT} "$@"
set -- "$@" --output "type=image,name=$name,push=true,oci-mediatypes=true"
exec buildctl-daemonless.sh build --progress plain --frontend dockerfile.v0 "$@"
""",
        options=_buildkit_options,
        env={
            "BUILDCTL_CONNECT_RETRIES_MAX": "60",  # which is 40 s
            "BUILDKITD_FLAGS": f"--config {ACCESS}/buildkitd.toml --oci-worker-no-process-sandbox",
            "DOCKER_CONFIG": ACCESS,
        },
        security={
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "seccompProfile": {"type": "Unconfined"},
            "appArmorProfile": {"type": "Unconfined"},
        },
        storage="/home/user/.local/share/buildkit",
        readable=0o444,
    ),
}
BUILDERS: Final[Mapping[str, OnWorker | InPod]] = {**WORKERS, **PODS}
