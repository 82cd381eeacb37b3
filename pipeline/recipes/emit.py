"""Print messages into the log of a training."""

import os
import sys
from collections.abc import Mapping

from manycpu.pipeline.spec.machine import bf16_warning, processor_flags

__all__ = ["bf16_notes", "say"]


def say(message: str) -> None:
    """Write a line to stderr on rank 0, or where there are no ranks."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"manycpu: {message}\n")
        sys.stderr.flush()


def bf16_notes(env: Mapping[str, str], *, bf16: bool) -> list[str]:
    """Explain what bf16 costs here, where an option asked for it: of the run's own dtype the CPU plan has."""
    warning = bf16_warning(processor_flags()) if bf16 and env.get("MANYCPU_DTYPE") != "bf16" else None
    return [warning] if warning else []
