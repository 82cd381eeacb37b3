"""Find the runs that have begun, by their ledgers."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from manycpu.pipeline.ledger import Entry, Ledger
from manycpu.pipeline.ledger.file import FileLedger, ledgers
from manycpu.pipeline.spec.errors import ManycpuError, RunGoneError
from manycpu.pipeline.spec.extras import require
from manycpu.pipeline.targets.context import Access, RunContext
from manycpu.pipeline.targets.open_run import reopen

__all__ = ["find", "in_namespace", "on_this_machine", "reopen_folder"]


def find(ctx: RunContext) -> RunContext:
    """Return the run under the name that it began with: its fields, and so its name, may have been edited.

    Raises:
        ClusterError: The cluster does not answer.
    """
    if ctx.ledger.exists():
        return ctx
    names = ctx.driver.names(ctx)
    return replace(ctx, name=names[0]) if names else ctx


log: Final = logging.getLogger("manycpu.runs")


def on_this_machine(home: Path) -> list[RunContext]:
    """Find the runs in the folder of a target on machines, oldest first."""
    return _reopened(ledgers(home / "runs"), lambda entry: reopen(entry, str(home)))


def reopen_folder(directory: Path) -> RunContext:
    """Open the run whose own folder is ``directory``."""
    return reopen(FileLedger(directory).read(), str(directory.parents[1]))


def in_namespace(namespace: str, connection: str | None) -> list[RunContext]:
    """Find the runs of a namespace, oldest first.

    Args:
        namespace: The namespace.
        connection: Path of a kubeconfig; None: the default of ``target.connection``.

    Raises:
        ClusterError: The cluster cannot be reached, or refuses.
    """
    require("kubernetes", "--namespace", "Kubernetes")
    from manycpu.pipeline.adapters import cluster
    from manycpu.pipeline.ledger import configmap

    opened = cluster.Cluster(partial(cluster.connect, connection), namespace)
    access, ledgers = Access(opened={namespace: opened}), configmap.ledgers(opened)
    return _reopened(ledgers, lambda entry: reopen(entry, access=access))


def _reopened(ledgers: Iterable[Ledger], open_: Callable[[Entry], RunContext]) -> list[RunContext]:
    """Open the runs whose ledgers can be read, oldest first; log the errors of the others."""
    opened = []
    for ledger in ledgers:
        try:
            entry = ledger.read()
            opened.append((entry.created, open_(entry)))
        except (RunGoneError, PermissionError):
            continue  # it was just removed, or another user owns it
        except (ManycpuError, OSError) as error:
            log.warning("%s", error)
    return [ctx for _, ctx in sorted(opened, key=lambda pair: pair[0])]
