"""The layers of the Debian images: a base with Python and ssh, Python packages on it, and the backend ccl.

What this file says is part of the images' tags: change it, and they are made anew.
"""

import hashlib
import os
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path

from cluster import debian, gpu_code
from cluster.command import ClusterError, run
from cluster.go import uv
from cluster.registry import Layer
from cluster.settings import PROJECT

PACKAGES = ("ca-certificates", "hostname", "openssh-client", "openssh-server", "procps", "python3")
PYTHON = {"bookworm": "3.11", "trixie": "3.13"}
DATA = ("bin", "etc", "include", "lib", "opt", "share")  # of packages, where pip puts them into /usr/local
LEFT_OUT = ("doc", "info", "lintian", "locale", "man", "zoneinfo")
# Extras of pyproject.toml whose packages an image has, beside those of the bare install.
HELPER: tuple[str, ...] = ()
TRAINING = ("train", "vision", "mpi", "ccl")
# Brought by others and never used on a CPU.
UNUSED = ("triton", "oneccl", "intel-sycl-rt", "intel-opencl-rt", "umf", "onemkl-license")
# What compiles the backend: this machine is of the image's Debian, and so is its Python.
SYSTEM_PYTHON = "/usr/bin/python3"
BACKEND = PROJECT / "pipeline" / "node" / "ccl"
BACKEND_CACHE = Path("/opt/manycpu/cache")
BACKEND_SECONDS = 600
# training-operator's init container calls nslookup; Debian's weighs 40 MB.
NSLOOKUP = '#!/bin/sh\nexec getent hosts "$1"\n'
BLOCK = 1 << 20
INSTALL_SECONDS = 1200


def suite() -> str:
    release = debian.release()
    if release not in PYTHON:
        raise ClusterError(
            f"the test images are made on Debian {' or '.join(PYTHON)}; this machine is {release}"
        )
    return release


def pins(extras: tuple[str, ...]) -> list[str]:
    """What is installed for these extras, with the versions that the project pins."""
    wanted = _requirements(extras)
    constraints = [PROJECT / "requirements" / name for name in ("torch.txt", "all.txt")]
    pinned = "".join(file.read_text() for file in constraints)
    return [*wanted, hashlib.sha256(pinned.encode()).hexdigest()]


def _requirements(extras: tuple[str, ...]) -> list[str]:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(name for extra in extras for name in optional.get(extra, ()))]


@cache
def base(workshop: Path) -> Layer:
    """Debian with Python, ssh and a name look-up; made once for all images of a build."""
    root = workshop / "base"
    _mmdebstrap(root)
    return pack(root, workshop / "base.tar.zst")


def _mmdebstrap(root: Path) -> None:
    left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in LEFT_OUT]
    trim = "rm -rf $1/var/lib/apt/lists/* $1/var/cache/apt/* $1/var/log/* $1/usr/lib/*/gconv"
    sources = [
        f
        for f in map(Path, ("/etc/apt/sources.list", "/etc/apt/sources.list.d/debian.sources"))
        if f.exists()
    ]
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", f"--include={','.join(PACKAGES)}"]
    run([*command, *left_out, f"--customize-hook={trim}", suite(), root, *sources], seconds=600)
    shutil.rmtree(root / "dev")
    (root / "dev").mkdir()
    nslookup = root / "usr" / "bin" / "nslookup"
    nslookup.write_text(NSLOOKUP)
    nslookup.chmod(0o755)
    (root / "usr" / "bin" / "python").symlink_to("python3")


def helper(workshop: Path) -> Layer:
    return _python_layer(workshop / "helper", HELPER)


def training(workshop: Path) -> Layer:
    return _python_layer(workshop / "torch", TRAINING)


