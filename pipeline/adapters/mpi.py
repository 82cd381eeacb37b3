"""Find an mpirun, and identify its MPI."""

import os
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from manycpu.pipeline.adapters import commands
from manycpu.pipeline.spec.errors import BadInputError, LaunchError, ManycpuError
from manycpu.pipeline.spec.placement import Mpi
from manycpu.pipeline.spec.targets import Family

_FIELD: Final = "target.mpi"
_FIX: Final = (
    "Install Intel MPI, which needs no root (pip install 'manycpu[mpi]'), or Open MPI or MPICH, or set "
    "target.mpi to the path of its mpirun"
)
_TIMEOUT_S: Final = 30.0

# Output of `mpirun --version`, in this order: Intel MPI is based on MPICH, and older versions print that.
_FAMILIES: Final[tuple[tuple[Family, re.Pattern[str]], ...]] = (
    ("intel", re.compile(r"Intel\(R\) MPI Library.*?Version (\S+)", re.DOTALL)),
    ("openmpi", re.compile(r"\((?:Open MPI|OpenRTE|PRRTE)\) (\S+)")),
    ("mpich", re.compile(r"HYDRA build details:.*?Version:\s+(\S+)", re.DOTALL)),
)


def find(mpirun: str | None) -> Mpi:
    """Find an MPI: the one named, or Intel MPI (impi-rt) beside this Python, or the first on PATH.

    Raises:
        BadInputError: The one named does not exist, or is of no known MPI.
        LaunchError: None was named, and none was found.
    """
    if mpirun is not None:
        path = _executable(mpirun)
        if path is None:
            raise BadInputError(f"there is no program {mpirun!r}", field=_FIELD, fix=_FIX)
        return _identify(path)
    for name in (f"{sys.prefix}/bin/mpiexec.hydra", "mpirun", "mpiexec"):
        if candidate := _executable(name):
            with suppress(ManycpuError):  # of no known MPI: try the next name
                return _identify(candidate)
    raise LaunchError("no mpirun was found beside Python or on PATH", field=_FIELD, fix=_FIX)


def _executable(mpirun: str) -> Path | None:
    """Return the absolute path of a program, given by name or by path; None: there is none."""
    # `which` also takes paths, and checks that they are executable.
    path = shutil.which(os.path.expanduser(mpirun))  # noqa: PTH111 - a bare name stays one
    return Path(path).absolute() if path else None


def _identify(path: Path) -> Mpi:
    """Run ``mpirun --version`` to identify the MPI and its version.

    Raises:
        BadInputError: It is of no known MPI.
    """
    # Intel's mpirun is a shell script that runs the first mpiexec.hydra on PATH.
    environ = os.environ | {"PATH": f"{path.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    output = commands.run([str(path), "--version"], timeout=_TIMEOUT_S, env=environ).out
    for family, pattern in _FAMILIES:
        if match := pattern.search(output):
            if family == "intel":
                return _intel(path, match[1])
            return Mpi(family=family, version=match[1], mpirun=str(path))
    raise BadInputError(
        f"{path} is none of Intel MPI, Open MPI and MPICH; it says of its version: {output.strip()[:200]!r}",
        field=_FIELD,
        fix=_FIX,
    )


def _intel(path: Path, version: str) -> Mpi:
    """Describe an installation of Intel MPI, with the variables that it needs."""
    hydra = path.with_name("mpiexec.hydra")  # mpirun is a shell script around it
    root = path.parent.parent
    env = {"I_MPI_ROOT": str(root)}
    # libfabric's providers, found by the one for TCP: impi-rt has them beside its libraries, oneAPI in a
    # separate folder.
    for folder in ("lib", "opt/mpi/libfabric/lib/prov", "libfabric/lib/prov", "lib/prov"):
        if next((root / folder).glob("libtcp-fi.so"), None):
            env["FI_PROVIDER_PATH"] = str(root / folder)
            break
    return Mpi(
        family="intel", version=version.rstrip(","), mpirun=str(hydra if hydra.exists() else path), env=env
    )
