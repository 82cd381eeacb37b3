"""See that Accelerate takes the ranks for one world: on CPUs it does so only where it is told of them."""

import functools
import inspect
import os
import sys
from typing import Any, Final

from manycpu.pipeline.node.emit import warn
from manycpu.pipeline.node.node_exit import NEVER_INITIALISED, NodeExit
from manycpu.pipeline.node.rank_environment import Rank
from manycpu.pipeline.spec.words import is_true

__all__ = ["check", "prepare", "tell_backend", "widen_fp16"]

_VARIABLE: Final = "ACCELERATE_USE_CPU"


def prepare(rank: Rank) -> None:
    """Tell Accelerate of CPUs, where there are several ranks; only what the run itself names wins."""
    if rank.world_size == 1:  # it would wrap the model of a rank alone for a world of several
        return
    if _VARIABLE not in os.environ.get("MANYCPU_USER_ENV", "").split(","):
        os.environ[_VARIABLE] = "true"
        return
    value = os.environ.get(_VARIABLE, "")
    if not is_true(value) and rank.local_rank == 0:
        warn(f"run.env sets {_VARIABLE} to {value!r}: Accelerate may take each rank for a world of its own")


def tell_backend(backend: str) -> None:
    """Have Accelerate's state name the backend that is used, where it is being made: it takes its default."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    shared = getattr(state, "_shared_state", {})
    if shared.get("backend"):  # without one it takes each rank for a world of its own
        shared["backend"] = backend


def widen_fp16() -> None:
    """Have ``Accelerator(mixed_precision="fp16")`` mean bf16, aloud: it would be fp32, silently."""
    from accelerate import Accelerator

    original = Accelerator.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        if str(bound.arguments.get("mixed_precision")) == "fp16":
            warn("mixed_precision 'fp16' becomes 'bf16': CPUs have no fp16 to train in")
            bound.arguments["mixed_precision"] = "bf16"
        original(*bound.args, **bound.kwargs)

    Accelerator.__init__ = init


def check(program: str, world_size: int) -> None:
    """See how large a world Accelerate made of the ranks, where the script used it.

    Raises:
        NodeExit: 86, another than the ranks that met.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    size = getattr(state, "_shared_state", {}).get("num_processes", world_size)
    if size == world_size:
        return
    raise NodeExit(
        NEVER_INITIALISED,
        f"{program} ended with a state of Accelerate for a world of {size}, although {world_size} ranks met: "
        "each of them trained alone. Accelerate's first object decides, and must be told of CPUs: begin with "
        "Accelerator(cpu=True) or PartialState(cpu=True), and leave ACCELERATE_USE_CPU out of run.env.",
    )
