"""Programs from Debian packages that are unpacked into the cache and never installed.

Installed, containerd and docker-registry would start services and meet the machine's own; unpacked, they
touch nothing.
"""

import platform
import shutil
from pathlib import Path

from cluster.command import ClusterError, MissingError, log, run
from cluster.settings import cache

PACKAGES = ("containerd", "runc", "containernetworking-plugins", "docker-registry")


def release() -> str:
    """The machine's Debian release, such as bookworm."""
    return platform.freedesktop_os_release().get("VERSION_CODENAME", "unknown")


def unpacked() -> Path:
    return cache() / "debian" / release()


def program(name: str) -> Path:
    """A program from the unpacked packages."""
    for folder in ("usr/bin", "usr/sbin"):
        path = unpacked() / folder / name
        if path.exists():
            return path
    raise ClusterError(f"no {name} in {unpacked()}: remove that folder, and it is made anew")


def cni_plugins() -> Path:
    return unpacked() / "usr" / "lib" / "cni"


def ensure() -> None:
    """Fetch and unpack the packages, unless that was done."""
    if unpacked().exists():
        return
    log.info("unpacking %s", " ".join(PACKAGES))
    part = unpacked().with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        _fetch(part)
    except ClusterError as error:
        raise MissingError(f"Debian's packages {' '.join(PACKAGES)} cannot be had: {error}") from error
    for package in part.glob("*.deb"):
        run(["dpkg", "-x", package, part])
        package.unlink()
    part.rename(unpacked())


def _fetch(folder: Path) -> None:
    """Download the packages, with a new list of what there is if need be."""
    try:
        _download(folder)
    except ClusterError:
        run(["apt-get", "update", "-qq"], seconds=300)
        _download(folder)


def _download(folder: Path) -> None:
    as_root = ["-o", "APT::Sandbox::User=root"]  # apt's own user cannot write into the cache
    run(["apt-get", "download", "-qq", *as_root, *PACKAGES], cwd=folder, seconds=300)
