"""Find the login for a registry, and read docker's settings on this machine: logins and its builder."""

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.adapters import commands
from manycpu.pipeline.spec.errors import BadInputError, LaunchError
from manycpu.pipeline.spec.image import Reference

_DOCKER_HUB: Final = ("docker.io", "index.docker.io", "registry-1.docker.io")
_HELPER_TIMEOUT_S: Final = 30
_BUILDX_TIMEOUT_S: Final = 60


@dataclass(frozen=True)
class Login:
    """A user of a registry; its secrets are not in its repr."""

    username: str
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    """A token that some registries use instead of a password."""

    @property
    def pair(self) -> str:
        """Join name and password as basic auth sends them."""
        return base64.b64encode(f"{self.username}:{self.password}".encode()).decode()

    def as_config(self, registry: str) -> dict[str, Any]:
        """Return the content of a docker config.json with this login for one registry."""
        entry = {"auth": self.pair} | ({"identitytoken": self.identity_token} if self.identity_token else {})
        return {"auths": dict.fromkeys(_config_keys(registry)[:1], entry)}  # the first: docker's own name


def docker_folder() -> Path:
    """Return the folder of this user's docker settings."""
    return Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser()


def docker_config(path: str | None = None) -> dict[str, Any]:
    """Read docker's config.json at ``path``; None: the one in $DOCKER_CONFIG, or else in ~/.docker.

    Empty: ``path`` is None, and there is no such file.

    Raises:
        BadInputError: The file at ``path`` does not exist, or the file cannot be read.
    """
    file = Path(path).expanduser() if path else docker_folder() / "config.json"
    try:
        return _parse(file.read_bytes())
    except FileNotFoundError:
        if path is None:
            return {}
        raise _unreadable_config(file, "there is no such file") from None
    except (OSError, ValueError) as error:
        raise _unreadable_config(file, error) from error


def _unreadable_config(file: Path, reason: object) -> BadInputError:
    """Build the error for a config.json that cannot be used."""
    return BadInputError(
        f"docker's config {file} cannot be read: {reason}",
        field="target.registry_connection",
        fix="Give the path of a config.json as `docker login` writes it",
    )


def _parse(text: bytes) -> dict[str, Any]:
    """Parse docker's config; a field that is null is left out.

    Raises:
        ValueError: The text, its ``auths`` or its ``credHelpers`` is no JSON object.
    """
    config = json.loads(text)
    if isinstance(config, dict):
        config = {name: value for name, value in config.items() if value is not None}
        if all(isinstance(config.get(name, {}), dict) for name in ("auths", "credHelpers")):
            return config
    raise ValueError("it, or its auths or credHelpers, is no JSON object")


def from_config(config: Mapping[str, Any], registry: str) -> Login | None:
    """Find a registry's login in docker's config, or by the credential helper that the config names.

    None: neither has a login for the registry.

    Raises:
        BadInputError: The config's entry cannot be read, or the helper fails.
    """
    for key in _config_keys(registry):
        helper = config.get("credHelpers", {}).get(key) or config.get("credsStore")
        entry = config.get("auths", {}).get(key)
        if entry and (login := _login(entry, key)):
            return login
        if helper and (login := _from_helper(helper, key)):
            return login
    return None


def from_secret(secret: Mapping[str, Any], image: Reference) -> Login | None:
    """Find an image's login in a Secret of type kubernetes.io/dockerconfigjson; None: no entry of it fits.

    Raises:
        BadInputError: The Secret, or its entry for the image, cannot be read.
    """
    name = secret.get("metadata", {}).get("name")
    try:
        auths = _parse(base64.b64decode(secret["data"][".dockerconfigjson"])).get("auths", {})
    except (KeyError, TypeError, ValueError):
        raise BadInputError(
            f"Secret {name} of type {secret.get('type')} has no docker config in it",
            field="target.pull_secret",
            fix=f"Recreate it: kubectl create secret docker-registry {name} "
            f"--docker-server={image.registry} ...",
        ) from None
    # Without credential helpers: a Secret must not choose programs of this machine.
    keys = [key for key in auths if auths[key] and _fits(key, image)]
    # The longest path first, and an asterisk last, as kubelets do.
    keys.sort(key=lambda key: (len(_host_and_path(key)[1]), "*" not in key), reverse=True)
    logins = (_login(auths[key], key) for key in keys)
    return next(filter(None, logins), None)


def _config_keys(registry: str) -> tuple[str, ...]:
    """List the names that a registry may have in docker's config; the first is docker's own."""
    if registry in _DOCKER_HUB:
        return ("https://index.docker.io/v1/", *_DOCKER_HUB)
    return (registry, f"https://{registry}", f"http://{registry}", f"https://{registry}/v1/")


