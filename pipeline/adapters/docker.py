"""Read the configuration of this machine's docker: its builder, and the user's settings."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.adapters import commands
from manycpu.pipeline.adapters.registry_login import docker_config, docker_folder

__all__ = ["has_buildkit", "write_settings"]

_NO: Final = ("0", "f", "false")
_SECONDS: Final = 60


def has_buildkit() -> bool:
    """Whether docker builds with BuildKit, which $DOCKER_BUILDKIT may forbid.

    Raises:
        LaunchError: There is no docker.
    """
    if os.environ.get("DOCKER_BUILDKIT", "").lower() in _NO:
        return False
    # Asked for BuildKit, a docker that needs its component buildx and has none ends before anything else.
    environ = {**os.environ, "DOCKER_BUILDKIT": "1"}
    return commands.run(["docker", "build", "--help"], timeout=_SECONDS, env=environ).code == 0


def write_settings(folder: Path, auths: Mapping[str, Any]) -> None:
    """Write a folder for $DOCKER_CONFIG: the user's settings, contexts and plugins, with other logins.

    Args:
        folder: The folder; there is none yet.
        auths: Logins as in config.json. They win over the user's own, and over credential helpers.

    Raises:
        BadInputError: The user's config.json cannot be read.
    """
    folder.mkdir()
    theirs = docker_folder()
    for entry in theirs.iterdir() if theirs.is_dir() else ():
        (folder / entry.name).symlink_to(entry.resolve())
    config = docker_config()
    no_helper = dict.fromkeys(auths, "")
    config["auths"] = {**config.get("auths", {}), **auths}
    config["credHelpers"] = {**config.get("credHelpers", {}), **no_helper}
    (folder / "config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