def _python_layer(root: Path, extras: tuple[str, ...]) -> Layer:
    """The packages where the base's Python looks for them, their programs on its PATH."""
    local, packages = root / "usr" / "local", _packages(root)
    _install(packages, extras)
    gpu_code.remove(packages)
    moved = [name for name in DATA if (packages / name).is_dir()]
    for name in moved:
        shutil.copytree(packages / name, local / name, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(packages / name)
    _record(packages, moved)
    for program in filter(Path.is_file, (local / "bin").glob("*")):
        _use_python_of_image(program)
    _compile(packages, f"/{packages.relative_to(root)}")
    return pack(root, root.with_suffix(".tar.zst"))


def _packages(root: Path) -> Path:
    return root / "usr" / "local" / "lib" / f"python{PYTHON[suite()]}" / "dist-packages"


def _record(packages: Path, moved: list[str]) -> None:
    """Have the records of what is installed say where the files are now, as pip would."""
    for record in packages.glob("*.dist-info/RECORD"):
        lines = record.read_text().splitlines(keepends=True)
        places = ("../../../" if line.partition("/")[0] in moved else "" for line in lines)
        text = "".join(place + line for place, line in zip(places, lines, strict=True))
        record.unlink()  # it may be one with the package manager's cached file
        record.write_text(text)


def backend(workshop: Path) -> Layer:
    """The backend ccl, compiled for what the layer with the training packages has."""
    root, paths = workshop / "ccl", (_packages(workshop / "torch"), PROJECT / ".dev")
    known = {
        "MANYCPU_CACHE": f"{root}{BACKEND_CACHE}",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [SYSTEM_PYTHON, "-m", "manycpu.pipeline.node.ccl"]
    run(command, cwd=workshop, env=os.environ | known, seconds=BACKEND_SECONDS)
    return pack(root, workshop / "ccl.tar.zst")


def backend_sources() -> list[str]:
    """What the backend is compiled from."""
    return [file.read_text() for file in (BACKEND / "build.py", *sorted((BACKEND / "source").iterdir()))]


def _install(packages: Path, extras: tuple[str, ...]) -> None:
    packages.mkdir(parents=True)
    overrides = packages.parent / "overrides.txt"
    overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in UNUSED))
    options = ["--target", str(packages), "--python-version", PYTHON[suite()], "--only-binary", ":all:"]
    options += ["--override", str(overrides)]
    options += ["--constraint", "requirements/torch.txt", "--constraint", "requirements/all.txt"]
    command = ["pip", "install", "--quiet", *options, *_requirements(extras)]
    run([uv(), *command], cwd=PROJECT, seconds=INSTALL_SECONDS)
    overrides.unlink()


def _compile(packages: Path, place: str) -> None:
    """Write the bytecode, as pip does: pods cannot, and each of their processes would compile torch anew.

    Args:
        packages: Where they are installed.
        place: Where the image has them.
    """
    # By what is in the file, not by its time: layers have times of their own.
    options = ["-qq", "-j", "0", "--invalidation-mode", "unchecked-hash", "-s", str(packages), "-p", place]
    command = [SYSTEM_PYTHON, "-m", "compileall", *options, str(packages)]
    subprocess.run(command, check=False, timeout=INSTALL_SECONDS)  # templates of packages are no Python
    if not any((packages / "pydantic").rglob("*.pyc")):
        raise ClusterError(f"nothing was compiled in {packages}")


def _use_python_of_image(program: Path) -> None:
    content = program.read_bytes()
    first, newline, rest = content.partition(b"\n")
    if first.startswith(b"#!") and b"python" in first:
        program.write_bytes(b"#!/usr/bin/python3" + newline + rest)


def pack(root: Path, file: Path) -> Layer:
    """Make a layer of a folder, compressed with zstd."""
    plain, packed = hashlib.sha256(), hashlib.sha256()
    tar = ["tar", "--sort=name", "--numeric-owner", "--mtime=@0", "-C", str(root), "-c", "."]
    with (
        subprocess.Popen(tar, stdout=subprocess.PIPE) as source,
        subprocess.Popen(["zstd", "-q", "-1", "-T0", "-f", "-o", str(file)], stdin=subprocess.PIPE) as target,
    ):
        if source.stdout is None or target.stdin is None:
            raise ClusterError("tar and zstd have no pipes")
        while block := source.stdout.read(BLOCK):
            plain.update(block)
            target.stdin.write(block)
    if source.returncode or target.returncode:
        raise ClusterError(f"packing {root} failed: tar {source.returncode}, zstd {target.returncode}")
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            packed.update(block)
    return Layer(file, f"sha256:{plain.hexdigest()}", f"sha256:{packed.hexdigest()}")
