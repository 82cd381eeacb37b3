"""Read MNIST's files in the format IDX: a header of big-endian numbers, then one byte for each value."""

import gzip
import math
import re
import struct
import zlib
from pathlib import Path
from typing import Final, NamedTuple

from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["Array", "find", "read"]

# As LeCun's page names them, and as some copies do: train-images.idx3-ubyte; packed or not.
_NAME: Final = re.compile(r"(train|t10k)-(images[-.]idx3|labels[-.]idx1)-ubyte(\.gz)?")
_NEEDED: Final = {f"{part}-{kind}" for part in ("train", "t10k") for kind in ("images", "labels")}
_BYTES: Final = b"\0\0\x08"  # two zeros, and the type of a value: unsigned byte; the number of sizes follows
_DIMENSIONS: Final = {"images": 3, "labels": 1}


class Array(NamedTuple):
    """An array of unsigned bytes."""

    shape: tuple[int, ...]
    content: bytes


def find(folder: Path) -> dict[str, Path]:
    """Find the four files in a folder or below it: ``train-images``, ``train-labels``, and so on -> path.

    Raises:
        BadInputError: One is missing.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if (match := _NAME.fullmatch(path.name)) and path.is_file():
            found.setdefault(f"{match[1]}-{match[2][:6]}", path)
    if missing := sorted(_NEEDED - set(found)):
        raise BadInputError(
            f"{folder} has no file {', no '.join(_file_name(name) for name in missing)}",
            field="run.data",
            fix="Give a folder with MNIST's four IDX files, as they are or packed (.gz); without "
            "run.data the digits of scikit-learn are taken",
        )
    return found


def read(path: Path) -> Array:
    """Read a file.

    Raises:
        BadInputError: It is no IDX file of bytes, or is cut short.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _unusable(path, f"cannot be read: {error}") from error
    dimensions = _DIMENSIONS["images" if "images" in path.name else "labels"]
    head = 4 + 4 * dimensions
    if content[:4] != _BYTES + bytes([dimensions]) or len(content) < head:
        raise _unusable(path, f"is no IDX file of bytes with {dimensions} dimensions: it begins otherwise")
    shape = struct.unpack(f">{dimensions}I", content[4:head])
    if len(content) != head + math.prod(shape):
        sizes = " x ".join(map(str, shape))
        raise _unusable(path, f"has {len(content) - head:,} values, and promises {sizes}")
    return Array(shape, content[head:])


def _file_name(name: str) -> str:
    part, kind = name.split("-")
    return f"{part}-{kind}-idx{_DIMENSIONS[kind]}-ubyte"


def _unusable(path: Path, why: str) -> BadInputError:
    return BadInputError(f"{path} {why}", field="run.data", fix="Get the file anew")
