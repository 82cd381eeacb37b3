"""Images for tests of registries: small, and whole enough for builders."""

import gzip
import io
import json
import tarfile

from manycpu.pipeline.adapters.registry import Repository, of_bytes
from manycpu.pipeline.adapters.registry_http import Connection
from manycpu.pipeline.adapters.registry_login import Login
from manycpu.pipeline.spec.image import OCI, Change, Image, Layer, Reference, sha256

__all__ = ["files", "pull", "push_base"]


def push_base(
    host: str,
    login: Login | None = None,
    tag: str = "1",
    labels: dict[str, str] | None = None,
    env: list[str] | None = None,
) -> None:
    """Push an image `base` with an empty layer."""
    tar = io.BytesIO()
    tarfile.open(fileobj=tar, mode="w").close()
    layer = Layer(gzip.compress(tar.getvalue(), mtime=0), sha256(tar.getvalue()), "a test")
    settings: dict[str, object] = {"Env": ["PATH=/bin", "PYTHONPATH=/theirs", *(env or [])], "User": "1000"}
    settings["Labels"] = labels or {}
    rootfs = {"type": "layers", "diff_ids": []}
    config = {"os": "linux", "architecture": "amd64", "config": settings, "rootfs": rootfs}
    config_bytes = json.dumps(config).encode()
    described = {"digest": sha256(config_bytes), "size": len(config_bytes)}
    described["mediaType"] = "application/vnd.oci.image.config.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": OCI, "config": described, "layers": []}
    image = Image(json.dumps(manifest).encode(), config_bytes).changed(Change([layer], {}, {}))
    connection = Connection(host, login=login)
    repository = Repository(connection, "base")
    repository.push(of_bytes(layer.content, layer.digest))
    repository.push(of_bytes(image.config_bytes, sha256(image.config_bytes)))
    repository.push_image(image, tag)
    connection.close()


def pull(reference: str, login: Login | None = None) -> Image:
    """Read an image."""
    named = Reference.parse(reference, "test")
    connection = Connection(named.registry, login=login)
    try:
        return Repository(connection, named.repository).pull(named.version)
    finally:
        connection.close()


def files(reference: str, number: int, login: Login | None = None) -> dict[str, bytes]:
    """Read the files of one of an image's layers."""
    named = Reference.parse(reference, "test")
    connection = Connection(named.registry, login=login)
    descriptor = pull(reference, login).layers[number]
    with Repository(connection, named.repository).open(descriptor["digest"]) as blob:
        content = blob.read()
    connection.close()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}  # type: ignore[union-attr]
