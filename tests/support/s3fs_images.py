"""Images whose Python has s3fs: its packages, as a layer on an image of the test cluster."""

import tempfile
from functools import cache
from pathlib import Path

from cluster import layers
from cluster.command import run
from cluster.fixtures import TestCluster
from cluster.go import uv
from cluster.settings import PROJECT
from support.registry_images import with_layer

from manycpu.pipeline.targets.kubernetes.image.layers import Tree, tree


def images_with_s3fs(cluster: TestCluster) -> dict[str, str]:
    """Push images of ranks and helpers that have s3fs; return the target's fields that name them."""
    bases = {"image": "torch", "helper_image": "helper"}
    return {field: with_layer(cluster.image(base), _tree().layer, "s3fs") for field, base in bases.items()}


@cache
def _tree() -> Tree:
    version = layers.PYTHON[layers.suite()]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quiet", "--target", folder, "--python-version", version, "--only-binary", ":all:"]
        options += ["--constraint", str(PROJECT / "requirements" / "all.txt")]
        run([uv(), "pip", "install", *options, "s3fs"], seconds=600)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        packages = f"/usr/local/lib/python{version}/dist-packages"
        named = ((f"{packages}/{path.relative_to(folder)}", path) for path in files)
        return tree(named, "s3fs", None)
