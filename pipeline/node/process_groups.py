"""Use the backend that was asked for: what makes process groups is wrapped, and watched."""

import functools
import inspect
import mmap
import sys
from collections.abc import Callable
from typing import Any, Final

import torch.distributed
from torch.distributed import DistError, PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from manycpu.pipeline.node import accelerate_world
from manycpu.pipeline.node.backends import BACKENDS, UnavailableError
from manycpu.pipeline.node.emit import say, warn
from manycpu.pipeline.node.node_exit import BACKEND, PROOF, NodeExit
from manycpu.pipeline.node.requested_world import AUTO

__all__ = ["awaited", "lacking", "require", "was_initialised", "wrap"]

_INITIALISED: Final = mmap.mmap(-1, 1)  # a flag, shared with what the script forks


def require(backend: str) -> None:
    """Make a backend available.

    Raises:
        NodeExit: 88, with the reason.
    """
    if why := lacking(backend):
        raise NodeExit(BACKEND, f"run.backend: {backend!r} cannot be had: {why}.")


def awaited(backend: str | None) -> str:
    """Name what making a backend available waits for; empty where that takes no time, or it cannot be had.

    Args:
        backend: The one asked for, or ``auto``.
    """
    if backend not in ("ccl", AUTO):
        return ""
    try:
        # Late: it needs what this torch may lack.
        from manycpu.pipeline.node.ccl import awaited

        return awaited()
    except Exception:  # noqa: BLE001 - lacking() has the reason
        return ""


def lacking(backend: str) -> str:
    """Make a backend available; the reason where it cannot be, empty where it can."""
    if backend not in BACKENDS:
        return f"one of {', '.join(BACKENDS)} is known"
    try:
        BACKENDS[backend]()
    except UnavailableError as error:
        return str(error.args[0])
    except Exception as error:  # noqa: BLE001 - a full disk, a compiler that cannot be run: all of it is a reason
        return f"{type(error).__name__}: {error}"
    return ""


def was_initialised() -> bool:
    """Whether the script ever had a process group, be it in a process that it forked."""
    return bool(_INITIALISED[0]) or torch.distributed.is_initialized()


def wrap(backend: str | None, world_size: int) -> None:
    """Have every initialisation of the default process group use ``backend``.

    Subgroups have the backend that the script gives them: the same on each of their ranks, or none is made.

    Args:
        backend: The one asked for; None leaves the choice to the script.
        world_size: How many ranks met: the group must be as large.
    """
    original = distributed_c10d.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if backend is not None:
            _override(bound, backend, by=sys._getframe(1).f_globals.get("__name__", ""))  # noqa: SLF001 - no other way
        original(*bound.args, **bound.kwargs)
        _check(backend, world_size)

    _replace(original, init_process_group)
    maker = distributed_c10d._new_process_group_helper  # noqa: SLF001 - the one door for every kind of group
    _replace(maker, _alike(maker))


def _replace(original: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
    # device_mesh and others have bound the name at import.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(original.__name__) is original:
            setattr(module, original.__name__, wrapper)


def _alike(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have the ranks of a subgroup compare their backends first: else they wait for each other in vain."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        # The default group has no list of ranks; whoever is no member has no rank; torch's mpi has no store.
        has_place = arguments["group_rank"] is not None and arguments["store"] is not None
        if has_place and arguments["global_ranks_in_group"]:
            _compare(arguments)
        return original(*args, **kwargs)

    return make


def _compare(arguments: dict[str, Any]) -> None:
    members = arguments["global_ranks_in_group"]
    place = PrefixStore(f"manycpu/backend/{arguments['group_name']}", arguments["store"])
    place.set(str(arguments["group_rank"]), _on_cpu(str(arguments["backend"])))
    seats = [str(number) for number in range(len(members))]
    try:
        place.wait(seats, arguments.get("timeout") or distributed_c10d.default_pg_timeout)
    except DistError as error:
        missing = [rank for rank, seat in zip(members, seats, strict=True) if not place.check([seat])]
        raise DistError(f"ranks {missing} did not come to make the group of ranks {members}") from error
    backends = [place.get(seat).decode() for seat in seats]
    if len(set(backends)) > 1:
        choices = ", ".join(f"rank {rank} {name}" for rank, name in zip(members, backends, strict=True))
        raise NodeExit(BACKEND, f"the ranks of a group ask for different backends: {choices}.")


def _override(bound: inspect.BoundArguments, backend: str, by: str) -> None:
    requested = bound.arguments.get("backend")
    if by == "accelerate.state":  # its own default, which nobody chose
        accelerate_world.tell_backend(backend)
    elif requested is not None and _on_cpu(str(requested)) != backend:
        why = "as run.backend or the ranks chose"
        warn(f"the script asks for the backend {str(requested)!r}; {backend!r} is used, {why}")
    bound.arguments["backend"] = backend


def _on_cpu(backend: str) -> str:
    """Map a backend's name to the one for tensors on the CPU: ``cpu:gloo,cuda:nccl`` is gloo."""
    for part in backend.lower().split(","):
        device, separator, name = part.partition(":")
        if separator and device == "cpu":
            return name
    return backend.lower()


def _check(backend: str | None, world_size: int) -> None:
    observed, size = _on_cpu(distributed_c10d.get_backend_config()), torch.distributed.get_world_size()
    if backend is not None and observed != backend:
        raise NodeExit(
            BACKEND, f"run.backend: {backend!r} was asked for, and torch.distributed uses {observed!r}."
        )
    if size != world_size:
        raise NodeExit(
            PROOF,
            f"proof of scale failed: {world_size} ranks met, and the process group of backend {observed!r} "
            f"has {size}: two MPIs that do not match?",
        )
    _INITIALISED[0] = 1
    say("backend", requested=backend, observed=observed, world_size=size)
