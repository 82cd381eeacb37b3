"""GPU code becomes zeros; the rest of a library, and a file that it is linked to, do not change."""

import struct
from pathlib import Path

from cluster import gpu_code


def library(gpu: bytes, rest: bytes) -> bytes:
    """Return a 64-bit ELF file with the sections .nv_fatbin and .text, and the section of their names."""
    names = b"\0.nv_fatbin\0.text\0.names\0"
    contents = [(b".nv_fatbin", gpu), (b".text", rest), (b".names", names)]
    body, sections = b"", b""
    for name, content in contents:
        sections += struct.pack("<IIQQQQ24x", names.index(name), 1, 0, 0, 64 + len(body), len(content))
        body += content
    header = b"\x7fELF\x02".ljust(40, b"\0") + struct.pack("<Q", 64 + len(body)) + bytes(10)
    return header + struct.pack("<HHH", 64, len(contents), 2) + body + sections


def test_gpu_code_becomes_zeros_in_a_copy(tmp_path: Path) -> None:
    cached, installed = tmp_path / "cached", tmp_path / "site" / "torch" / "libtorch_cuda.so"
    installed.parent.mkdir(parents=True)
    cached.write_bytes(library(b"gpu code", b"cpu code"))
    installed.hardlink_to(cached)
    gpu_code.remove(tmp_path / "site")
    assert installed.read_bytes() == library(bytes(8), b"cpu code")
    assert cached.read_bytes() == library(b"gpu code", b"cpu code")


def test_what_is_only_opened_on_a_gpu_is_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    for name in ("libcudnn.so.9", "libcudnn_ops.so.9"):
        (folder / name).write_bytes(library(b"", b""))
    gpu_code.remove(tmp_path)
    assert [file.name for file in folder.iterdir()] == ["libcudnn.so.9"]
