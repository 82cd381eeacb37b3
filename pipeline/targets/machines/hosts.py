"""What the verbs do on the hosts of a ``baremetal`` target; on ``local`` this machine is all there is."""

from pathlib import Path

from manycpu.pipeline.adapters import hosts, ssh
from manycpu.pipeline.spec.placement import Host
from manycpu.pipeline.spec.targets import BareMetal
from manycpu.pipeline.targets.context import MachineContext

__all__ = ["collect", "deliver", "make_folder", "remove_folder"]


def deliver(ctx: MachineContext, folder: Path) -> bool:
    """Copy a folder to every host that does not see it yet; True where there was any.

    Raises:
        LaunchError: A host cannot be reached.
        StageError: A copy is not what its source is.
    """
    target = ctx.target
    return isinstance(target, BareMetal) and bool(ssh.deliver(target, _hosts(ctx, target), folder))


def make_folder(ctx: MachineContext, folder: Path) -> None:
    """Make a folder here and on every host.

    Raises:
        LaunchError: A host cannot be reached, or the folder not be made there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(ctx.target, BareMetal):
        ssh.make_folder(ctx.target, _hosts(ctx, ctx.target), folder)


def collect(ctx: MachineContext, folder: Path) -> None:
    """Bring what the ranks wrote on each host to this machine.

    Raises:
        ExportError: Two hosts have different files of one name.
        StageError: A copy is not what was sent.
        LaunchError: A host cannot be reached.
    """
    if isinstance(ctx.target, BareMetal):
        ssh.collect(ctx.target, _hosts(ctx, ctx.target), folder)


def remove_folder(ctx: MachineContext, folder: Path) -> list[str]:
    """Delete a folder on every host; returns what is left, and where."""
    if not isinstance(ctx.target, BareMetal):
        return []
    return ssh.remove_folder(ctx.target, _hosts(ctx, ctx.target), folder)


def _hosts(ctx: MachineContext, target: BareMetal) -> tuple[Host, ...]:
    return hosts.chosen(target, ctx.run)
