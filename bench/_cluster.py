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


@contextmanager
def namespace(prefix: str) -> Iterator[tuple[Cluster, Space]]:
    """Create a namespace of the benchmark's own, and delete it afterwards.

    Raises:
        SkippedError: This machine cannot run the cluster.
    """
    try:
        running = own.running()
        cluster = running or own.up()
    except MissingError as error:
        raise SkippedError(str(error)) from None
    try:
        with (
            own.in_use(),
            TemporaryDirectory() as folder,
            space.create(settings.kubeconfig(), Path(folder), prefix) as own_space,
        ):
            try:
                yield cluster, own_space
            finally:
                space.delete(own_space)
            space.wait_emptied(own_space)
    finally:
        if not running:
            own.down()


def target(cluster_space: Space, **more: Any) -> dict[str, Any]:
    """Return the fields of a target: a namespace, and the images of the test cluster."""
    return {
        "kind": "kubernetes",
        "namespace": cluster_space.name,
        "connection": str(cluster_space.kubeconfig),
        "registry": f"http://{settings.REGISTRY}/bench",
        "image": images.reference("torch"),
        "helper_image": images.reference("helper"),
        **more,
    }
