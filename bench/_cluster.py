"""The test cluster for benchmarks: the one that runs, or one that is started for as long as it takes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cluster import cluster as own
from cluster import images, settings, space
from cluster.cluster import Cluster
from cluster.command import MissingError
from cluster.space import Space

from bench._measure import SkippedError

__all__ = ["namespace", "target"]


@contextmanager
def namespace(prefix: str) -> Iterator[tuple[Cluster, Space]]:
    """Have a namespace of the benchmark's own.

    Raises:
        SkippedError: This machine cannot run the cluster.
    """
    try:
        there = own.running()
        cluster = there or own.up()
    except MissingError as error:
        raise SkippedError(str(error)) from None
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


def target(where: Space, **more: Any) -> dict[str, Any]:
    """Give the fields of a target: a namespace, and the images that are there."""
    return {
        "kind": "kubernetes",
        "namespace": where.name,
        "connection": str(where.kubeconfig),
        "registry": f"http://{settings.REGISTRY}/bench",
        "image": images.reference("torch"),
        "helper_image": images.reference("helper"),
        **more,
    }
