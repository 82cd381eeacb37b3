"""An image with buildah for the builder pods of tests: Debian's, made once as the cluster's images are."""

import hashlib
import inspect
import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from cluster import images, layers
from cluster.command import run
from cluster.images import Image
from cluster.registry import Layer
from cluster.settings import cache

from manycpu.pipeline.adapters.registry import Repository, of_bytes
from manycpu.pipeline.adapters.registry_http import Connection
from manycpu.pipeline.spec.image import Image as Made
from manycpu.pipeline.spec.image import Reference, sha256

PACKAGES = ("buildah", "ca-certificates")


def reference() -> str:
    """How a pod names it; made and pushed if the registry lacks it."""
    config = {"Env": [images.PATH], "Cmd": ["bash"]}
    inputs = (inspect.getsource(_make), str(PACKAGES), layers.suite(), str(config))
    tag = hashlib.sha256("\n".join(inputs).encode()).hexdigest()[:12]
    image = Image("builder", tag, config, _make)
    images.publish([image])
    return image.reference


def _make() -> Sequence[Layer]:
    workshop = cache() / "builder.part"  # not the other images': tests of another session may clear that
    shutil.rmtree(workshop, ignore_errors=True)
    workshop.mkdir(parents=True)
    root = workshop / "root"
    left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in layers.LEFT_OUT]
    lists = ("/etc/apt/sources.list", "/etc/apt/sources.list.d/debian.sources")
    sources = [file for file in map(Path, lists) if file.exists()]
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", f"--include={','.join(PACKAGES)}"]
    trim = "--customize-hook=rm -rf $1/var/lib/apt/lists/* $1/var/cache/apt/*"
    run([*command, *left_out, trim, layers.suite(), root, *sources], seconds=600)
    shutil.rmtree(root / "dev")
    (root / "dev").mkdir()
    packed = layers.pack(root, workshop / "builder.tar.zst")
    shutil.rmtree(root)
    return [packed]


def with_history(name: str) -> str:
    """Name one of the cluster's images as Dockerfiles start from: with a history, which buildah asks for."""
    named = Reference.parse(images.reference(name), "test")
    with closing(Connection(named.registry)) as connection:
        repository = Repository(connection, named.repository)
        plain = repository.pull(named.version)
        config = plain.config | {"history": [{"created_by": "a test"} for _ in plain.layers]}
        config_bytes = json.dumps(config).encode()
        described = plain.manifest["config"] | {"digest": sha256(config_bytes), "size": len(config_bytes)}
        whole = Made(json.dumps(plain.manifest | {"config": described}).encode(), config_bytes)
        repository.push(of_bytes(config_bytes, described["digest"]))
        repository.push_image(whole, f"{named.tag}-history")
    return str(named.at(f"{named.tag}-history"))