def _fits(key: str, image: Reference) -> bool:
    """Whether a key of a Secret matches an image, by the rules of Kubernetes.

    The key is a host, perhaps with a path. An asterisk in the host stands for any text without a dot. A path
    must be the first parts of the repository's name: ``team/a`` fits ``team/a/b``, but not ``team/ab``.
    """
    key_host, path = _host_and_path(key)
    parts = key_host.split(".")
    names = _DOCKER_HUB if image.registry in _DOCKER_HUB else (image.registry,)
    hosts = [host.split(".") for host in names]
    is_host = any(len(parts) == len(host) and all(map(fnmatchcase, host, parts)) for host in hosts)
    return is_host and f"{image.repository}/".startswith(path)


def _host_and_path(key: str) -> tuple[str, str]:
    """Split a key of a Secret into host and path: ``ghcr.io/team`` gives ``ghcr.io`` and ``team/``.

    The path is empty if the key is for all repositories of the host.
    """
    host, _, path = key.rpartition("://")[2].partition("/")
    path = f"{path.strip('/')}/".lstrip("/")  # ends with a slash, unless it is empty
    # Some keys are the address of a registry's API, such as docker's own https://index.docker.io/v1/.
    return host, path.removeprefix("v1/").removeprefix("v2/")


def _login(entry: Mapping[str, str], key: str) -> Login | None:
    """Read a login from an entry of docker's config; None: the entry has none.

    Raises:
        BadInputError: The entry cannot be read; the error names its ``key``.
    """
    try:
        token = entry.get("identitytoken", "")
        if entry.get("username"):
            return Login(entry["username"], entry.get("password", ""), token)
        name, _, password = base64.b64decode(entry.get("auth", ""), validate=True).decode().partition(":")
    except (AttributeError, TypeError, ValueError):  # it is no mapping, or its auth no base64
        raise BadInputError(
            f"the login of {key} in docker's config cannot be read",
            field="target.registry_connection",
            fix=f"Log in again: docker login {key}",
        ) from None
    if not name and not token:
        return None
    return Login(name, password.rstrip("\0"), token)  # docker ignores NULs at the end, too


def _from_helper(helper: str, key: str) -> Login | None:
    """Ask docker's credential helper, a program, for a login; None: it has none.

    Raises:
        BadInputError: The helper cannot be run, times out, or answers in another form.
    """
    command = [f"docker-credential-{helper}", "get"]
    try:
        done = commands.run(command, timeout=_HELPER_TIMEOUT_S, secret=True, input=key.encode())
    except LaunchError as error:
        raise BadInputError(
            f"docker's credential helper for {key}: {error.message}",
            field="target.registry_connection",
            fix=f"Install {command[0]}, or give a login in target.registry_connection",
        ) from error
    if done.code:  # it has no login for this registry
        return None
    try:
        credentials = json.loads(done.out)
        username, secret = credentials["Username"], credentials["Secret"]
    except (KeyError, TypeError, ValueError):
        raise BadInputError(
            f"docker's credential helper for {key} gives no login: its answer is not the usual JSON",
            field="target.registry_connection",
            fix=f"See what `{' '.join(command)}` answers, or give a login in target.registry_connection",
        ) from None
    # docker's convention: with this user name, the secret is an identity token.
    return Login("", identity_token=secret) if username == "<token>" else Login(username, secret)


def has_buildkit() -> bool:
    """Whether docker builds with BuildKit: it has the component buildx, and $DOCKER_BUILDKIT allows it.

    Raises:
        LaunchError: There is no docker.
    """
    if os.environ.get("DOCKER_BUILDKIT", "").lower() in ("0", "f", "false"):
        return False
    # With BuildKit requested, a docker that lacks its component buildx fails at once.
    environ = {**os.environ, "DOCKER_BUILDKIT": "1"}
    return commands.run(["docker", "build", "--help"], timeout=_BUILDX_TIMEOUT_S, env=environ).code == 0


def write_docker_settings(folder: Path, auths: Mapping[str, Any]) -> None:
    """Write a folder for $DOCKER_CONFIG: the user's settings, contexts and plugins, and more logins.

    Args:
        folder: The folder, which does not exist yet.
        auths: Logins as in config.json; they win over the user's logins and credential helpers.
    """
    folder.mkdir()
    user_folder = docker_folder()
    for entry in user_folder.iterdir() if user_folder.is_dir() else ():
        (folder / entry.name).symlink_to(entry.resolve())
    config = docker_config()
    config["auths"] = {**config.get("auths", {}), **auths}
    # An empty helper: docker takes the login from auths.
    config["credHelpers"] = {**config.get("credHelpers", {}), **dict.fromkeys(auths, "")}
    (folder / "config.json").unlink(missing_ok=True)  # a link: the user's own file must not change
    (folder / "config.json").write_text(json.dumps(config))
