"""Programs from Debian packages, unpacked into the cache and never installed.

An installed containerd or docker-registry would start services, which may collide with those of this machine.
"""

import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from cluster.command import ClusterError, MissingError, log, run
from cluster.settings import cache

PACKAGES = ("containerd", "runc", "containernetworking-plugins", "docker-registry")


def release() -> str:
    """Return the machine's Debian release, such as bookworm."""
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "unknown")


def unpacked(what: str = "debian") -> Path:
    """Return the folder of a set of unpacked packages: "debian" is the cluster's, tests have others."""
    return cache() / what / release()


def program(name: str, what: str = "debian") -> Path:
    """Return the path of a program in a set of unpacked packages; raise ClusterError if it is not there."""
    for folder in ("usr/bin", "usr/sbin", "bin"):
        path = unpacked(what) / folder / name
        if path.exists():
            return path
    raise ClusterError(f"no {name} in {unpacked(what)}: remove that folder, and it is made anew")


def cni_plugins() -> Path:
    return unpacked() / "usr" / "lib" / "cni"


def ensure(packages: Sequence[str] = PACKAGES, what: str = "debian") -> None:
    """Download and unpack packages as the set `what`, unless it exists; raise MissingError if that fails."""
    if unpacked(what).exists():
        return
    log.info("unpacking %s", " ".join(packages))
    part = unpacked(what).with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        _fetch(part, packages)
    except ClusterError as error:
        raise MissingError(f"Debian's packages {' '.join(packages)} cannot be had: {error}") from error
    for package in part.glob("*.deb"):
        run(["dpkg", "-x", package, part])
        package.unlink()
    part.rename(unpacked(what))


def _fetch(folder: Path, packages: Sequence[str]) -> None:
    """Download the packages. If that fails, update the package lists and try again."""
    try:
        _download(folder, packages)
    except ClusterError:
        run(["apt-get", "update", "-qq"], seconds=300)
        _download(folder, packages)


def _download(folder: Path, packages: Sequence[str]) -> None:
    as_root = ["-o", "APT::Sandbox::User=root"]  # apt's own user cannot write into the cache
    run(["apt-get", "download", "-qq", *as_root, *packages], cwd=folder, seconds=300)
