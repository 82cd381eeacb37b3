"""Work of the verbs on the hosts of a ``baremetal`` target; on ``local`` there is only this machine.

Each function raises a LaunchError if a host that it needs cannot be reached.
"""

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

_LOG: Final = logging.getLogger(__name__)
Places = list[tuple[BareMetal, tuple[Host, ...]]]


def _present(ctx: MachineContext) -> Places:
    """Return the target with the hosts of the next attempt; none on ``local``."""
    return [(ctx.target, hosts.chosen(ctx.target, ctx.run))] if isinstance(ctx.target, BareMetal) else []


def _of_all_attempts(ctx: MachineContext) -> Places:
    """List the present hosts of the run and those of its attempts: a hostfile may have been edited."""
    places = _present(ctx)
    known = {host.name for _, those in places for host in those}
    for attempt in ctx.ledger.read().attempts.values() if ctx.ledger.exists() else ():
        started, lacking = read_target(attempt.target), set(attempt.hosts) - known
        if isinstance(started, BareMetal) and lacking:
            places.append((started, tuple(map(Host, sorted(lacking)))))
            known |= lacking
    return places


def _sums(manifest: transfer.Manifest) -> dict[str, str]:
    return {file.path: file.sha256 for file in manifest.files}


def deliver(ctx: MachineContext, stored: transfer.Stored, in_use: Callable[[], bool]) -> bool:
    """Copy a folder to every host that does not have it yet; True: at least one host received a copy.

    Args:
        ctx: The run.
        stored: The folder; its path is the same on the hosts.
        in_use: Whether a run of this machine trains on the folder.

    Raises:
        InUseError: A host has another folder of this name, which a training uses.
        StageError: A copy differs from the source.
    """
    if not isinstance(ctx.target, BareMetal):
        return False
    delivery = ssh_copies.Delivery(stored.path, _sums(stored.manifest), directory_of(ctx))
    delivered = ssh_copies.deliver(ctx.target, hosts.chosen(ctx.target, ctx.run), delivery, in_use)
    if delivered.in_use:
        fault = f"{stored.path} is in use, and not what was staged, on {', '.join(delivered.in_use)}"
        _LOG.warning("%s: it stays, and this run's copy comes to a folder beside it", fault)
        raise transfer.InUseError(fault)
    return bool(delivered.copied)


def hosts_without(ctx: MachineContext, path: Path, manifest: transfer.Manifest) -> list[str]:
    """Name the hosts on which a file or folder differs from this machine."""
    places = _present(ctx)
    return [
        name
        for target, those in places
        for name in ssh_copies.hosts_without(target, those, path, _sums(manifest))
    ]


def names(ctx: MachineContext) -> tuple[str, ...]:
    """Return the names of the hosts that the next attempt runs on; empty on ``local``."""
    return tuple(host.name for _, those in _present(ctx) for host in those)


def make_folder(ctx: MachineContext, folder: Path) -> None:
    """Make a folder here and on every host."""
    folder.mkdir(parents=True, exist_ok=True)
    for target, those in _present(ctx):
        ssh.make_folder(target, those, folder)


def copy_folder(ctx: MachineContext, source: Path | None, folder: Path) -> None:
    """Copy a folder to another path, here and within every host; without a source, make an empty folder.

    The files of the copy are writable, even if those of the source are read-only.
    """
    if source is None:
        make_folder(ctx, folder)
        return
    disk.copy(source, folder)
    for target, those in _present(ctx):
        ssh.copy_folder(target, those, source, folder)


def collect(ctx: MachineContext, folder: Path) -> None:
    """Copy the files that the ranks wrote to a folder on each host to the same folder here."""
    for target, those in _present(ctx):
        ssh_copies.collect(target, those, folder)


def holding_files(ctx: MachineContext, folder: Path, *patterns: str) -> list[str]:
    """List the hosts that have matching files below a folder, or may have them, as ``host:folder``."""
    places = _of_all_attempts(ctx)
    holding = (ssh.holding_files(target, those, folder, *patterns) for target, those in places)
    return [f"{host.name}:{folder}" for found in holding for host in found]


def strays(ctx: MachineContext, attempt: Path, code: Container[str]) -> list[str]:
    """Name files that a program wrote to the working folder of an attempt on hosts, as ``host:path``.

    Args:
        ctx: The run.
        attempt: The attempt's folder.
        code: The files of its code, by path below the attempt's folder.

    Returns:
        The files that this machine lacks; the attempt's folder if a host cannot be reached.
    """
    places = _of_all_attempts(ctx)
    return [
        f"{host.name}:{attempt / path}"
        for target, those in places
        for host, paths in ssh.holding_files(target, those, attempt, "work/*").items()
        for path in ([""] if paths is None else paths)
        if path not in code and "__pycache__" not in path and not (path and os.path.lexists(attempt / path))
    ]


def keep_only(ctx: MachineContext, folder: Path, names: Iterable[str]) -> None:
    """Delete all but some names in a run's folder and its attempts' folders, on hosts that can be reached."""
    for target, those in _of_all_attempts(ctx):
        ssh.keep_only(target, those, folder, names)


def remove_folder(ctx: MachineContext, folder: Path) -> list[str]:
    """Delete a folder on every host; returns the folders that are left, as ``host:folder``."""
    places = _of_all_attempts(ctx)
    return [left for target, those in places for left in ssh.remove_folder(target, those, folder)]
