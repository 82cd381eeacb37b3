"""Small data in MNIST's format: the position of an image's bright rows is its class."""

import gzip
import struct
from collections.abc import Sequence
from pathlib import Path

SIZE = 28
_DARK, _BRIGHT = bytes(SIZE), bytes([255]) * SIZE


def idx(shape: Sequence[int], content: bytes) -> bytes:
    """Return an array of unsigned bytes in the IDX format of MNIST; ``content`` is in row-major order."""
    return b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


def write_bars(folder: Path, trained: int, tested: int) -> Path:
    """Write MNIST's four files, those for testing compressed, with so many images; return the folder."""
    folder.mkdir(parents=True)
    for part, count in (("train", trained), ("t10k", tested)):
        files = {
            f"{part}-images-idx3-ubyte": idx(
                (count, SIZE, SIZE), b"".join(_bar(number % 10) for number in range(count))
            ),
            f"{part}-labels-idx1-ubyte": idx((count,), bytes(number % 10 for number in range(count))),
        }
        for name, content in files.items():
            packed = part == "t10k"
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(content) if packed else content)
    return folder


def _bar(label: int) -> bytes:
    """Return an image of 28 x 28 pixels with three bright rows, whose position shows the label."""
    rows = range(2 * label + 3, 2 * label + 6)
    return b"".join(_BRIGHT if row in rows else _DARK for row in range(SIZE))
