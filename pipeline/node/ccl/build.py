"""Compile the backend, once for each torch, oneCCL and compiler, and load it; or say what to install."""

import fcntl
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

import torch

from manycpu.pipeline.node.backends import UnavailableError

NAME: Final = "manycpu_ccl"
SOURCE: Final = Path(__file__).with_name("source")
_COMPILE_LIMIT_S: Final = 600.0  # enough on a busy machine
_VERSION_TIMEOUT_S: Final = 60.0  # for a compiler to print its version
_INSTALL: Final = "pip install 'manycpu[ccl]'"
_FLAGS: Final = (
    "-std=c++20",
    "-O3",  # every compiler vectorises loops then
    "-fPIC",
    "-shared",
    "-w",
    "-fvisibility=hidden",
    f"-DTORCH_EXTENSION_NAME={NAME}",
)


class OneCcl(NamedTuple):
    """The wheel oneccl-devel, as it is installed."""

    version: str
    include: Path
    library: Path


class Compiler(NamedTuple):
    """A C++ compiler and its version."""

    path: str
    version: str


def load() -> ModuleType:
    """Load the backend's module, and build it first if it is not built yet.

    Raises:
        UnavailableError: It cannot be built or loaded; the message says what is missing and what to do.
    """
    path = built()
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    try:
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        loader.exec_module(module)
    except ImportError as error:
        raise UnavailableError(
            f"{path} does not load into torch {torch.__version__}: {error}; "
            "delete that folder to build it again"
        ) from error
    return module


def built() -> Path:
    """Return the path of the backend's library, and build it if it is missing.

    If several processes need it, one builds it and the others wait.

    Raises:
        UnavailableError: It cannot be built; the message says what is missing and what to do.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UnavailableError(f"oneCCL exists for Linux on x86_64, not for {platform.platform()}; use gloo")
    oneccl, compiler = find_oneccl(), find_compiler()
    folder = folder_of(cache(), oneccl, compiler)
    library = folder / f"{NAME}.so"
    if library.exists():
        return library
    if compiler is None:
        return _find_built_by_other_compiler(folder)
    # The kernel releases the lock when its process ends, so that no stale lock stays.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise UnavailableError(
            f"it cannot be built into {folder}: {error.strerror}; "
            "set MANYCPU_CACHE to a folder that is writable"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():  # else another process has built it while this one waited
            _build_unless_failed(library, oneccl, compiler)
    return library


def is_to_be_built() -> bool:
    """Whether :func:`built` would have to compile the library; raises UnavailableError if it could not."""
    oneccl, compiler = find_oneccl(), find_compiler()
    folder = folder_of(cache(), oneccl, compiler)
    if compiler is None:
        _find_built_by_other_compiler(folder)  # raises if there is no library
        return False
    if (folder / f"{NAME}.so").exists():
        return False
    find_headers()  # raises if there are none: the library could not be compiled
    return True


def cache() -> Path:
    """Return the folder of everything that is built: MANYCPU_CACHE, or one in the home folder."""
    folder = os.environ.get("MANYCPU_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "manycpu"


def folder_of(base: Path, oneccl: OneCcl, compiler: Compiler | None) -> Path:
    """Name a build's folder, ``ccl/A-B`` below ``base``.

    A is a digest of torch, oneCCL, Python, flags and source; B of the compiler, or ``none`` without one.
    """
    # When one of these changes, even a comment in the source, every machine builds it again.
    source = [path.read_text() for path in sorted(SOURCE.iterdir())]
    inputs = [torch.__version__, oneccl.version, str(sysconfig.get_config_var("SOABI")), *_FLAGS, *source]
    of_compiler = _digest([compiler.version]) if compiler else "none"
    return base / "ccl" / f"{_digest(inputs)}-{of_compiler}"


def _digest(words: list[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


def find_oneccl() -> OneCcl:
    """Find oneCCL's headers and its static library for CPUs, in the wheel oneccl-devel."""
    try:
        wheel = importlib.metadata.distribution("oneccl-devel")
    except importlib.metadata.PackageNotFoundError as error:
        raise UnavailableError(f"oneCCL is not installed; install it: {_INSTALL}") from error
    header = _file_of(wheel, "oneapi/ccl.hpp")
    archive = _file_of(wheel, "ccl/cpu/lib/libccl.a")
    if header is None or archive is None:
        raise UnavailableError(
            f"oneccl-devel {wheel.version} has no oneapi/ccl.hpp or no ccl/cpu/lib/libccl.a; "
            "install it again: pip install --force-reinstall --no-deps oneccl-devel"
        )
    return OneCcl(wheel.version, header.parent.parent, archive)


