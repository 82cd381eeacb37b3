"""Runs that have begun, found by their ledgers."""

from functools import partial
from pathlib import Path

from manycpu.pipeline.ledger.file import FileLedger, ledgers
from manycpu.pipeline.verbs.context import Access, RunContext, reopen

__all__ = ["in_namespace", "on_this_machine", "reopen_folder"]


def on_this_machine(home: Path) -> list[RunContext]:
    """Find the runs whose folders are below a target's folder, oldest first."""
    return [reopen_folder(ledger.directory) for ledger in ledgers(home / "runs")]


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
    return [reopen(ledger.read(), access=access) for ledger in found]
