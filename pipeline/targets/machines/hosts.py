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
from manycpu.pipeline.ledger import Attempt, Entry
from manycpu.pipeline.ledger.file import OWNER
from manycpu.pipeline.spec.errors import ForeignRunError, LaunchError, recordable
from manycpu.pipeline.spec.placement import Host
from manycpu.pipeline.spec.targets import BareMetal, Local
from manycpu.pipeline.spec.validation import read_run, read_target
from manycpu.pipeline.targets.machines.context import MachineContext, directory_of

_LOG: Final = logging.getLogger(__name__)
HostGroup = tuple[BareMetal, tuple[Host, ...]]
"""Hosts, and the target whose ssh command reaches them."""


def _next_hosts(ctx: MachineContext) -> list[HostGroup]:
    """Return the hosts of the next attempt, as one group; none on ``local``."""
    return [(ctx.target, hosts.chosen(ctx.target, ctx.run))] if isinstance(ctx.target, BareMetal) else []


def recorded(
    entry: Entry, present: Local | BareMetal | None = None, attempt: Attempt | None = None
) -> list[HostGroup]:
    """Return hosts that have a folder of a run, as one group; none on ``local``.

    The hostfile is read only if the ledger does not name the hosts: it may have been edited since.

    Args:
        entry: The run.
        present: The target as it is now: its ssh command is newer than the recorded ones.
        attempt: The attempt whose hosts are meant; None: all hosts of the run.

    Raises:
        BadInputError: An older version recorded no hosts, and the hostfile cannot be used.
    """
    if attempt is not None and not isinstance(read_target(attempt.target), BareMetal):
        return []
    fields = [entry.described().target, entry.target, *(one.target for one in entry.attempts.values())]
    targets = [present, *map(read_target, fields)]  # the newest first, for its ssh command
    target = next((one for one in targets if isinstance(one, BareMetal)), None)
    if target is None:
        return []
    if attempt is not None and attempt.hosts:
        names = set(attempt.hosts)
    else:  # all hosts of the run; also if an older version did not record those of the attempt
        names = {*entry.hosts, *(name for one in entry.attempts.values() for name in one.hosts)}
    members = tuple(Host(name) for name in sorted(names))
    if not members and not entry.owner:  # an older version, which named no owner, recorded no hosts either
        members = hosts.chosen(target, read_run(entry.described().run))
    return [(target, members)] if members else []


def _folder_of(path: Path, entry: Entry) -> ssh.RunFolder:
    """Describe the run's folder on a host: its path, the file that marks its owner, and this run's mark."""
    return ssh.RunFolder(path, path / OWNER, entry.owner)


def claim(ctx: MachineContext, entry: Entry) -> None:
    """Make the run's folder on each host of the next attempt, and mark it as this run's.

    The hosts are recorded in the ledger first, so that the removal of the run finds them.

    Args:
        ctx: The run.
        entry: The ledger's entry; the caller holds the ledger's lock.

    Raises:
        ForeignRunError: Another run has the folder: another machine launched it, or its ledger is lost. The
            error names the first such host.
    """
    folder = directory_of(ctx)
    for target, members in _next_hosts(ctx):
        entry.hosts = tuple(sorted({*entry.hosts, *(host.name for host in members)}))
        ctx.ledger.save(entry)
        if not entry.owner:  # an older version made the run
            ssh.make_folder(target, members, folder)
            continue
        # On these hosts, a folder without a mark is this run's own.
        known = {name for attempt in entry.attempts.values() for name in attempt.hosts}
        for host, owner in ssh.claim(target, members, _folder_of(folder, entry), known).items():
            raise ForeignRunError(
                f"host {host.name} has a folder {folder} of another run: {owner}",
                fix="Give another run id; or delete that folder, if that run is not needed any more",
            )


def end_ranks(ctx: MachineContext, entry: Entry, needed: Container[str] = ()) -> None:
    """End ranks of earlier attempts that outlived the machine that launched them.

    Raises:
        LaunchError: A rank on one of the hosts ``needed`` by the next attempt does not end, or it cannot be
            seen whether it ended. For other hosts, that is only logged.
    """
    for target, members in recorded(entry, ctx.target):
        problems = ssh.end_ranks(target, members, _folder_of(directory_of(ctx), entry))
        for host, problem in problems.items():
            message = f"ranks of an earlier attempt may still run on host {host.name}: {problem}"
            if host.name in needed:
                raise LaunchError(message, field="target.hostfile")
            _LOG.warning("%s", message)


def _digests(manifest: transfer.Manifest) -> dict[str, str]:
    """Return path -> sha256 of a manifest's files."""
    return {file.path: file.sha256 for file in manifest.files}


def deliver(ctx: MachineContext, stored: transfer.Stored, in_use: Callable[[], bool]) -> bool:
    """Copy a folder to every host that lacks it; return whether at least one host received a copy.

    Args:
        ctx: The run.
        stored: The folder on this machine; its path is the same on the hosts.
        in_use: Returns whether a run of this machine trains on the folder.

    Raises:
        InUseError: A host has another folder of this name, which a training uses.
        ForeignRunError: The run's folder on a host belongs to another run of the same name.
        StageError: A copy differs from the source.
    """
    if not isinstance(ctx.target, BareMetal):
        return False
    with ctx.ledger.hold() as (entry, _):
        claim(ctx, entry)  # the run's folder there records the use of the copy
    delivery = ssh_copies.Delivery(stored.path, _digests(stored.manifest), directory_of(ctx))
    delivered = ssh_copies.deliver(ctx.target, hosts.chosen(ctx.target, ctx.run), delivery, in_use)
    if delivered.in_use:
        fault = f"{stored.path} is in use, and not what was staged, on {', '.join(delivered.in_use)}"
        _LOG.warning("%s: it stays, and this run's copy comes to a folder beside it", fault)
        raise transfer.InUseError(fault)
    return bool(delivered.copied)


