"""The test cluster for benchmarks: the one that runs, or one that is started for as long as it takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster import cluster as own
from cluster import settings, space
from cluster.cluster import Cluster
from cluster.space import Space

__all__ = ["namespace"]


@contextmanager
def namespace(prefix: str) -> Iterator[tuple[Cluster, Space]]:
    """Have a namespace of the benchmark's own.

    Raises:
        MissingError: This machine cannot run the cluster.
    """
    there = own.running()
    cluster = there or own.up()
    try:
        with (
            own.in_use(),
            TemporaryDirectory() as folder,
            space.create(settings.kubeconfig(), Path(folder), prefix) as made,
        ):
            yield cluster, made
            space.delete(made)
            space.wait_emptied(made)
    finally:
        if not there:
            own.down()
