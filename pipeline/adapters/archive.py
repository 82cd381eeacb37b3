"""An image as one file: the OCI image layout in a tar, for `ctr images import` and `podman load`.

The layout of docker save before version 25, and of podman's docker format, is read too.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

from manycpu.pipeline.adapters.registry import Content
from manycpu.pipeline.spec.errors import BuildError
from manycpu.pipeline.spec.image import INDEXES, OCI, Image, check_platform, choose, sha256

_MEDIA_TYPE: Final = "application/vnd.oci.image."


class Archive:
    """An archive with one image.

    Raises:
        BuildError: The file is no such archive, or its image is not for linux/amd64.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._docker_paths: dict[str, str] = {}  # digest of a blob -> its path, in docker's own layout
        try:
            with tarfile.open(file) as tar:
                self.image = self._oci(tar) if "index.json" in tar.getnames() else self._docker(tar)
        except (KeyError, OSError, ValueError, tarfile.TarError) as error:
            raise BuildError(f"{file} is no archive of an image: {error}") from error
        check_platform(self.image, str(file))

    def content(self, descriptor: Mapping[str, Any]) -> Content:
        """Return a blob of the image; ``descriptor`` is the blob's entry in the manifest."""
        digest = descriptor["digest"]
        return Content(digest, descriptor["size"], open=lambda: self._open(digest))

    def _oci(self, tar: tarfile.TarFile) -> Image:
        """Read an image in the OCI layout: the index names the manifest, and the manifest the config."""
        (descriptor,) = json.loads(_read(tar, "index.json"))["manifests"]
        content = _read(tar, _path(descriptor["digest"]))  # a manifest, or an index of manifests
        if descriptor.get("mediaType") in INDEXES:  # of several platforms: take linux/amd64
            content = _read(tar, _path(choose(json.loads(content), str(self.file))))
        manifest = json.loads(content)
        config = _read(tar, _path(manifest["config"]["digest"]))
        return Image(content, config, manifest.get("mediaType", descriptor["mediaType"]))

    def _docker(self, tar: tarfile.TarFile) -> Image:
        """Read an image in docker's own layout, which has no OCI manifest: build one.

        Its layers are not compressed, so their digests are in the config.
        """
        (entry,) = json.loads(_read(tar, "manifest.json"))
        config = _read(tar, entry["Config"])
        layers = []
        for digest, path in zip(json.loads(config)["rootfs"]["diff_ids"], entry["Layers"], strict=True):
            if tar.getmember(path).isfile():  # a repeated layer is a link the second time
                self._docker_paths[digest] = path
            size = tar.getmember(self._docker_paths[digest]).size
            layers.append({"mediaType": f"{_MEDIA_TYPE}layer.v1.tar", "digest": digest, "size": size})
        config_type = f"{_MEDIA_TYPE}config.v1+json"
        config_entry = {"mediaType": config_type, "digest": sha256(config), "size": len(config)}
        manifest = {"schemaVersion": 2, "mediaType": OCI, "config": config_entry, "layers": layers}
        return Image(json.dumps(manifest).encode(), config)

    def _open(self, digest: str) -> BinaryIO:
        """Open the archive at the start of a blob; the caller must read no more bytes than the blob has."""
        with tarfile.open(self.file) as tar:
            member = tar.getmember(self._docker_paths.get(digest) or _path(digest))
        # Not by `tar`, which closes its streams with itself.
        stream = self.file.open("rb")
        stream.seek(member.offset_data)
        return stream


def write(file: Path, name: str, image: Image, contents: Iterable[Content]) -> None:
    """Write an image as an archive in the OCI layout, atomically; ``contents`` are its layers.

    Raises:
        BuildError: The content of a layer does not match its digest.
    """
    partial = file.with_name(f".{file.name}.partial")
    manifest_entry = {
        "mediaType": image.media_type,
        "digest": image.digest,
        "size": len(image.manifest_bytes),
        "annotations": {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name},
    }
    index = {"schemaVersion": 2, "manifests": [manifest_entry]}
    small_files = {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": json.dumps(index).encode(),
        _path(image.digest): image.manifest_bytes,
        _path(image.manifest["config"]["digest"]): image.config_bytes,
    }
    try:
        with tarfile.open(partial, "w") as tar:
            for path, text in small_files.items():
                tar.addfile(_info(path, len(text)), io.BytesIO(text))
            # By digest: an image may have the same layer twice.
            for content in {item.digest: item for item in contents}.values():
                with content.open() as stream:
                    verified = _Verified(stream)
                    tar.addfile(_info(_path(content.digest), content.size), verified)
                if f"sha256:{verified.digest.hexdigest()}" != content.digest:
                    raise BuildError(f"what was read of {content.digest} is something else")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


class _Verified:
    """A stream that hashes what is read from it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self.digest = stream, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Read up to ``size`` bytes, as a file does, and add them to the digest."""
        block = self._stream.read(size)
        self.digest.update(block)
        return block


def _info(path: str, size: int) -> tarfile.TarInfo:
    """Describe a file of an archive for ``tarfile``; all users may read it."""
    info = tarfile.TarInfo(path)
    info.size, info.mode = size, 0o644
    return info


def _path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _read(tar: tarfile.TarFile, path: str) -> bytes:
    """Read a file of an archive; raise KeyError if there is none (:class:`Archive` makes it a BuildError)."""
    member = tar.extractfile(path)
    if member is None:
        raise KeyError(path)
    return member.read()
