"""Find an mpirun, and tell which MPI it is of."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from manycpu.pipeline.adapters import commands
from manycpu.pipeline.spec.errors import BadInputError, LaunchError, ManycpuError
from manycpu.pipeline.spec.placement import Mpi

__all__ = ["find"]

_FIELD: Final = "target.mpi"
_FIX: Final = (
    "Install Intel MPI, which needs no root (pip install 'manycpu[mpi]'), or Open MPI or MPICH, or set "
    "target.mpi to the path of its mpirun"
)
_TIMEOUT: Final = 30.0

Family = Literal["intel", "openmpi", "mpich"]
# What `mpirun --version` says, in this order: Intel MPI is made from MPICH, and older ones say so.
_FAMILIES: Final[tuple[tuple[Family, re.Pattern[str]], ...]] = (
    ("intel", re.compile(r"Intel\(R\) MPI Library.*?Version (\S+)", re.DOTALL)),
    ("openmpi", re.compile(r"\((?:Open MPI|OpenRTE|PRRTE)\) (\S+)")),
    ("mpich", re.compile(r"HYDRA build details:.*?Version:\s+(\S+)", re.DOTALL)),
)


def find(mpirun: str | None) -> Mpi:
    """Find an MPI: the one named, or impi-rt beside this Python, or what PATH has.

    Raises:
        BadInputError: The one named is not there, or is none that we know.
        LaunchError: None was named, and there is none.
    """
    if mpirun is not None:
        path = _located(mpirun)
        if path is None:
            raise BadInputError(f"there is no program {mpirun!r}", field=_FIELD, fix=_FIX)
        return _identify(path)
    for candidate in _candidates():
        try:
            return _identify(candidate)
        except ManycpuError:
            continue
    raise LaunchError("no mpirun was found beside Python or on PATH", field=_FIELD, fix=_FIX)


def _located(mpirun: str) -> Path | None:
    # `which` also takes paths, and sees to it that they can be run.
    path = shutil.which(os.path.expanduser(mpirun))  # noqa: PTH111 - a bare name stays one
    return Path(path).absolute() if path else None


def _candidates() -> Iterator[Path]:
    for name in (f"{sys.prefix}/bin/mpiexec.hydra", "mpirun", "mpiexec"):
        if path := _located(name):
            yield path


def _identify(path: Path) -> Mpi:
    # Intel's mpirun is a shell script that runs whatever mpiexec.hydra comes first on PATH.
    environ = os.environ | {"PATH": f"{path.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    output = commands.run([str(path), "--version"], timeout=_TIMEOUT, env=environ).out
    for family, pattern in _FAMILIES:
        if match := pattern.search(output):
            return (
                _intel(path, match[1])
                if family == "intel"
                else Mpi(family=family, version=match[1], mpirun=str(path))
            )
    raise BadInputError(
        f"{path} is none of Intel MPI, Open MPI and MPICH; it says of its version: {output.strip()[:200]!r}",
        field=_FIELD,
        fix=_FIX,
    )


def _intel(path: Path, version: str) -> Mpi:
    real = path.with_name("mpiexec.hydra")
    root = path.parent.parent
    env = {"I_MPI_ROOT": str(root)}
    # libfabric's providers: beside the libraries in impi-rt, in a folder of their own in oneAPI.
    for folder in ("lib", "opt/mpi/libfabric/lib/prov", "libfabric/lib/prov", "lib/prov"):
        if next((root / folder).glob("libtcp-fi.so"), None):
            env["FI_PROVIDER_PATH"] = str(root / folder)
            break
    return Mpi(
        family="intel", version=version.rstrip(","), mpirun=str(real if real.exists() else path), env=env
    )
