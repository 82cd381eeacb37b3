"""The collective backends: a name, and what makes it available.

Another backend is one more function and one more line: a function that registers it with
torch.distributed, or raises :class:`UnavailableError` with the reason.
"""

from collections.abc import Callable
from typing import Final

import torch
import torch.distributed

__all__ = ["BACKENDS", "UnavailableError"]


class UnavailableError(RuntimeError):
    """This backend cannot be had here; the message says why and what to do."""


def _gloo() -> None:
    if not torch.distributed.is_gloo_available():
        raise UnavailableError(
            f"torch {torch.__version__} was built without gloo; install torch from its wheels"
        )


def _mpi() -> None:
    if not torch.distributed.is_mpi_available():
        raise UnavailableError(
            f"torch {torch.__version__} was built without MPI, as all its wheels are; use gloo, which mpirun "
            "starts just as well, or a torch built with MPI (Debian's python3-torch is)"
        )


def _ccl() -> None:
    # Late: it needs a compiler, or what one has built.
    from manycpu.pipeline.node.ccl import register

    register()


BACKENDS: Final[dict[str, Callable[[], None]]] = {"gloo": _gloo, "mpi": _mpi, "ccl": _ccl}
