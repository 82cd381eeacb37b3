"""The backend asked for is the one used: init_process_group is wrapped, and watched."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed
from torch.distributed import distributed_c10d

from manycpu.pipeline.node.backends import BACKENDS, UnavailableError
from manycpu.pipeline.node.refusal import BACKEND, PROOF, Refusal
from manycpu.pipeline.node.speak import say, warn

__all__ = ["require", "was_initialised", "wrap"]

_INITIALISED: list[str] = []


def require(backend: str | None) -> None:
    """Make a backend available.

    Raises:
        Refusal: 88, with the reason.
    """
    if backend is None:
        return
    try:
        BACKENDS[backend]()
    except (UnavailableError, KeyError) as error:
        why = (
            error.args[0] if isinstance(error, UnavailableError) else f"one of {', '.join(BACKENDS)} is known"
        )
        raise Refusal(BACKEND, f"run.backend: {backend!r} cannot be had: {why}.") from error


def was_initialised() -> bool:
    """Whether the script ever had a process group."""
    return bool(_INITIALISED) or torch.distributed.is_initialized()


def wrap(backend: str | None, world_size: int) -> None:
    """Have every initialisation of the default process group use ``backend``; subgroups are left alone.

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
            _override(bound, backend)
        original(*bound.args, **bound.kwargs)
        _check(backend, world_size)

    _replace(original, init_process_group)


def _replace(original: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
    # device_mesh and others have bound the name at import.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("init_process_group") is original:
            module.init_process_group = wrapper  # type: ignore[attr-defined]


def _override(bound: inspect.BoundArguments, backend: str) -> None:
    asked = bound.arguments.get("backend")
    if asked is not None and _on_cpu(str(asked)) != backend:
        warn(f"the script asks for the backend {str(asked)!r}; run.backend is {backend!r}, which is used")
    bound.arguments["backend"] = backend


def _on_cpu(backend: str) -> str:
    """Find what a backend's name means for tensors on the CPU: ``cpu:gloo,cuda:nccl`` is gloo."""
    for part in backend.lower().split(","):
        device, separator, name = part.partition(":")
        if separator and device == "cpu":
            return name
    return backend.lower()


def _check(backend: str | None, world_size: int) -> None:
    seen, size = _on_cpu(distributed_c10d.get_backend_config()), torch.distributed.get_world_size()
    if backend is not None and seen != backend:
        raise Refusal(
            BACKEND, f"run.backend: {backend!r} was asked for, and torch.distributed uses {seen!r}."
        )
    if size != world_size:
        raise Refusal(
            PROOF,
            f"proof of scale failed: {world_size} ranks met, and the process group of backend {seen!r} has "
            f"{size}: two MPIs that do not match?",
        )
    _INITIALISED.append(seen)
    say("backend", asked=backend, observed=seen, world_size=size)
