"""Compile the backend, once for each torch, oneCCL and compiler, and load it."""

import fcntl
import hashlib
import importlib.machinery
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

import torch

from manycpu.pipeline.node.backends import UnavailableError
from manycpu.pipeline.node.ccl import toolchain
from manycpu.pipeline.node.ccl.toolchain import Compiler, OneCcl

__all__ = ["built", "folder_of", "is_to_be_built", "load"]

NAME: Final = "manycpu_ccl"
SOURCE: Final = Path(__file__).with_name("source")
_LIMIT: Final = 600.0  # seconds for the compiler, on a machine that does much else
_FLAGS: Final = (
    "-std=c++20",
    "-O3",  # vectorised loops, whatever the compiler
    "-fPIC",
    "-shared",
    "-w",
    "-fvisibility=hidden",
    f"-DTORCH_EXTENSION_NAME={NAME}",
)


def load() -> ModuleType:
    """Load the backend's module, after building it where nobody has yet.

    Raises:
        UnavailableError: It can be neither found nor built here, or does not fit.
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
            "delete that folder to build it anew"
        ) from error
    return module


def built() -> Path:
    """Find the library, or build it: one process does, the others wait for it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UnavailableError(f"oneCCL exists for Linux on x86_64, not for {platform.platform()}; use gloo")
    oneccl, compiler = toolchain.find_oneccl(), toolchain.find_compiler()
    folder = folder_of(cache(), oneccl, compiler)
    library = folder / f"{NAME}.so"
    if library.exists():
        return library
    if compiler is None:
        return _built_elsewhere(folder)
    with _locked(folder):
        if not library.exists():
            _build_unless_failed(library, oneccl, compiler)
    return library


def is_to_be_built() -> bool:
    """Whether the library is still to be compiled.

    Raises:
        UnavailableError: There is no oneCCL, or neither a compiler nor what another one built.
    """
    oneccl, compiler = toolchain.find_oneccl(), toolchain.find_compiler()
    folder = folder_of(cache(), oneccl, compiler)
    if compiler is None:
        _built_elsewhere(folder)
        return False
    return not (folder / f"{NAME}.so").exists()


def cache() -> Path:
    """Name the folder of everything that is built."""
    folder = os.environ.get("MANYCPU_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "manycpu"


def folder_of(base: Path, oneccl: OneCcl, compiler: Compiler | None) -> Path:
    """Name the folder of a build: by what it is made for and of, and by its compiler last."""
    source = [path.read_text() for path in sorted(SOURCE.iterdir())]
    made_for = [torch.__version__, oneccl.version, str(sysconfig.get_config_var("SOABI")), *_FLAGS, *source]
    return base / "ccl" / f"{_digest(made_for)}-{_digest([compiler.version]) if compiler else 'none'}"


def _digest(words: list[str]) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]


def _built_elsewhere(folder: Path) -> Path:
    """Find what another compiler built for the same torch and oneCCL, for there is none here."""
    versions = folder.name.partition("-")[0]
    for library in sorted(folder.parent.glob(f"{versions}-*/{NAME}.so")):
        return library
    raise UnavailableError(
        f"it was not built for torch {torch.__version__} yet, and there is no C++ compiler to do it; "
        "install one (Debian: apt-get install g++), or name it in CXX, or build where there is one: "
        f"python -m manycpu.pipeline.node.ccl "
        f"(kept in {folder.parent}; MANYCPU_CACHE names another place)"
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    # The lock is the kernel's: it goes with its process, and nothing stale is left.
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
        yield


def _build_unless_failed(library: Path, oneccl: OneCcl, compiler: Compiler) -> None:
    """Build, unless another rank of the same attempt failed to: all of them would, one after the other."""
    attempt = [os.environ.get("MANYCPU_RUN"), os.environ.get("MANYCPU_ATTEMPT")]
    failure = library.with_name("failed.json")
    failed_attempt, reason = json.loads(failure.read_text()) if failure.exists() else (None, "")
    if failed_attempt == attempt:
        raise UnavailableError(reason)
    try:
        _build(library, oneccl, compiler)
    except UnavailableError as error:
        if None not in attempt:
            failure.write_text(json.dumps([attempt, error.args[0]]))
        raise


def _build(library: Path, oneccl: OneCcl, compiler: Compiler) -> None:
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(dir=library.parent))
    try:
        built = folder / library.name
        _compile(_command(built, oneccl, compiler))
        built.replace(library)  # at once: nobody sees half of it
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(f"manycpu: built the ccl backend in {time.monotonic() - start:.0f} s: {library}\n")


def _command(library: Path, oneccl: OneCcl, compiler: Compiler) -> list[str]:
    headers = [oneccl.include, *toolchain.require_headers()]
    torch_libraries = Path(torch.__file__).parent / "lib"
    return [
        compiler.path,
        *_FLAGS,
        *(word for folder in headers for word in ("-isystem", str(folder))),
        *(str(path) for path in sorted(SOURCE.glob("*.cpp"))),
        str(oneccl.library),
        "-Wl,--exclude-libs,ALL",  # what oneCCL carries stays its own
        f"-L{torch_libraries}",
        *("-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10", "-ldl", "-lpthread"),
        "-o",
        str(library),
    ]


def _compile(command: list[str]) -> None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_LIMIT)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(
            f"{command[0]} did not end within {_LIMIT:g} s; build it ahead: "
            "python -m manycpu.pipeline.node.ccl"
        ) from error
    if done.returncode == 0:
        return
    errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    raise UnavailableError(f"{command[0]} cannot compile it (C++20 is needed): {' '.join(errors[:3])[:1000]}")
