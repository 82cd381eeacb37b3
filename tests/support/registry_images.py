"""Small images for tests of registries, complete enough for builders."""

import gzip
import io
import json
import tarfile
from contextlib import closing
from pathlib import Path

from manycpu.pipeline.adapters.registry import Connection, Repository, of_bytes
from manycpu.pipeline.adapters.registry_login import Login
from manycpu.pipeline.spec.image import OCI, Change, Image, Layer, Reference, sha256


def push_base(
    host: str,
    login: Login | None = None,
    tag: str = "1",
    labels: dict[str, str] | None = None,
    env: list[str] | None = None,
    shell: Path | None = None,
) -> None:
    """Push an image `base` with one layer: empty, or with the program ``shell`` as /bin/sh."""
    tar = _tar(shell)
    layer = Layer(gzip.compress(tar, 1, mtime=0), sha256(tar), "a test")
    settings: dict[str, object] = {"Env": ["PATH=/bin", "PYTHONPATH=/theirs", *(env or [])], "User": "1000"}
    settings["Labels"] = labels or {}
    rootfs = {"type": "layers", "diff_ids": []}
    config = {"os": "linux", "architecture": "amd64", "config": settings, "rootfs": rootfs}
    config_bytes = json.dumps(config).encode()
    described = {"digest": sha256(config_bytes), "size": len(config_bytes)}
    described["mediaType"] = "application/vnd.oci.image.config.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": OCI, "config": described, "layers": []}
    image = Image(json.dumps(manifest).encode(), config_bytes).changed(Change([layer], {}, {}))
    connection = Connection(host, login=login, plain=True)
    repository = Repository(connection, "base")
    repository.push(of_bytes(layer.content, layer.digest))
    repository.push(of_bytes(image.config_bytes, sha256(image.config_bytes)))
    repository.push_image(image, tag)
    connection.close()


def _tar(shell: Path | None) -> bytes:
    content: dict[str, bytes | None] = {}  # None: a folder
    if shell:
        content = {"bin": None, "bin/sh": shell.read_bytes(), "etc": None}
        content |= {"etc/passwd": b"tester:x:1000:1000::/:/bin/sh\n", "etc/group": b"tester:x:1000:\n"}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path, data in content.items():
            info = tarfile.TarInfo(path)
            info.mode, info.size = 0o755, len(data or b"")
            info.type = tarfile.DIRTYPE if data is None else tarfile.REGTYPE
            tar.addfile(info, io.BytesIO(data or b""))
    return stream.getvalue()


def with_layer(image: str, layer: Layer, suffix: str, env: dict[str, str] | None = None) -> str:
    """Push an image with one more layer to its registry, without TLS; return the reference with digest."""
    source = Reference.parse(image, "image")
    with closing(Connection(source.registry, plain=True, deadline=60)) as connection:
        repository = Repository(connection, source.repository)
        made = repository.pull(source.version).changed(Change([layer], env or {}, {}))
        repository.push(of_bytes(layer.content, layer.digest))
        repository.push(of_bytes(made.config_bytes, made.manifest["config"]["digest"]))
        return str(source.at(repository.push_image(made, f"{source.version}-{suffix}")))


def pull(reference: str, login: Login | None = None) -> Image:
    """Pull an image's manifest and configuration."""
    named = Reference.parse(reference, "test")
    connection = Connection(named.registry, login=login, plain=True)
    try:
        return Repository(connection, named.repository).pull(named.version)
    finally:
        connection.close()


def files(reference: str, number: int, login: Login | None = None) -> dict[str, bytes]:
    """Return the files of one layer of an image: path -> content."""
    named = Reference.parse(reference, "test")
    connection = Connection(named.registry, login=login, plain=True)
    descriptor = pull(reference, login).layers[number]
    with Repository(connection, named.repository).open(descriptor["digest"]) as blob:
        content = blob.read()
    connection.close()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar if m.isfile()}  # type: ignore[union-attr]
