"""Images with MPICH or Open MPI: this machine's packages as a layer on an image of the same Debian."""

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from support.registry_images import with_layer

from manycpu.pipeline.targets.kubernetes.image.layers import Tree

PACKAGES: Final = {
    "mpich": ("mpich",),
    "openmpi": ("openmpi-bin", "openmpi-common", "libopenmpi", "libprrte", "libpmix"),
}
_LEFT_OUT: Final = ("/usr/share/doc", "/usr/share/man", "/usr/share/lintian", "/usr/include")


def with_mpi(image: str, family: str) -> str:
    """Push ``image`` with an MPI, whose programs come first on PATH; return its reference with the digest."""
    return with_layer(image, _tree(family).layer, family, {"PATH": f"/opt/{family}/bin"})


def _tree(family: str) -> Tree:
    files = {path for path in _files(family) if not str(path).startswith(_LEFT_OUT)}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path in sorted(files | set(_libraries(files))):
            tar.add(path, str(path).lstrip("/"), recursive=False)
        for path in sorted(file for file in files if file.parent == Path("/usr/bin")):
            tar.addfile(_link(f"opt/{family}/bin/{path.name.removesuffix(f'.{family}')}", path))
    return Tree(stream.getvalue(), family)


def _link(name: str, to: Path) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(to), 0o777
    return info


def _files(family: str) -> Iterator[Path]:
    for package in _said("dpkg-query", "--show", "--showformat", "${binary:Package}\n"):
        if package.partition(":")[0].startswith(PACKAGES[family]):
            yield from (path for path in map(Path, _said("dpkg", "--listfiles", package)) if path.is_file())


def _libraries(files: set[Path]) -> Iterator[Path]:
    """Yield the shared libraries, except the C library, that these programs and plugins load."""
    binaries = [path for path in files if path.read_bytes()[:4] == b"\x7fELF"]
    for line in _said("ldd", *map(str, binaries)):
        name, arrow, found = line.partition(" => ")
        if arrow and found.startswith("/") and name.strip() != "libc.so.6":
            path = Path(found.split(" (")[0])
            # The link by which programs find the library, and the file itself.
            yield from (Path(os.path.realpath(path.parent)) / path.name, path.resolve())


def _said(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
