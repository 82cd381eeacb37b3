"""Read what the processor can do for a training, and find the libraries that speed it up."""

import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from manycpu.pipeline.spec.cgroup import lines

__all__ = ["LIBRARIES", "bf16_warning", "flags", "libraries"]

_BF16_FLAGS: Final = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Flags of x86-64 and of ARM, as Linux names them."""

_PRICES: Final = {"avx512f": "about 4 times", "avx2": "about 36 times"}
"""Flag -> how long bf16 takes, as a multiple of fp32, where it is the best that the processor has.

Measured with torch 2.15.0 on one core: forward and backward through two linear layers (1024 x 768 x 3072),
oneDNN held to that instruction set (ONEDNN_MAX_CPU_ISA). With AMX, bf16 takes a third of the time of fp32.
"""

LIBRARIES: Final = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
    "jemalloc": ("libjemalloc.so.2",),
    "iomp5": ("libiomp5.so",),
}
"""What is worth preloading -> its file's names, the better one first."""

_SYSTEM: Final = (
    "usr/local/lib",
    "usr/lib/{machine}-linux-gnu",
    "lib/{machine}-linux-gnu",
    "usr/lib64",
    "usr/lib",
)


def flags(root: Path = Path("/")) -> frozenset[str]:
    """Read the processor's flags; empty where they cannot be read."""
    flag_lines = (line for line in lines(root / "proc/cpuinfo") if line.startswith(("flags", "Features")))
    return frozenset(next(flag_lines, "").partition(":")[2].split())


def bf16_warning(flags: Collection[str]) -> str | None:
    """Explain what bf16 costs where the processor cannot compute it; None where it can, or is unknown."""
    if not flags or _BF16_FLAGS.intersection(flags):
        return None
    price = next((price for flag, price in _PRICES.items() if flag in flags), "many times")
    return (
        "bf16 without hardware for it: this processor has neither avx512_bf16 nor amx_bf16, so a step takes "
        f"{price} as long as in fp32; set run.dtype to fp32"
    )


def libraries(root: Path = Path("/")) -> dict[str, str]:
    """Find the libraries worth preloading, in the folders of the dynamic linker and of Python."""
    paths = ((name, _first(root, files)) for name, files in LIBRARIES.items())
    return {name: path for name, path in paths if path}


def _first(root: Path, files: tuple[str, ...]) -> str | None:
    places = [folder / file for file in files for folder in _folders(root)]
    return next((str(path) for path in places if path.is_file()), None)


def _folders(root: Path) -> Iterator[Path]:
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder:
            yield Path(folder)
    yield Path(sys.prefix, "lib")
    for folder in _SYSTEM:
        yield root / folder.format(machine=os.uname().machine)
