"""Container images as pure functions: names, the OCI image format, and what a Dockerfile starts from."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

from manycpu.pipeline.spec.errors import BadInputError, BuildError

INDEXES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
OCI: Final = "application/vnd.oci.image.manifest.v1+json"
DOCKER: Final = "application/vnd.docker.distribution.manifest.v2+json"
_GZIPPED: Final = {
    OCI: "application/vnd.oci.image.layer.v1.tar+gzip",
    DOCKER: "application/vnd.docker.image.rootfs.diff.tar.gzip",
}
"""Media type of a manifest -> that of its gzipped layers."""
_BASE_LABEL: Final = "org.opencontainers.image.base.digest"
_DOCKER_HUB: Final = "docker.io"
_DIGEST = r"sha256:[0-9a-f]{64}"
_NAME = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY: Final = re.compile(rf"{_NAME}(?:/{_NAME})*")
_PATH_AND_VERSION: Final = re.compile(
    rf"(?P<path>[^:@]+)(?::(?P<tag>\w[\w.-]{{0,127}}))?(?:@(?P<digest>{_DIGEST}))?"
)
_AMD64: Final = ("linux", "amd64")
_PLATFORM: Final = {"TARGETOS": "linux", "TARGETARCH": "amd64", "TARGETPLATFORM": "linux/amd64"}
"""The values of variables that builders set by themselves."""
_ARGUMENTS: Final = re.compile(r"(?i)^\s*ARG\s+(.*)")
_ARGUMENT: Final = re.compile(r"(\w+)(=(?:\"[^\"]*\"|'[^']*'|\S*))?")
_STEP: Final = r"^\s*(?:ONBUILD\s+)?(?:RUN|COPY|ADD)\b"
_HERE_DOCUMENTS: Final = re.compile(
    rf"(?im)({_STEP}.*[ \t]\d*<<-?(['\"]?)([\w.-]+)\2(?:[ \t].*)?)\n(?:.*\n)*?\t*\3$"
)
_CONTINUATION: Final = re.compile(r"\\[ \t]*\n")
_FROM: Final = re.compile(r"(?i)^\s*FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*$")
_NEEDS_BUILDKIT: Final = re.compile(rf"(?i){_STEP}\s+(?:--\S+\s+)*--(?:mount|chmod|link)\b")
_STEP_LINE: Final = re.compile(rf"(?i){_STEP}")
_COPIED_FROM: Final = re.compile(r"(?:\s--|[=,])from=[\"']?([^\s,\"']+/[^\s,\"']+)")
_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


@dataclass(frozen=True)
class Reference:
    """An image's name: ``registry/repository:tag`` or ``registry/repository@sha256:...``."""

    registry: str
    """Host and port, as in the name; ``docker.io`` if the name has none."""
    repository: str
    tag: str | None = None
    digest: str | None = None
    plain: bool = False
    """Whether ``http://`` stood before it."""

    @classmethod
    def parse(cls, text: str, field: str) -> "Reference":
        """Parse a name; without tag and digest it means the tag ``latest``.

        Args:
            text: The name.
            field: The field that has the name, for the error.

        Raises:
            BadInputError: It is no image's name.

        >>> str(Reference.parse("python:3.12-slim", "target.image"))
        'docker.io/library/python:3.12-slim'
        >>> Reference.parse("http://10.0.0.1:5000/ml/train", "target.image").registry
        '10.0.0.1:5000'
        """
        scheme, _, name = text.rpartition("://")
        host, slash, path_and_version = name.partition("/")
        # As docker does: a first part that does not look like a host belongs to a repository of Docker Hub.
        if not slash or not ("." in host or ":" in host or host == "localhost"):
            host, path_and_version = _DOCKER_HUB, name
        if host in (_DOCKER_HUB, f"index.{_DOCKER_HUB}"):
            host = _DOCKER_HUB
            if "/" not in path_and_version:  # an official image
                path_and_version = f"library/{path_and_version}"
        match = _PATH_AND_VERSION.fullmatch(path_and_version)
        if scheme not in ("", "http", "https") or not match or not _REPOSITORY.fullmatch(match["path"]):
            raise BadInputError(
                f"{text!r} is no image's name", field=field, fix="Write it as registry/repository:tag"
            )
        return cls(host, match["path"], match["tag"], match["digest"], plain=scheme == "http")

    @property
    def version(self) -> str:
        """The digest where there is one, else the tag."""
        return self.digest or self.tag or "latest"

    def at(self, version: str) -> "Reference":
        """Return a reference to another image of this repository; ``version`` is its tag or its digest."""
        if ":" in version:
            return replace(self, tag=None, digest=version)
        return replace(self, tag=version, digest=None)

    def __str__(self) -> str:
        mark = "@" if self.digest else ":"
        return f"{self.registry}/{self.repository}{mark}{self.version}"


