"""Making torch's CUDA build small: the code for GPUs is never run here, and zeros compress to nothing."""

import struct
from collections.abc import Iterator
from pathlib import Path

SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
# Libraries and device code that torch opens only when it meets a GPU.
NEVER_OPENED = ("nvidia/cudnn/lib/libcudnn_*", "**/libcusolverMg.*", "**/libnvperf_*", "**/*.bc")


def remove(site_packages: Path) -> None:
    """Drop what is only opened on a GPU, blank what is linked but never run.

    The files must be our own copies: package managers link installed files to their cache.
    """
    for pattern in NEVER_OPENED:
        for file in site_packages.glob(pattern):
            file.unlink()
    for file in site_packages.rglob("*.so*"):
        if file.is_file() and not file.is_symlink():
            _blank(file)


def _blank(file: Path) -> None:
    if file.stat().st_nlink > 1:
        raise ValueError(f"{file} is linked from elsewhere and is left as it is")
    for offset, size in list(_gpu_sections(file)):
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(bytes(size))


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
