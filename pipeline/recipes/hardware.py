"""What the processor can do for a training."""

from pathlib import Path

__all__ = ["bf16_warning", "read_cpuinfo"]

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Flags of x86-64 and of ARM, as Linux names them."""


def read_cpuinfo() -> str:
    """Read what Linux says of the processors; empty elsewhere."""
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def bf16_warning(cpuinfo: str) -> str | None:
    """Say what bf16 costs where the processor cannot compute it; None where it can, or nobody can tell."""
    flags = [line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features"))]
    if not flags or _BF16_FLAGS & set(flags[0].split()):
        return None
    return (
        "bf16 without hardware for it: this processor has neither avx512_bf16 nor amx_bf16, so bf16 is "
        "computed through fp32 and is slower than fp32 itself; run.dtype fp32 is the better choice here"
    )
