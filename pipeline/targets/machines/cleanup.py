"""Clean up a run on machines: it owns its folder."""

from collections.abc import Callable

from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.targets.context import MachineContext, RunContext
from manycpu.pipeline.targets.machines import hosts

__all__ = ["keep", "owns", "remove", "remove_expired"]


def keep(ctx: MachineContext, seconds: float | None) -> list[str]:
    """Record for how long a run is kept (None: for ever); returns what is kept."""
    ctx.ledger.keep(seconds)
    return [str(ctx.directory)]


def owns(ctx: MachineContext, what: str) -> bool:
    """Whether a path belongs to the run: what later runs reuse is beside its folder."""
    return what.startswith(f"{ctx.directory}/")


def remove(ctx: MachineContext) -> list[str]:
    """Delete what the run owns; returns what is left."""
    return [*hosts.remove_folder(ctx, ctx.directory), *_remove(ctx)]


def _remove(ctx: MachineContext) -> list[str]:
    try:
        ctx.ledger.remove()
    except OSError as error:
        return [f"{ctx.directory}: {error}"]
    return [str(ctx.directory)] if ctx.directory.exists() else []


def remove_expired(
    ctx: MachineContext,  # noqa: ARG001 - as everywhere
    now: float,  # noqa: ARG001 - as everywhere
    undelivered: Callable[[RunContext], bool],  # noqa: ARG001 - as everywhere
) -> list[Finding]:
    """Remove nothing: runs that are kept on machines have no time limit; `manycpu clean` removes them."""
    return []
