"""Images whose Python has s3fs: its packages, as a layer on an image of the test cluster."""

import tempfile
from functools import cache
from pathlib import Path

from cluster import layers
from cluster.command import run
from cluster.go import uv
from cluster.settings import PROJECT
from support.registry_images import with_layer

from manycpu.pipeline.targets.kubernetes.image.layers import Tree, tree


@cache
def with_s3fs(image: str) -> str:
    """Push the image with s3fs; return its reference by digest."""
    return with_layer(image, _tree().layer, "s3fs")


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
