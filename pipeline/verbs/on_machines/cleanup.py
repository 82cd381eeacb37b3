"""On machines a run owns its folder."""

from manycpu.pipeline.verbs.context import MachineContext
from manycpu.pipeline.verbs.on_machines import hosts

__all__ = ["keep", "remove"]


def keep(ctx: MachineContext) -> list[str]:
    """Name what is kept."""
    return [str(ctx.directory)]


def remove(ctx: MachineContext) -> list[str]:
    """Delete what the run owns; what is left."""
    return [*hosts.remove_folder(ctx, ctx.directory), *_remove(ctx)]


def _remove(ctx: MachineContext) -> list[str]:
    try:
        ctx.ledger.remove()
    except OSError as error:
        return [f"{ctx.directory}: {error}"]
    return [str(ctx.directory)] if ctx.directory.exists() else []