def hosts_without(ctx: MachineContext, path: Path, manifest: transfer.Manifest) -> list[str]:
    """Name the hosts on which a path is missing, or differs from ``manifest``, that of the path here."""
    return [
        name
        for target, members in _next_hosts(ctx)
        for name in ssh_copies.hosts_without(target, members, path, _digests(manifest))
    ]


def names(ctx: MachineContext) -> tuple[str, ...]:
    """Return the names of the hosts that the next attempt runs on; empty on ``local``."""
    return tuple(host.name for _, members in _next_hosts(ctx) for host in members)


def make_folder(ctx: MachineContext, folder: Path) -> None:
    """Make a folder here, and on every host of the next attempt."""
    folder.mkdir(parents=True, exist_ok=True)
    for target, members in _next_hosts(ctx):
        ssh.make_folder(target, members, folder)


def copy_folder(ctx: MachineContext, source: Path | None, folder: Path) -> None:
    """Copy a folder to another path, here and within each host of the next attempt.

    The files of the copy are writable, even if those of the source are read-only. ``source`` None: an empty
    folder is made instead.
    """
    if source is None:
        make_folder(ctx, folder)
        return
    disk.copy(source, folder)
    for target, members in _next_hosts(ctx):
        ssh.copy_folder(target, members, source, folder)


def collect(ctx: MachineContext, attempt: int, folder: Path) -> None:
    """Copy the files that the ranks of an attempt wrote to a folder on each host to the same folder here."""
    entry = ctx.ledger.read()
    for target, members in recorded(entry, ctx.target, entry.described(attempt)):
        ssh_copies.collect(target, members, folder)


def holding_files(
    ctx: MachineContext,
    folder: Path,
    *patterns: str,
    but: Container[str] = (),
    attempt: int | None = None,
) -> list[str]:
    """List the hosts that have matching files below a folder, or may have them, as ``host:folder``.

    A host that cannot be reached, or has no such folder now, may have them.

    Args:
        ctx: The run.
        folder: The folder.
        patterns: Patterns for the files' paths below it; none: all files.
        but: Names of files that do not count.
        attempt: The attempt whose hosts are asked; None: all hosts of the run.
    """
    entry = ctx.ledger.read()
    of_attempt = None if attempt is None else entry.described(attempt)
    return [
        f"{host.name}:{folder}"
        for target, members in recorded(entry, ctx.target, of_attempt)
        for host, paths in ssh.holding_files(target, members, folder, *patterns).items()
        # None: the host has no such folder, or cannot be reached.
        if paths is None or any(Path(path).name not in but for path in paths)
    ]


def strays(ctx: MachineContext, folder: Path, code: Container[str], attempt: Attempt) -> list[str]:
    """Name files that a program wrote to the working folder of an attempt on hosts, as ``host:path``.

    Args:
        ctx: The run.
        folder: The attempt's folder.
        code: The files of its code, by path below that folder.
        attempt: The attempt.

    Returns:
        The files that this machine lacks. If the files of a host are unknown, the attempt's folder there.
    """
    found = []
    for target, members in recorded(ctx.ledger.read(), ctx.target, attempt):
        for host, paths in ssh.holding_files(target, members, folder, "work/*").items():
            if paths is None:  # the host cannot be reached, or has no such folder
                found.append(f"{host.name}:{folder}")
                continue
            # Machines may share the folder: a file that this one has too is found here.
            found += [
                recordable(f"{host.name}:{folder / path}")
                for path in paths
                if path not in code and "__pycache__" not in path and not os.path.lexists(folder / path)
            ]
    return found


def keep_only(ctx: MachineContext, folder: Path, names: Iterable[str]) -> None:
    """On hosts that can be reached, delete all but ``names`` in a run's folder and its attempts' folders."""
    entry = ctx.ledger.read()
    for target, members in recorded(entry, ctx.target):
        ssh.keep_only(target, members, _folder_of(folder, entry), names)


def remove_folder(path: Path, present: Local | BareMetal | None, timeout: float, entry: Entry) -> list[str]:
    """End a run's remaining ranks on its hosts, and delete its folder there.

    Args:
        path: The run's folder.
        present: The target as it is now; None: as it was recorded.
        timeout: Seconds for the deletion on each host.
        entry: The run.

    Returns:
        What is left, as ``host:folder``, or why ranks may still run.
    """
    folder, left = _folder_of(path, entry), []
    for target, members in recorded(entry, present):
        problems = ssh.end_ranks(target, members, folder)
        left += [f"{host.name}: {problem}" for host, problem in problems.items()]
        # A host whose ranks may still write keeps the folder: the next try deletes it.
        ended = [host for host in members if host not in problems]
        left += ssh.remove_folder(target, ended, folder, timeout)
    return left