@dataclass(frozen=True)
class Layer:
    """A layer: its gzipped tar, and the digest of the tar itself."""

    content: bytes
    diff_id: str
    made_by: str

    @cached_property
    def digest(self) -> str:
        """Digest of the compressed content, which names it in a registry."""
        return sha256(self.content)


class Change(NamedTuple):
    """A change to an image: layers to add, and the settings to change."""

    layers: Sequence[Layer]
    env: Mapping[str, str]
    labels: Mapping[str, str]
    working_folder: str | None = None


@dataclass(frozen=True)
class Image:
    """A manifest and its config, as the exact bytes from which their digests are computed."""

    manifest_bytes: bytes
    config_bytes: bytes
    media_type: str = OCI

    @property
    def digest(self) -> str:
        """The digest that names the image."""
        return sha256(self.manifest_bytes)

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest."""
        fields: dict[str, Any] = json.loads(self.manifest_bytes)
        return fields

    @property
    def config(self) -> dict[str, Any]:
        """The config: architecture, Env, Labels, history."""
        fields: dict[str, Any] = json.loads(self.config_bytes)
        return fields

    @property
    def settings(self) -> dict[str, Any]:
        """The config's part that says how containers run: Env, User, WorkingDir, Labels."""
        return self.config.get("config") or {}

    @property
    def labels(self) -> dict[str, str]:
        """The labels."""
        return self.settings.get("Labels") or {}

    @property
    def env(self) -> dict[str, str]:
        """The environment."""
        # [::2]: the name and the value, without the =.
        return dict(entry.partition("=")[::2] for entry in self.settings.get("Env") or ())

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The layers' descriptors (mediaType, digest, size), lowest first."""
        return list(self.manifest["layers"])

    @property
    def platform(self) -> tuple[str, str]:
        """Operating system and architecture."""
        return self.config.get("os", "linux"), self.config.get("architecture", "")

    def changed(self, change: Change) -> "Image":
        """Return a new image: this one with the layers and the settings of a change.

        In variables such as PATH and PYTHONPATH, the change's value comes before the image's.
        """
        # Both properties parse their JSON at each access: a change of the result leaves this image as it is.
        new_config, new_manifest = self.config, self.manifest
        new_config["rootfs"]["diff_ids"] += [layer.diff_id for layer in change.layers]
        if "history" in new_config:  # a history covers all layers: none is begun for an image without one
            new_config["history"] += [{"created_by": layer.made_by} for layer in change.layers]
        environment = _merged_environment(self.env, change.env)
        settings = self.settings | {
            "Env": [f"{name}={value}" for name, value in environment.items()],
            "Labels": {**self.labels, **change.labels, _BASE_LABEL: self.digest},
        }
        if change.working_folder is not None:
            settings["WorkingDir"] = change.working_folder
        new_config["config"] = settings
        config_bytes = _as_canonical_json(new_config)
        new_manifest["config"] |= {"digest": sha256(config_bytes), "size": len(config_bytes)}
        media_type = _GZIPPED[self.media_type]
        new_manifest["layers"] += [
            {"mediaType": media_type, "digest": layer.digest, "size": len(layer.content)}
            for layer in change.layers
        ]
        return Image(_as_canonical_json(new_manifest), config_bytes, self.media_type)


def choose(index: Mapping[str, Any], name: str) -> str:
    """Return the digest of the image for linux/amd64 in an index, which lists one image per platform.

    Args:
        index: The index, parsed from JSON.
        name: The image's name, for the error.

    Raises:
        BuildError: The index has no image for linux/amd64.
    """
    platforms = []  # of the other images, for the error
    for entry in index["manifests"]:
        platform = entry.get("platform") or {}
        pair = (platform.get("os"), platform.get("architecture"))
        if pair == _AMD64:
            return str(entry["digest"])
        platforms.append("/".join(str(part) for part in pair))
    raise other_platform(name, ", ".join(platforms))


def other_platform(name: str, platforms: str) -> BuildError:
    """Make the error for an image that does not run on linux/amd64; ``platforms`` are those that it has."""
    return BuildError(
        f"{name} has no image for linux/amd64, only for {platforms or 'nothing'}",
        fix="Name an image for linux/amd64",
    )


