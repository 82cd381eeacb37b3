"""The collective backends: make one available, and have every process group use the one that was chosen.

Another backend is one more function and one more line in :data:`BACKENDS`: the function registers it with
torch.distributed, or raises :class:`UnavailableError` with the reason.
"""

import functools
import inspect
import mmap
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed
from torch.distributed import DistError, PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from manycpu.pipeline.node import accelerate_world
from manycpu.pipeline.node.emit import NodeExit, say, warn
from manycpu.pipeline.node.world import AUTO
from manycpu.pipeline.spec.exit_records import EXIT_BACKEND, EXIT_PROOF

_INITIALISED: Final = mmap.mmap(-1, 1)  # a flag in memory that the script's forks share


class UnavailableError(RuntimeError):
    """This backend cannot be used here; the message says why and what to do."""


def _gloo() -> None:
    """Check that this torch has gloo, which torch itself registers; else raise UnavailableError."""
    if not torch.distributed.is_gloo_available():
        raise UnavailableError(
            f"torch {torch.__version__} was built without gloo; install torch from its wheels"
        )


def _mpi() -> None:
    """Check that this torch has MPI, which torch itself registers; else raise UnavailableError."""
    if not torch.distributed.is_mpi_available():
        raise UnavailableError(
            f"torch {torch.__version__} was built without MPI, as all its wheels are; use gloo, which mpirun "
            "starts just as well, or a torch built with MPI (Debian's python3-torch is)"
        )


def _ccl() -> None:
    """Register ccl (Intel oneCCL) with torch, and build it first where that is needed."""
    # Late: it needs a compiler, or a library that a compiler has built.
    from manycpu.pipeline.node.ccl import register

    register()


BACKENDS: Final[dict[str, Callable[[], None]]] = {"gloo": _gloo, "mpi": _mpi, "ccl": _ccl}


def require(backend: str) -> None:
    """Make a backend available, or end the rank with exit code 88 and the reason."""
    if why := why_unavailable(backend):
        raise NodeExit(EXIT_BACKEND, f"run.backend: {backend!r} is not available: {why}.")


def awaited(backend: str | None) -> str:
    """Describe what :func:`require` and :func:`why_unavailable` wait for; empty: for nothing, or they fail.

    Only ccl takes time, because it may have to be built.
    """
    if backend not in ("ccl", AUTO):
        return ""
    try:
        # Late: it needs what this torch may lack.
        from manycpu.pipeline.node.ccl import describe_wait

        return describe_wait()
    except Exception:  # noqa: BLE001 - why_unavailable() has the reason
        return ""


def why_unavailable(backend: str) -> str:
    """Make a backend available; returns why that is not possible, or an empty text if it is available."""
    if backend not in BACKENDS:
        return f"one of {', '.join(BACKENDS)} is known"
    try:
        BACKENDS[backend]()
    except UnavailableError as error:
        return str(error.args[0])
    except Exception as error:  # noqa: BLE001 - also a full disk, or a compiler that does not run, is a reason
        return f"{type(error).__name__}: {error}"
    return ""


def was_initialised() -> bool:
    """Whether the script has initialised a process group, in this process or in one that it forked."""
    return bool(_INITIALISED[0]) or torch.distributed.is_initialized()


def wrap(backend: str | None, world_size: int) -> None:
    """Have every initialisation of the default process group use ``backend``; None: the script chooses.

    The default group must have ``world_size`` ranks, as many as have met. For subgroups the script chooses
    the backend. If the ranks of a subgroup choose different backends, making the subgroup fails.
    """
    original = distributed_c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        """Make the default group with ``backend``; warn if the script asks for another; check the group."""
        bound = signature.bind(*args, **kwargs)
        if backend is not None:
            requested = bound.arguments.get("backend")
            caller = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - nothing else names it
            if caller == "accelerate.state":  # it asks for its own default, which the user did not choose
                accelerate_world.set_backend(backend)
            elif requested is not None and _on_cpu(str(requested)) != backend:
                why = "as run.backend or the ranks chose"
                warn(f"the script asks for the backend {str(requested)!r}; {backend!r} is used, {why}")
            bound.arguments["backend"] = backend
        original(*bound.args, **bound.kwargs)
        _check_group(backend, world_size)

    _replace(original, init_process_group)
    helper = distributed_c10d._new_process_group_helper  # noqa: SLF001 - every kind of group is made by it
    _replace(helper, _compare_first(helper))


def _replace(original: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
    """Replace a function in all modules that have it under its name."""
    # Some, such as device_mesh, have imported the function itself.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(original.__name__) is original:
            setattr(module, original.__name__, wrapper)


def _compare_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's function that makes groups: the ranks of a subgroup first compare their backends.

    With different backends, torch would hang.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        """Compare the backends of a subgroup's ranks, and make the group."""
        arguments = signature.bind(*args, **kwargs).arguments
        # A process outside of the subgroup has no rank in it; torch's mpi has no store to compare over; the
        # default group has no list of ranks.
        can_compare = arguments["group_rank"] is not None and arguments["store"] is not None
        if can_compare and arguments["global_ranks_in_group"]:
            _compare(arguments)
        return original(*args, **kwargs)

    return make_group


def _compare(arguments: dict[str, Any]) -> None:
    """Exchange the backends of a group's ranks over its store.

    Raises:
        DistError: A rank did not come in time; the message names the missing ones.
        NodeExit: The backends differ.
    """
    members = arguments["global_ranks_in_group"]
    store = PrefixStore(f"manycpu/backend/{arguments['group_name']}", arguments["store"])
    store.set(str(arguments["group_rank"]), _on_cpu(str(arguments["backend"])))
    keys = [str(number) for number in range(len(members))]
    try:
        store.wait(keys, arguments.get("timeout") or distributed_c10d.default_pg_timeout)
    except DistError as error:
        missing = [rank for rank, key in zip(members, keys, strict=True) if not store.check([key])]
        raise DistError(f"ranks {missing} did not come to make the group of ranks {members}") from error
    backends = [store.get(key).decode() for key in keys]
    if len(set(backends)) > 1:
        choices = ", ".join(f"rank {rank} {name}" for rank, name in zip(members, backends, strict=True))
        raise NodeExit(EXIT_BACKEND, f"the ranks of a group ask for different backends: {choices}.")


def _on_cpu(backend: str) -> str:
    """Read the backend for tensors on the CPU from its name: ``cpu:gloo,cuda:nccl`` is gloo."""
    # Device -> backend; a name without a colon gives the backend as the key, and an empty value.
    parts = dict(part.partition(":")[::2] for part in backend.lower().split(","))
    return parts.get("cpu") or backend.lower()


def _check_group(backend: str | None, world_size: int) -> None:
    """Check the backend and the size of the default group that torch has made; record and report it.

    Another backend ends the rank with exit code 88, another size with 87.
    """
    observed = _on_cpu(distributed_c10d.get_backend_config())
    size = torch.distributed.get_world_size()
    if backend is not None and observed != backend:
        raise NodeExit(
            EXIT_BACKEND, f"run.backend: {backend!r} was asked for, and torch.distributed uses {observed!r}."
        )
    if size != world_size:
        raise NodeExit(
            EXIT_PROOF,
            f"proof of scale failed: {world_size} ranks met, and the process group of backend {observed!r} "
            f"has {size}: two MPIs that do not match?",
        )
    _INITIALISED[0] = 1
    say("backend", requested=backend, observed=observed, world_size=size)