def find_compiler() -> Compiler | None:
    """Find a C++ compiler: the one that CXX names, or g++, c++ or clang++ on PATH."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        version = subprocess.run(
            [path, "--version"], check=False, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S
        ).stdout
        return Compiler(path, version.partition("\n")[0].strip())
    return None


def find_headers() -> Path:
    """Find Python's headers."""
    folder = Path(sysconfig.get_path("include"))
    if not (folder / "Python.h").exists():
        raise UnavailableError(
            f"there is no {folder / 'Python.h'}, which the backend is compiled with; "
            "install Python's headers (Debian: apt-get install python3-dev), or build where they are: "
            "python -m manycpu.pipeline.node.ccl"
        )
    return folder


def find_library(name: str) -> Path:
    """Find a library that impi-rt carries: libfabric or MPI."""
    try:
        path = _file_of(importlib.metadata.distribution("impi-rt"), name)
    except importlib.metadata.PackageNotFoundError:
        path = None
    if path is None:
        raise UnavailableError(
            f"there is no {name}, which oneCCL needs and impi-rt has; install it: {_INSTALL}"
        )
    return path


def _file_of(wheel: importlib.metadata.Distribution, end: str) -> Path | None:
    """Find the installed file of a wheel whose path ends with ``end``; None: there is none."""
    for file in wheel.files or ():
        if file.as_posix().endswith(f"/{end}"):
            path = Path(str(file.locate())).resolve()
            return path if path.exists() else None
    return None


def _find_built_by_other_compiler(folder: Path) -> Path:
    """Find a library for the same torch and oneCCL that any compiler has built; this host has no compiler."""
    versions = folder.name.partition("-")[0]
    if libraries := sorted(folder.parent.glob(f"{versions}-*/{NAME}.so")):
        return libraries[0]
    raise UnavailableError(
        f"it was not built for torch {torch.__version__} yet, and there is no C++ compiler to do it; "
        "install one (Debian: apt-get install g++), or name it in CXX, or build where there is one: "
        f"python -m manycpu.pipeline.node.ccl "
        f"(kept in {folder.parent}; MANYCPU_CACHE names another place)"
    )


def _build_unless_failed(library: Path, oneccl: OneCcl, compiler: Compiler) -> None:
    """Build the library, unless another rank of the same attempt has tried and failed.

    Without this check one rank after the other would try, each for minutes. The next attempt tries again. If
    the build fails in a run, ``failed.json`` beside the library has the reason, for the other ranks.

    Raises:
        UnavailableError: The build failed, here or in another rank.
    """
    attempt = [os.environ.get("MANYCPU_RUN"), os.environ.get("MANYCPU_ATTEMPT")]
    failure = library.with_name("failed.json")
    failed_attempt, reason = None, ""
    with suppress(OSError, ValueError):  # there is none, or a full disk has cut it
        failed_attempt, reason = json.loads(failure.read_text())
    if failed_attempt == attempt:
        raise UnavailableError(reason)
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(dir=library.parent))
    try:
        built = folder / library.name
        _compile(_command(built, oneccl, compiler))
        built.replace(library)  # atomic: no process sees half of it
    except UnavailableError as error:
        if None not in attempt:  # outside of a run there are no other ranks to spare
            with suppress(OSError):  # the disk may be full: the compiler's error says so
                failure.write_text(json.dumps([attempt, error.args[0]]))
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(f"manycpu: built the ccl backend in {time.monotonic() - start:.0f} s: {library}\n")


def _command(library: Path, oneccl: OneCcl, compiler: Compiler) -> list[str]:
    """Build the compiler's command line."""
    torch_folder = Path(torch.__file__).parent
    torch_headers = torch_folder / "include"
    headers = [oneccl.include, torch_headers, torch_headers / "torch/csrc/api/include", find_headers()]
    return [
        compiler.path,
        *_FLAGS,
        *(word for folder in headers for word in ("-isystem", str(folder))),
        *(str(path) for path in sorted(SOURCE.glob("*.cpp"))),
        str(oneccl.library),
        "-Wl,--exclude-libs,ALL",  # symbols of what oneCCL carries stay private
        f"-L{torch_folder / 'lib'}",
        *("-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10", "-ldl", "-lpthread"),
        "-o",
        str(library),
    ]


def _compile(command: list[str]) -> None:
    """Run the compiler; raise UnavailableError if it fails or takes more than ten minutes."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(
            f"{command[0]} did not end within {_COMPILE_LIMIT_S:g} s; build it ahead: "
            "python -m manycpu.pipeline.node.ccl"
        ) from error
    if done.returncode == 0:
        return
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    raise UnavailableError(f"{command[0]} cannot compile it (C++20 is needed): {' '.join(errors[:3])[:1000]}")