def check_platform(image: Image, name: str) -> None:
    """Check that an image runs on linux/amd64.

    Raises:
        BuildError: It does not.
    """
    if image.platform != _AMD64:
        raise other_platform(name, "/".join(image.platform))


def sha256(content: bytes) -> str:
    """Compute the digest of a content, as registries write it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _merged_environment(before: Mapping[str, str], change: Mapping[str, str]) -> dict[str, str]:
    """Merge a change's variables into an environment.

    A new value replaces the old one. If the variable's name ends with PATH, the new value is one path: it is
    put before the old paths, and removed from among them.
    """
    merged = {**before, **change}
    for name in change:
        if name.endswith("PATH"):
            old_parts = [part for part in before.get(name, "").split(":") if part and part != change[name]]
            merged[name] = ":".join([change[name], *old_parts])
    return merged


def _as_canonical_json(value: object) -> bytes:
    """Write JSON so that equal values give equal bytes, and so equal digests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def base_images(text: str, arguments: Mapping[str, str]) -> list[str]:
    r"""List the images that the stages of a Dockerfile start from, except `scratch` and earlier stages.

    ``text`` is the Dockerfile; ``arguments`` are build arguments, which win over the defaults of ``ARG``.

    >>> base_images("ARG BASE=python\nFROM ${BASE}:3.12 AS a\nFROM a\nFROM debian", {"BASE": "intel/python"})
    ['intel/python:3.12', 'debian']
    >>> base_images("ARG A=debian\nFROM scratch AS b\nARG A=alpine\nFROM ${A}", {})
    ['debian']
    """
    values = dict(_PLATFORM)
    images: list[str] = []
    stages = {"scratch"}
    in_stage = False
    for line in _dockerfile_lines(text):
        if stage := _FROM.match(line):  # group 1: what it starts from; group 2: the stage's name
            in_stage = True
            name = _with_values(stage[1].strip("\"'"), values)
            if name.lower() not in stages and name not in images:
                images.append(name)
            stages.add((stage[2] or "").lower())
        elif (words := _ARGUMENTS.match(line)) and not in_stage:  # later ones count in their own stage only
            for argument, default in _ARGUMENT.findall(words[1]):  # default: with its =, or empty
                if argument in arguments:
                    values[argument] = arguments[argument]
                elif default:  # without one, builders keep the value that it has
                    values[argument] = _with_values(default[1:].strip("\"'"), values)
    return images


def copied_images(text: str) -> list[str]:
    r"""List the images from which COPY and RUN --mount take files.

    A name without a slash is left out: it may be the name of a stage.

    >>> copied_images("FROM a AS b\nCOPY --from=b /x /x\nCOPY --from=ghcr.io/astral-sh/uv /uv /bin/")
    ['ghcr.io/astral-sh/uv']
    """
    lines = [line for line in _dockerfile_lines(text) if _STEP_LINE.match(line)]
    return [name for line in lines for name in _COPIED_FROM.findall(line)]


def needs_buildkit(text: str) -> bool:
    r"""Whether a Dockerfile has an option or a here-document that docker's classic builder does not know.

    >>> needs_buildkit("FROM a\nRUN --mount=type=cache,target=/c make"), needs_buildkit("FROM a\nRUN make")
    (True, False)
    >>> needs_buildkit("FROM a\nRUN <<EOF\nmake\nEOF")
    True
    """
    if _HERE_DOCUMENTS.search(_CONTINUATION.sub(" ", text)):
        return True
    return any(_NEEDS_BUILDKIT.match(line) for line in _dockerfile_lines(text))


def _dockerfile_lines(text: str) -> Iterator[str]:
    """Yield a Dockerfile's instructions, each as one line without continuations and here-documents.

    Comments are left out.
    """
    text = _HERE_DOCUMENTS.sub(r"\1", _CONTINUATION.sub(" ", text))  # \1: the line that begins the document
    yield from (line for line in text.splitlines() if not line.lstrip().startswith("#"))


def _with_values(text: str, values: Mapping[str, str]) -> str:
    """Replace ``$NAME``, ``${NAME}`` and ``${NAME:-default}`` in a text by their values."""

    def value_of(variable: re.Match[str]) -> str:
        """Return the value of the variable that ``_VARIABLE`` matched; empty: it has none, and no default."""
        in_braces, default, bare = variable.groups()
        # As in a shell, the default also replaces an empty value.
        return values.get(in_braces or bare) or default or ""

    return _VARIABLE.sub(value_of, text)
