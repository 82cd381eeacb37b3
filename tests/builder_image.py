"""An image with buildah for the builder pods of tests: Debian's, made once as the cluster's images are."""

import hashlib
import inspect
import shutil
from collections.abc import Sequence
from pathlib import Path

from cluster import images, layers
from cluster.command import run
from cluster.images import Image
from cluster.registry import Layer
from cluster.settings import cache

PACKAGES = ("buildah", "ca-certificates")


def reference() -> str:
    """How a pod names it; made and pushed if the registry lacks it."""
    config = {"Env": [images.PATH], "Cmd": ["bash"]}
    inputs = (inspect.getsource(inspect.getmodule(reference) or reference), layers.suite(), str(config))
    tag = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:12]
    image = Image("builder", tag, config, _make)
    images.publish([image])
    return image.reference


def _make() -> Sequence[Layer]:
    workshop = cache() / "images.part"
    root = workshop / "builder"
    left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in layers.LEFT_OUT]
    lists = ("/etc/apt/sources.list", "/etc/apt/sources.list.d/debian.sources")
    sources = [file for file in map(Path, lists) if file.exists()]
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", f"--include={','.join(PACKAGES)}"]
    trim = "--customize-hook=rm -rf $1/var/lib/apt/lists/* $1/var/cache/apt/*"
    run([*command, *left_out, trim, layers.suite(), root, *sources], seconds=600)
    shutil.rmtree(root / "dev")
    (root / "dev").mkdir()
    return [layers.pack(root, workshop / "builder.tar.zst")]
