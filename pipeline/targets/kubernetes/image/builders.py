"""The image builders, by the values of `target.builder`: the commands, settings and pod of each."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from manycpu.pipeline.adapters.registry_login import has_buildkit, write_docker_settings
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.image import needs_buildkit
from manycpu.pipeline.targets.kubernetes.image.build_inputs import Build, Recipe
from manycpu.pipeline.targets.kubernetes.image.registries import Registries

if TYPE_CHECKING:
    from manycpu.pipeline.targets.kubernetes.context import ClusterContext

ACCESS: Final = "/run/manycpu"
"""Folder of a pod with the files of :func:`access`."""
CONTEXT: Final = "/opt/manycpu/build"
"""Folder of a pod with the build's context."""
CERTIFICATE: Final = "ca.crt"  # the file with the registry's certificate authority
Commands = tuple[list[list[str]], dict[str, str]]
"""The commands to run, and the environment that they need."""
Settings = Callable[[Sequence[str], Sequence[str]], dict[str, str]]
"""Makes a builder's settings files, name -> content, from two lists of registries' hosts.

The first list has the hosts with plain HTTP, the second those whose certificates ``ca.crt`` signs.
"""


class Place(NamedTuple):
    """Where a builder on the worker builds: the image's name, its context, and the folder of logins."""

    name: str
    """The image's temporary name on this machine."""
    context: Path
    access_folder: Path
    """The folder with the files of :func:`access`."""

    @property
    def archive(self) -> Path:
        """The file with the built image."""
        return self.access_folder / "image.tar"


class OnWorker(NamedTuple):
    """A builder on the worker; it writes the image to a file."""

    settings: Settings
    commands: Callable[[Build, Place], Commands]
    check: Callable[[Recipe], None] = lambda _: None
    """Raises BadInputError if the program does not support the Dockerfile."""


class InPod(NamedTuple):
    """A builder in a pod, which pushes the image itself."""

    image: str
    """The image with the builder, if the target names none."""
    level: Literal["baseline", "privileged"]
    """The Pod Security level that allows the pod."""
    settings: Settings
    script: str
    """A shell script that builds and pushes; its arguments are the image's name and the options."""
    options: Callable[[Recipe], list[str]]
    env: Mapping[str, str]
    security: Mapping[str, Any]
    """The container's securityContext."""
    storage: str
    """The builder's storage folder, at which a volume is mounted."""
    readable: int
    """File mode with which the builder's user can read the files of :func:`access`, which root owns."""


def access(ctx: "ClusterContext", build: Build, opened: Registries) -> dict[str, str]:
    """Return the files that the target's builder needs to reach the registries: file name -> content.

    - ``config.json``: the logins.
    - ``ca.crt``: the certificate authority of the run's own registry, if the target names one.
    - The builder's settings file: the hosts with plain HTTP, and the hosts with this authority.
    """
    images = (*build.recipe.copied, *build.recipe.references.values(), build.reference)
    hosts = {image.registry: image for image in images}  # host -> one image of it, to find its login
    auths: dict[str, object] = {}  # host -> login, as in docker's settings
    for host, image in sorted(hosts.items()):
        if login := opened.login(image):
            auths |= login.as_config(host)["auths"]
    plain = [host for host, image in hosts.items() if opened.repository(image).connection.plain]
    files = {"config.json": json.dumps({"auths": auths})}
    trusted = []
    if ctx.target.registry_ca:
        files[CERTIFICATE] = Path(ctx.target.registry_ca).read_text()
        # The authority signs for the run's own registry only.
        trusted = [host for host in hosts if host == opened.own_host and host not in plain]
    return files | BUILDERS[ctx.target.builder].settings(plain, trusted)


def _buildah_settings(plain: Sequence[str], _: Sequence[str]) -> dict[str, str]:
    """Return ``registries.conf`` for buildah, with the hosts with plain HTTP.

    The hosts with ``ca.crt`` are not in it: buildah's option ``--cert-dir`` names the folder of that file.
    """
    lines = ['unqualified-search-registries = ["docker.io"]']
    for host in plain:
        lines += ["[[registry]]", f'location = "{host}"', "insecure = true"]
    return {"registries.conf": "\n".join((*lines, ""))}


def _buildkit_settings(plain: Sequence[str], trusted: Sequence[str]) -> dict[str, str]:
    """Return ``buildkitd.toml``, the settings of BuildKit's daemon."""
    text = "".join(f'[registry."{host}"]\nhttp = true\n' for host in plain)
    for host in trusted:
        text += f'[registry."{host}"]\nhttp = false\nca = ["{ACCESS}/{CERTIFICATE}"]\n'
    return {"buildkitd.toml": text}


