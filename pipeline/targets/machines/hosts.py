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
HostGroup = tuple[BareMetal, tuple[Host, ...]]
"""Hosts, and the target whose ssh command reaches them."""


def _next_hosts(ctx: MachineContext) -> list[HostGroup]:
    """Return the hosts of the next attempt, as one group; none on ``local``."""
    return [(ctx.target, hosts.chosen(ctx.target, ctx.run))] if isinstance(ctx.target, BareMetal) else []


def _all_hosts(ctx: MachineContext) -> list[HostGroup]:
    """Return the hosts of the next attempt and of all earlier ones: a hostfile may have been edited."""
    groups = _next_hosts(ctx)
    known = {host.name for _, members in groups for host in members}
    attempts = ctx.ledger.read().attempts.values() if ctx.ledger.exists() else ()
    for attempt in attempts:
        target, unlisted = read_target(attempt.target), set(attempt.hosts) - known
        if isinstance(target, BareMetal) and unlisted:
            groups.append((target, tuple(Host(name) for name in sorted(unlisted))))
            known |= unlisted
    return groups


def _digests(manifest: transfer.Manifest) -> dict[str, str]:
    """Return path -> sha256 of a manifest's files."""
    return {file.path: file.sha256 for file in manifest.files}


def deliver(ctx: MachineContext, stored: transfer.Stored, in_use: Callable[[], bool]) -> bool:
    """Copy a folder to every host that does not have it yet; return whether at least one host received it.

    Args:
        ctx: The run.
        stored: The folder on this machine; its path is the same on the hosts.
        in_use: Returns whether a run of this machine trains on the folder.

    Raises:
        InUseError: A host has another folder of this name, which a training uses.
        StageError: A copy differs from the source.
    """
    if not isinstance(ctx.target, BareMetal):
        return False
    delivery = ssh_copies.Delivery(stored.path, _digests(stored.manifest), directory_of(ctx))
    delivered = ssh_copies.deliver(ctx.target, hosts.chosen(ctx.target, ctx.run), delivery, in_use)
    if delivered.in_use:
        fault = f"{stored.path} is in use, and not what was staged, on {', '.join(delivered.in_use)}"
        _LOG.warning("%s: it stays, and this run's copy comes to a folder beside it", fault)
        raise transfer.InUseError(fault)
    return bool(delivered.copied)


def hosts_without(ctx: MachineContext, path: Path, manifest: transfer.Manifest) -> list[str]:
    """Name the hosts on which a path is missing, or its files differ from the manifest of those here."""
    return [
        name
        for target, members in _next_hosts(ctx)
        for name in ssh_copies.hosts_without(target, members, path, _digests(manifest))
    ]


def names(ctx: MachineContext) -> tuple[str, ...]:
    """Return the names of the hosts that the next attempt runs on; empty on ``local``."""
    return tuple(host.name for _, members in _next_hosts(ctx) for host in members)


def make_folder(ctx: MachineContext, folder: Path) -> None:
    """Make a folder here and on every host."""
    folder.mkdir(parents=True, exist_ok=True)
    for target, members in _next_hosts(ctx):
        ssh.make_folder(target, members, folder)


def copy_folder(ctx: MachineContext, source: Path | None, folder: Path) -> None:
    """Copy a folder to another path, here and within every host; without a source, make an empty folder.

    The files of the copy are writable, even if those of the source are read-only.
    """
    if source is None:
        make_folder(ctx, folder)
        return
    disk.copy(source, folder)
    for target, members in _next_hosts(ctx):
        ssh.copy_folder(target, members, source, folder)


def collect(ctx: MachineContext, folder: Path) -> None:
    """Copy the files that the ranks wrote to a folder on each host to the same folder here."""
    for target, members in _next_hosts(ctx):
        ssh_copies.collect(target, members, folder)


def holding_files(ctx: MachineContext, folder: Path, *patterns: str, but: Container[str] = ()) -> list[str]:
    """List the hosts that have matching files below a folder, or may have them, as ``host:folder``.

    Files whose names are in ``but`` do not count.
    """
    return [
        f"{host.name}:{folder}"
        for target, members in _all_hosts(ctx)
        for host, paths in ssh.holding_files(target, members, folder, *patterns).items()
        if paths is None or any(Path(path).name not in but for path in paths)  # None: it cannot be reached
    ]


def strays(ctx: MachineContext, attempt: Path, code: Container[str], among: Container[str] = ()) -> list[str]:
    """Name files that a program wrote to the working folder of an attempt on hosts, as ``host:path``.

    Args:
        ctx: The run.
        attempt: The attempt's folder.
        code: The files of its code, by path below the attempt's folder.
        among: The names of its hosts; empty: they are unknown, and all hosts of the run are asked.

    Returns:
        The files that this machine lacks; of a host whose files are unknown, the attempt's folder.
    """
    strays = []
    for target, members in _all_hosts(ctx):
        asked = [host for host in members if not among or host.name in among]
        for host, paths in ssh.holding_files(target, asked, attempt, "work/*").items():
            if paths is None:  # the host cannot be reached, or has no such folder
                strays.append(f"{host.name}:{attempt}")
                continue
            strays += [
                f"{host.name}:{attempt / path}"
                for path in paths
                if path not in code and "__pycache__" not in path and not os.path.lexists(attempt / path)
            ]
    return strays


def keep_only(ctx: MachineContext, folder: Path, names: Iterable[str]) -> None:
    """On hosts that can be reached, delete all but ``names`` in a run's folder and its attempts' folders."""
    for target, members in _all_hosts(ctx):
        ssh.keep_only(target, members, folder, names)


def remove_folder(ctx: MachineContext, folder: Path) -> list[str]:
    """Delete a folder on every host; returns the folders that are left, as ``host:folder``."""
    return [
        left for target, members in _all_hosts(ctx) for left in ssh.remove_folder(target, members, folder)
    ]
