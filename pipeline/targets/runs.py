"""Runs that have begun, found by their ledgers."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from manycpu.pipeline.ledger import Entry, Ledger
from manycpu.pipeline.ledger.file import FileLedger, ledgers
from manycpu.pipeline.spec.errors import ManycpuError, RunGoneError
from manycpu.pipeline.targets.context import Access, ClusterContext, MachineContext, RunContext
from manycpu.pipeline.targets.open_run import changed, reopen

__all__ = ["find", "in_namespace", "on_this_machine", "reopen_folder"]


def find(ctx: RunContext) -> RunContext:
    """Go on under the name that the run has begun with: names begin with fields, which may be edited.

    Raises:
        ClusterError: The cluster does not answer.
    """
    if ctx.ledger.exists():
        return ctx
    names = _names(ctx)
    return changed(ctx, name=names[0]) if names else ctx


def _names(ctx: RunContext) -> list[str]:
    if isinstance(ctx, ClusterContext):
        from manycpu.pipeline.ledger import configmap

        return configmap.names(ctx.cluster, ctx.key)
    if not isinstance(ctx, MachineContext):
        return []
    folders = (ctx.home / "runs").glob(f"*-{ctx.key}")
    return [folder.name for folder in folders if FileLedger(folder).exists()]


log: Final = logging.getLogger("manycpu.runs")


def on_this_machine(home: Path) -> list[RunContext]:
    """Find the runs whose folders are below a target's folder, oldest first."""
    return _reopened(ledgers(home / "runs"), lambda entry: reopen(entry, str(home)))


def reopen_folder(directory: Path) -> RunContext:
    """Go on with the run whose folder this is."""
    return reopen(FileLedger(directory).read(), str(directory.parents[1]))


def in_namespace(namespace: str, connection: str | None) -> list[RunContext]:
    """Find the runs of a namespace, oldest first.

    Args:
        namespace: The namespace.
        connection: Path of a kubeconfig; None: as ``target.connection`` says of its default.

    Raises:
        ClusterError: The cluster cannot be reached, or refuses.
    """
    from manycpu.pipeline.adapters import cluster
    from manycpu.pipeline.ledger import configmap

    access = Access(connect=partial(cluster.connect, connection))
    found = configmap.ledgers(cluster.Cluster(partial(cluster.connect, connection), namespace))
    return _reopened(found, lambda entry: reopen(entry, access=access))


def _reopened(found: Iterable[Ledger], open_: Callable[[Entry], RunContext]) -> list[RunContext]:
    """Go on with those whose ledgers can be read: the trouble of one is nobody else's."""
    opened = []
    for ledger in found:
        try:
            entry = ledger.read()
            opened.append((entry.created, open_(entry)))
        except RunGoneError:
            continue  # it ended just now
        except ManycpuError as error:
            log.warning("%s", error)
    return [ctx for _, ctx in sorted(opened, key=lambda pair: pair[0])]
