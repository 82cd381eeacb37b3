"""The cluster's OCI registry, over HTTP: look up and push images."""

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from cluster import settings
from cluster.command import ClusterError

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
SECONDS = 30
PUSH_SECONDS = 600


@dataclass(frozen=True)
class Layer:
    """One layer of an image, as a compressed file.

    Attributes:
        diff_id: digest of the uncompressed tar.
        digest: digest of the file.
    """

    file: Path
    diff_id: str
    digest: str
    compression: str = "zstd"

    @property
    def descriptor(self) -> dict[str, Any]:
        return {
            "mediaType": f"{LAYER}+{self.compression}",
            "size": self.file.stat().st_size,
            "digest": self.digest,
        }


def digest(name: str, tag: str) -> str | None:
    """Return the digest of an image in the registry, or None if it has no such image."""
    answer = _ask("HEAD", f"{name}/manifests/{tag}", missing_is_fine=True, headers={"Accept": MANIFEST})
    return answer.headers["Docker-Content-Digest"] if answer.ok else None


def size(name: str, tag: str) -> int:
    """Return the number of bytes that a node downloads for an image."""
    manifest = _ask("GET", f"{name}/manifests/{tag}", headers={"Accept": MANIFEST}).json()
    return sum(layer["size"] for layer in manifest["layers"])


def push(name: str, tag: str, layers: Sequence[Layer], config: dict[str, Any]) -> str:
    """Push an image made of these layers.

    Args:
        name: the image's name, without the registry.
        tag: the image's tag.
        layers: lowest first.
        config: the OCI image's `config` (Env, Entrypoint, ...).

    Returns:
        the image's digest.
    """
    whole = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
    }
    data = json.dumps(whole).encode()
    config_digest = sha256(data)
    for layer in layers:
        _push_blob(name, layer.digest, layer.file)
    _push_blob(name, config_digest, data)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, "size": len(data), "digest": config_digest},
        "layers": [layer.descriptor for layer in layers],
    }
    body = json.dumps(manifest).encode()
    answer = _ask("PUT", f"{name}/manifests/{tag}", data=body, headers={"Content-Type": MANIFEST})
    return answer.headers["Docker-Content-Digest"]


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def gzip_layer(tar: bytes, file: Path) -> Layer:
    """Compress a small tar to `file`; return it as a layer."""
    file.write_bytes(gzip.compress(tar, 1, mtime=0))
    return Layer(file, sha256(tar), sha256(file.read_bytes()), "gzip")


def _push_blob(name: str, wanted: str, content: bytes | Path) -> None:
    """Push a blob with the digest `wanted`, from bytes or a file, unless the registry has it."""
    if _ask("HEAD", f"{name}/blobs/{wanted}", missing_is_fine=True).ok:
        return
    place = _ask("POST", f"{name}/blobs/uploads/").headers["Location"]
    headers = {"Content-Type": "application/octet-stream"}
    if isinstance(content, bytes):
        _put(place, wanted, content, headers)
    else:
        with content.open("rb") as stream:
            _put(place, wanted, stream, headers)


def _put(place: str, wanted: str, data: Any, headers: dict[str, str]) -> None:
    answer = requests.put(place, params={"digest": wanted}, data=data, headers=headers, timeout=PUSH_SECONDS)
    if not answer.ok:
        raise ClusterError(
            f"the registry at {settings.registry()} refused blob {wanted}: {answer.status_code} {answer.text}"
        )


def _ask(method: str, path: str, *, missing_is_fine: bool = False, **options: Any) -> requests.Response:
    answer = requests.request(method, f"http://{settings.registry()}/v2/{path}", timeout=SECONDS, **options)
    if answer.ok or (missing_is_fine and answer.status_code == requests.codes.not_found):
        return answer
    raise ClusterError(
        f"the registry at {settings.registry()} answered {method} {path}: {answer.status_code} {answer.text}"
    )
