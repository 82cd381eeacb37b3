"""What the processor can do for a training."""

from pathlib import Path

__all__ = ["bf16_warning", "read_cpuinfo"]

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Flags of x86-64 and of ARM, as Linux names them."""

_PRICES = {"avx512f": "about 4 times", "avx2": "about 36 times"}
"""Flag -> how long bf16 takes, as a multiple of fp32, where it is the best that the processor has.

Measured with torch 2.15.0 on one core: forward and backward through two linear layers (1024 x 768 x 3072),
oneDNN held to that instruction set (ONEDNN_MAX_CPU_ISA). With AMX, bf16 takes a third of the time of fp32.
"""


def read_cpuinfo() -> str:
    """Read what Linux says of the processors; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def bf16_warning(cpuinfo: str) -> str | None:
    """Say what bf16 costs where the processor cannot compute it; None where it can, or nobody can tell."""
    lines = [line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))]
    flags = lines[0].split() if lines else []
    if not flags or _BF16_FLAGS.intersection(flags):
        return None
    price = next((price for flag, price in _PRICES.items() if flag in flags), "many times")
    return (
        "bf16 without hardware for it: this processor has neither avx512_bf16 nor amx_bf16, so a step takes "
        f"{price} as long as in fp32; set run.dtype to fp32"
    )
