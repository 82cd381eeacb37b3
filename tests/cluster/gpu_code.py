"""Making torch's CUDA build small: the code for GPUs is never run here, and zeros compress to nothing."""

import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
# Libraries and device code that torch opens only when it meets a GPU, and oneCCL for SYCL.
NEVER_OPENED = (
    "lib/libccl.a",
    "nvidia/cudnn/lib/libcudnn_*",
    "**/libcusolverMg.*",
    "**/libnvperf_*",
    "**/*.bc",
)


def remove(site_packages: Path) -> None:
    """Drop what is only opened on a GPU, blank what is linked but never run."""
    for pattern in NEVER_OPENED:
        for file in site_packages.glob(pattern):
            file.unlink()
    for file in site_packages.rglob("*.so*"):
        if file.is_file() and not file.is_symlink():
            _blank(file)


def _blank(file: Path) -> None:
    """Replace a file by a copy without GPU code: it may be one with the package manager's cached file."""
    sections = list(_gpu_sections(file))
    if not sections:
        return
    copy = file.with_name(f"{file.name}.copy")
    shutil.copy2(file, copy)
    with copy.open("r+b") as stream:
        for offset, size in sections:
            stream.seek(offset)
            stream.write(bytes(size))
    copy.replace(file)


def _gpu_sections(file: Path) -> Iterator[tuple[int, int]]:
    """Offset and size of the sections that hold GPU code, read from the ELF section headers."""
    with file.open("rb") as stream:
        header = stream.read(64)
        if header[:5] != b"\x7fELF\x02":
            return
        (table,) = struct.unpack_from("<Q", header, 40)
        width, count, names_index = struct.unpack_from("<HHH", header, 58)
        stream.seek(table)
        raw = stream.read(width * count)
        sections = [struct.unpack_from("<IIQQQQ", raw, index * width) for index in range(count)]
        stream.seek(sections[names_index][4])
        names = stream.read(sections[names_index][5])
    for name, _, _, _, offset, size in sections:
        if names[name : names.index(b"\0", name)] in SECTIONS:
            yield offset, size
