"""Find what the backend is built with: compiler, torch, oneCCL; or say what to install."""

import importlib.metadata
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Final, NamedTuple

import torch

from manycpu.pipeline.node.backends import UnavailableError

__all__ = ["Compiler", "OneCcl", "find_compiler", "find_oneccl", "library", "require_headers"]

_SECONDS: Final = 60.0  # for a compiler to name its version
_INSTALL: Final = "pip install 'manycpu[ccl]'"


class OneCcl(NamedTuple):
    """The wheel oneccl-devel, as it is installed."""

    version: str
    include: Path
    library: Path


class Compiler(NamedTuple):
    """A C++ compiler and its version."""

    path: str
    version: str


def find_oneccl() -> OneCcl:
    """Find oneCCL's headers and its static library for hosts.

    Raises:
        UnavailableError: It is not installed, or not whole.
    """
    try:
        wheel = importlib.metadata.distribution("oneccl-devel")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnavailableError(f"oneCCL is not installed; install it: {_INSTALL}") from error
    header = _of(wheel, "oneapi/ccl.hpp")
    archive = _of(wheel, "ccl/cpu/lib/libccl.a")
    if header is None or archive is None:
        raise UnavailableError(
            f"oneccl-devel {wheel.version} has no oneapi/ccl.hpp or no ccl/cpu/lib/libccl.a; "
            "install it anew: "
            f"pip install --force-reinstall --no-deps oneccl-devel"
        )
    return OneCcl(wheel.version, header.parent.parent, archive)


def library(name: str) -> Path:
    """Find a library that impi-rt carries: libfabric, and MPI.

    Raises:
        UnavailableError: It is not installed.
    """
    try:
        path = _of(importlib.metadata.distribution("impi-rt"), name)
    except importlib.metadata.PackageNotFoundError:
        path = None
    if path is None:
        raise UnavailableError(
            f"there is no {name}, which oneCCL needs and impi-rt has; install it: {_INSTALL}"
        )
    return path


def _of(wheel: importlib.metadata.Distribution, end: str) -> Path | None:
    for file in wheel.files or ():
        if file.as_posix().endswith(f"/{end}"):
            path = Path(str(file.locate())).resolve()
            return path if path.exists() else None
    return None


def find_compiler() -> Compiler | None:
    """Find a C++ compiler: the one that CXX names, or g++, c++ or clang++ on PATH."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        version = subprocess.run(
            [path, "--version"], check=False, capture_output=True, text=True, timeout=_SECONDS
        ).stdout
        return Compiler(path, version.partition("\n")[0].strip())
    return None


def require_headers() -> list[Path]:
    """List the folders of headers of torch and Python.

    Raises:
        UnavailableError: Python's are not installed.
    """
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise UnavailableError(
            f"there is no {python / 'Python.h'}, which the backend is compiled with; "
            "install Python's headers "
            "(Debian: apt-get install python3-dev), or build where they are: "
            "python -m manycpu.pipeline.node.ccl"
        )
    torch_headers = Path(torch.__file__).parent / "include"
    return [torch_headers, torch_headers / "torch/csrc/api/include", python]
