"""Set oneCCL's environment variables, so that no script of oneAPI has to be sourced."""

import os
import socket
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path
from typing import Final

import psutil

from manycpu.pipeline.node.ccl import build
from manycpu.pipeline.node.world import Rank, read_rank
from manycpu.pipeline.spec.kernel import address_towards, interface_of

_FIXED: Final = {
    # oneCCL starts no threads: the backend's one thread drives it.
    "CCL_WORKER_OFFLOAD": "0",
    "CCL_YIELD": "sched_yield",
    "CCL_ATL_SHM": "1",
    "CCL_LOG_LEVEL": "error",
}

# By default oneCCL chooses between two algorithms by how much a rank itself sends: ranks that send different
# amounts would choose differently, and wait for each other for ever.
_ALLTOALLV: Final = "direct"


def apply() -> None:
    """Set the variables that are not set yet; those that the user has set stay."""
    rank = read_rank(os.environ)
    fabric, mpi = build.find_library("libfabric.so.1"), build.find_library("libmpi.so.12")
    system_has_fabric = find_library("fabric") is not None  # not that of impi-rt, which `build` finds
    variables = settings(rank, os.environ, fabric, mpi, interface(), system_has_fabric=system_has_fabric)
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def settings(  # noqa: PLR0913 - everything that they depend on
    rank: Rank,
    environ: Mapping[str, str],
    fabric: Path,
    mpi: Path,
    interface: str,
    *,
    system_has_fabric: bool,
) -> dict[str, str]:
    """Build oneCCL's variables for a rank.

    Args:
        rank: This process, and its launcher.
        environ: Its environment.
        fabric: libfabric, with its providers in the same folder.
        mpi: Intel MPI's library.
        interface: The network interface to use.
        system_has_fabric: Whether the system has a libfabric, which Intel MPI then uses.
    """
    # If the launcher belongs to an installation of Intel MPI, use the library of that installation.
    mpi_library = mpi
    if environ.get("I_MPI_ROOT"):
        launchers_mpi = Path(environ["I_MPI_ROOT"]) / "lib" / mpi.name
        if launchers_mpi.exists():
            mpi_library = launchers_mpi
    variables = _FIXED | {
        "CCL_OFI_LIBRARY_PATH": str(fabric),
        "CCL_MPI_LIBRARY_PATH": str(mpi_library),
        "FI_PROVIDER_PATH": str(fabric.parent),
        "CCL_KVS_IFACE": interface,
        "FI_TCP_IFACE": interface,
    }
    # Intel's mpirun has started the rank: MPICH's is called hydra too, but sets no I_MPI_ variables.
    if rank.launcher == "hydra" and any(name.startswith("I_MPI_") for name in environ):
        # Intel MPI looks for libfabric among the system's libraries, but impi-rt has it beside MPI's library.
        beside = mpi_library.with_name(fabric.name)
        if beside.exists() and not system_has_fabric:
            variables["I_MPI_OFI_LIBRARY"] = str(beside)
        return variables | {"CCL_ATL_TRANSPORT": "mpi", "CCL_ALLTOALLV": _ALLTOALLV}
    return variables | {
        "CCL_ATL_TRANSPORT": "ofi",
        "CCL_PROCESS_LAUNCHER": "none",
        "CCL_LOCAL_RANK": str(rank.local_rank),
        "CCL_LOCAL_SIZE": str(rank.local_world_size),
    }


def interface() -> str:
    """Name the network interface for oneCCL: gloo's, if it is configured, else the one to the meeting point.

    If neither is known, it is the loopback interface ``lo``.
    """
    configured = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    return configured or interface_of(_towards_master()) or "lo"


def address() -> str:
    """Find this host's address on the interface that :func:`interface` names; IPv4 is preferred.

    If the interface has no address, return the address by which this host reaches the meeting point.
    """
    addresses = psutil.net_if_addrs().get(interface(), [])
    for kind in (socket.AF_INET, socket.AF_INET6):
        for candidate in addresses:
            if candidate.family == kind:
                return candidate.address.partition("%")[0]  # without the scope of an IPv6 address
    return _towards_master()


def _towards_master() -> str:
    """Return the address by which this host reaches the meeting point, MASTER_ADDR."""
    master, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "1")
    return address_towards(master, int(port))