def _docker_settings(_: Sequence[str], __: Sequence[str]) -> dict[str, str]:
    return {}  # docker's daemon has its own settings, which no client can change


def _options(recipe: Recipe) -> list[str]:
    """Return the options for stage and arguments of a Dockerfile, as docker and buildah take them."""
    options = ["--target", recipe.target] if recipe.target else []
    for name, value in recipe.arguments:
        options += ["--build-arg", f"{name}={value}"]
    return options


def _buildkit_options(recipe: Recipe) -> list[str]:
    """Return the options for stage and arguments of a Dockerfile, as BuildKit takes them."""
    options = ["--opt", f"target={recipe.target}"] if recipe.target else []
    for name, value in recipe.arguments:
        options += ["--opt", f"build-arg:{name}={value}"]
    return options


def _buildah_commands(build: Build, place: Place) -> Commands:
    """Return the commands that build an image with buildah and write the archive, and their environment."""
    env = {
        "REGISTRY_AUTH_FILE": str(place.access_folder / "config.json"),
        "CONTAINERS_REGISTRIES_CONF": str(place.access_folder / "registries.conf"),
        "BUILDAH_ISOLATION": "chroot",
    }
    # The folder has `ca.crt` only if the target names a certificate authority.
    trusted = ["--cert-dir", str(place.access_folder)] if (place.access_folder / CERTIFICATE).exists() else []
    options = _options(build.recipe)
    if build.from_registry:
        options.append("--pull-always")  # a local copy may be stale; older buildah has no --pull=always
    make = ["buildah", "bud", "--format", "oci", *trusted, *options, "-t", place.name]
    save = ["buildah", "push", "--quiet", place.name, f"oci-archive:{place.archive}"]
    return [[*make, str(place.context)], save], env


def _docker_commands(build: Build, place: Place) -> Commands:
    """Return the commands that build an image with docker and write the archive, and their environment.

    Also write docker's settings, with the logins from ``config.json``, to the new folder ``docker``.
    """
    settings = place.access_folder / "docker"
    write_docker_settings(settings, json.loads((place.access_folder / "config.json").read_text())["auths"])
    # With an attestation, docker would write an index instead of a single image.
    env = {"DOCKER_CONFIG": str(settings), "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    if buildkit := has_buildkit():
        env["DOCKER_BUILDKIT"] = "1"
    options = _options(build.recipe)
    if build.from_registry:
        options.append("--pull")  # docker's local copy of a base image may be stale
    if not buildkit:
        options.append("--force-rm")  # BuildKit leaves no containers, and lacks this option
    make = ["docker", "build", *options, "-t", place.name, str(place.context)]
    return [make, ["docker", "save", "-o", str(place.archive), place.name]], env


def _check_docker(recipe: Recipe) -> None:
    """Raise BadInputError if the Dockerfile needs BuildKit, and docker lacks it."""
    if needs_buildkit(recipe.text) and not has_buildkit():
        raise BadInputError(
            "the Dockerfile needs BuildKit, and docker on this machine builds without it",
            field="target.builder",
            fix="Install docker's component buildx (and unset DOCKER_BUILDKIT=0), or set target.builder to "
            "buildah or pod",
        )


WORKERS: Final[Mapping[str, OnWorker]] = {
    "buildah": OnWorker(settings=_buildah_settings, commands=_buildah_commands),
    "docker": OnWorker(settings=_docker_settings, commands=_docker_commands, check=_check_docker),
}

PODS: Final[Mapping[str, InPod]] = {
    "pod": InPod(
        image="quay.io/buildah/stable:latest",
        level="baseline",
        settings=_buildah_settings,
        # Storage: overlay, if the node's kernel allows it in a user namespace; else vfs, which copies files.
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
        # buildah creates a user namespace as root; the default capabilities of containers suffice.
        security={"runAsUser": 0, "runAsGroup": 0},
        storage="/var/lib/containers",
        readable=0o400,
    ),
    # As in BuildKit's documentation of its rootless mode: user 1000 and no privileges. The default profiles
    # of seccomp and AppArmor would forbid to create a user namespace, and to mount in it.
    "buildkit": InPod(
        image="docker.io/moby/buildkit:rootless",
        level="privileged",
        settings=_buildkit_settings,
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
            "BUILDCTL_CONNECT_RETRIES_MAX": "60",  # retries; they take 40 s
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
