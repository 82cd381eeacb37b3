"""What the verbs do on the hosts of a ``baremetal`` target; on ``local`` this machine is all there is."""

import logging
import os
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Final

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters import disk, hosts, ssh, ssh_copies
from manycpu.pipeline.spec.placement import Host
from manycpu.pipeline.spec.targets import BareMetal
from manycpu.pipeline.spec.validation import read_target
from manycpu.pipeline.targets.machines.context import MachineContext, directory_of

__all__ = [
    "collect",
    "copy_folder",
    "deliver",
    "holding_files",
    "hosts_without",
    "keep_only",
    "make_folder",
    "names",
    "remove_folder",
    "strays",
]

_LOG: Final = logging.getLogger(__name__)


def deliver(ctx: MachineContext, stored: transfer.Stored, in_use: Callable[[], bool]) -> bool:
    """Copy a folder to every host that does not have it yet; True where there was any.

    Args:
        ctx: The run.
        stored: The folder, here as on the hosts.
        in_use: Tells whether a run of this machine trains on it.

    Raises:
        InUseError: A host has something else under that name, which is in use.
        LaunchError: A host cannot be reached.
        StageError: A copy is not what its source is.
    """
    if not isinstance(ctx.target, BareMetal):
        return False
    files = {file.path: file.sha256 for file in stored.manifest.files}
    delivery = ssh_copies.Delivery(stored.path, files, directory_of(ctx))
    delivered = ssh_copies.deliver(ctx.target, _hosts(ctx, ctx.target), delivery, in_use)
    if delivered.in_use:
        fault = f"{stored.path} is in use, and not what was staged, on {', '.join(delivered.in_use)}"
        _LOG.warning("%s: it stays, and this run's copy comes to a folder beside it", fault)
        raise transfer.InUseError(fault)
    return bool(delivered.copied)


def hosts_without(ctx: MachineContext, path: Path, manifest: transfer.Manifest) -> list[str]:
    """Name the hosts on which a file or folder is not what it is here.

    Raises:
        LaunchError: A host cannot be reached.
    """
    if not isinstance(ctx.target, BareMetal):
        return []
    files = {file.path: file.sha256 for file in manifest.files}
    return ssh_copies.hosts_without(ctx.target, _hosts(ctx, ctx.target), path, files)


def names(ctx: MachineContext) -> tuple[str, ...]:
    """Name the hosts that the next attempt runs on."""
    return tuple(host.name for host in _hosts(ctx, ctx.target)) if isinstance(ctx.target, BareMetal) else ()


def make_folder(ctx: MachineContext, folder: Path) -> None:
    """Make a folder here and on every host.

    Raises:
        LaunchError: A host cannot be reached, or the folder not be made there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(ctx.target, BareMetal):
        ssh.make_folder(ctx.target, _hosts(ctx, ctx.target), folder)


def copy_folder(ctx: MachineContext, source: Path | None, folder: Path) -> None:
    """Copy a folder to another place, here and on every host that has it; None is an empty folder.

    Its files may be written to, also where those of the source may not.

    Raises:
        LaunchError: A host cannot be reached, or the folder not be copied there.
        OSError: It cannot be copied here.
    """
    if source is None:
        make_folder(ctx, folder)
        return
    disk.copy(source, folder)
    if isinstance(ctx.target, BareMetal):
        ssh.copy_folder(ctx.target, _hosts(ctx, ctx.target), source, folder)


def collect(ctx: MachineContext, folder: Path) -> None:
    """Bring what the ranks wrote on each host to this machine.

    Raises:
        ExportError: Two hosts have different files of one name.
        StageError: A copy is not what was sent.
        LaunchError: A host cannot be reached.
    """
    if isinstance(ctx.target, BareMetal):
        ssh_copies.collect(ctx.target, _hosts(ctx, ctx.target), folder)


def holding_files(ctx: MachineContext, folder: Path, *patterns: str) -> list[str]:
    """List the hosts that have files below a folder that match, or cannot be asked, as ``host:folder``."""
    return [f"{host.name}:{folder}" for host in _holding(ctx, folder, *patterns)]


def strays(ctx: MachineContext, attempt: Path, code: Container[str]) -> list[str]:
    """Name files that came into the working folder of an attempt on hosts, as ``host:path``.

    Args:
        ctx: The run.
        attempt: The attempt's folder.
        code: The files of its code, by path below that.

    Returns:
        What this machine does not have too; of a host that cannot be asked, the attempt's folder.
    """
    holding = _holding(ctx, attempt, "work/*")
    return [
        f"{host.name}:{attempt / path}"
        for host, paths in holding.items()
        for path in ([""] if paths is None else paths)
        if path not in code and "__pycache__" not in path and not (path and os.path.lexists(attempt / path))
    ]


def keep_only(ctx: MachineContext, folder: Path, names: Iterable[str]) -> None:
    """Delete all but such names in a run's folder and in those of its attempts, on every host."""
    for target, those in _of_all_attempts(ctx):
        ssh.keep_only(target, those, folder, names)


def remove_folder(ctx: MachineContext, folder: Path) -> list[str]:
    """Delete a folder on every host; returns what is left, and where."""
    places = _of_all_attempts(ctx)
    return [left for target, those in places for left in ssh.remove_folder(target, those, folder)]


def _hosts(ctx: MachineContext, target: BareMetal) -> tuple[Host, ...]:
    return hosts.chosen(target, ctx.run)


def _of_all_attempts(ctx: MachineContext) -> list[tuple[BareMetal, tuple[Host, ...]]]:
    """List the hosts that the run has now, and those of its attempts: fields are edited, as is a hostfile."""
    places = [(ctx.target, _hosts(ctx, ctx.target))] if isinstance(ctx.target, BareMetal) else []
    known = {host.name for _, those in places for host in those}
    for attempt in ctx.ledger.read().attempts.values() if ctx.ledger.exists() else ():
        started, lacking = read_target(attempt.target), set(attempt.hosts) - known
        if isinstance(started, BareMetal) and lacking:
            places.append((started, tuple(map(Host, sorted(lacking)))))
            known |= lacking
    return places


def _holding(ctx: MachineContext, folder: Path, *patterns: str) -> dict[Host, list[str] | None]:
    holding: dict[Host, list[str] | None] = {}
    for target, those in _of_all_attempts(ctx):
        holding |= ssh.holding_files(target, those, folder, *patterns)
    return holding
