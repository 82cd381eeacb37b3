"""Pull and push images of an OCI registry, verified by digest, by HTTP alone without a container runtime."""

import io
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any, BinaryIO, Final, NamedTuple, cast

import requests
import urllib3
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from manycpu.pipeline.adapters.registry_http import Connection
from manycpu.pipeline.spec.errors import RegistryError, TransientError
from manycpu.pipeline.spec.image import DOCKER, INDEXES, OCI, Image, check_platform, choose, sha256

__all__ = ["Content", "Repository", "of_blob", "of_bytes"]

CHUNK: Final = 32 << 20
"""Bytes of a part: larger blobs are sent in several parts."""
_ACCEPTED: Final = {"Accept": ", ".join((OCI, DOCKER, *INDEXES))}
_CONFIG_LIMIT_BYTES: Final = 8 << 20
_CREATED, _BEGUN = 201, 202
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _NOT_ALLOWED = 401, 403, 404, 405


class Content(NamedTuple):
    """A blob to push: its digest, its size in bytes, and a function that opens it from the beginning."""

    digest: str
    size: int
    open: Callable[[], BinaryIO]


class Repository:
    """One repository, over a connection to its registry."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.connection, self.name = connection, name
        self._pull = (f"repository:{name}:pull",)
        self._push = (f"repository:{name}:pull,push",)

    def digest(self, version: str) -> str | None:
        """Look up the digest of a tag or a digest; None: the registry has no such image."""
        answer = self._ask("HEAD", f"manifests/{version}", self._pull, fine=(_NOT_FOUND,), headers=_ACCEPTED)
        if answer.status_code == _NOT_FOUND:
            return None
        digest = answer.headers.get("Docker-Content-Digest")
        return digest or sha256(self._manifest(version).content)

    def pull(self, version: str) -> Image:
        """Read an image's manifest and config; of an image for several platforms those for linux/amd64."""
        answer = self._manifest(version)
        name = f"{self.connection.host}/{self.name}:{version}"
        if answer.headers.get("Content-Type", "").partition(";")[0] in INDEXES:
            answer = self._manifest(choose(answer.json(), name))
        manifest = answer.json()
        media_type = manifest.get("mediaType") or answer.headers.get("Content-Type", OCI)
        if media_type not in (OCI, DOCKER):
            raise RegistryError(f"{name} is a {media_type}, which is no image", field="target.image")
        descriptor = manifest["config"]
        if descriptor["size"] > _CONFIG_LIMIT_BYTES:
            raise RegistryError(f"{self.name}: a config of {descriptor['size']} bytes is none")
        config = self._ask("GET", f"blobs/{descriptor['digest']}", self._pull).content
        self._verify(config, descriptor["digest"])
        image = Image(answer.content, config, media_type)
        check_platform(image, name)
        return image

    def has(self, digest: str) -> bool:
        """Whether the repository has a blob."""
        return self._ask("HEAD", f"blobs/{digest}", self._push, fine=(_NOT_FOUND,)).ok

    def open(self, digest: str) -> BinaryIO:
        """Open a blob, to read it once."""
        return cast("BinaryIO", self._ask("GET", f"blobs/{digest}", self._pull, stream=True).raw)

    def mount(self, digest: str, source: str) -> bool:
        """Mount a blob of another repository of this registry; returns whether the registry did so."""
        scopes = (*self._push, f"repository:{source}:pull")
        query = {"mount": digest, "from": source}
        answer = self._ask("POST", "blobs/uploads/", scopes, params=query, fine=(_NOT_FOUND, _NOT_ALLOWED))
        if answer.status_code == _BEGUN:  # an upload was begun instead
            self._cancel(answer)
        return answer.status_code == _CREATED

    def push(self, content: Content) -> None:
        """Push a blob, unless the repository has it; a broken upload starts again."""
        if self.has(content.digest):
            return
        retrying = Retrying(
            retry=retry_if_exception_type(TransientError),
            stop=stop_after_delay(self.connection.deadline),
            wait=wait_random_exponential(multiplier=0.2, max=5),
            reraise=True,
        )
        retrying(self._send, content)

    def push_image(self, image: Image, tag: str) -> str:
        """Push a manifest, after the blobs that it names; returns the digest."""
        headers = {"Content-Type": image.media_type}
        body = image.manifest_bytes
        answer = self._ask("PUT", f"manifests/{tag}", self._push, data=body, headers=headers)
        digest = answer.headers.get("Docker-Content-Digest", image.digest)
        if digest != image.digest:
            raise RegistryError(f"{self.connection.host} keeps {image.digest} as {digest}")
        return image.digest

    def check_push(self) -> None:
        """Check that pushes are allowed: begin an upload, and cancel it."""
        self._cancel(self._ask("POST", "blobs/uploads/", self._push))

    def _send(self, content: Content) -> None:
        begun = self._ask("POST", "blobs/uploads/", self._push, patient=False)
        place = self._place(begun)
        with closing(content.open()) as stream:
            sent = 0
            body = _read(stream, min(CHUNK, content.size))
            while sent + len(body) < content.size:
                place = self._send_part(place, body, sent)
                sent += len(body)
                body = _read(stream, min(CHUNK, content.size - sent))
        if sent:
            place, body = self._send_part(place, body, sent), b""
        headers = {"Content-Type": "application/octet-stream"}
        options: dict[str, Any] = {"params": {"digest": content.digest}, "data": body, "headers": headers}
        self._ask("PUT", place, self._push, patient=False, **options)

    def _send_part(self, place: str, body: bytes, start: int) -> str:
        if not body:
            raise TransientError("what was to be pushed ended too early", field="target.registry")
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Range": f"{start}-{start + len(body) - 1}",
        }
        return self._place(self._ask("PATCH", place, self._push, data=body, headers=headers, patient=False))

    def _cancel(self, begun: requests.Response) -> None:
        # Registries may lack or refuse this call: they delete unfinished uploads in time.
        fine = (_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _NOT_ALLOWED)
        scopes = (f"repository:{self.name}:delete,pull,push",)
        self._ask("DELETE", self._place(begun), scopes, fine=fine)

    def _place(self, answer: requests.Response) -> str:
        return self.connection.url(answer.headers["Location"])

    def _manifest(self, version: str) -> requests.Response:
        answer = self._ask("GET", f"manifests/{version}", self._pull, headers=_ACCEPTED)
        if ":" in version:
            self._verify(answer.content, version)
        return answer

    def _verify(self, content: bytes, digest: str) -> None:
        if sha256(content) != digest:
            raise RegistryError(
                f"{self.connection.host} sent {sha256(content)} for {digest} of {self.name}",
                field="target.registry",
            )

    def _ask(self, method: str, path: str, scopes: tuple[str, ...], **options: Any) -> requests.Response:
        whole = path if "://" in path else f"{self.name}/{path}"
        return self.connection.ask(method, whole, scopes, **options)


def _read(stream: BinaryIO, size: int) -> bytes:
    """Read ``size`` bytes, or the rest."""
    parts = []
    try:
        while size and (part := stream.read(size)):
            parts.append(part)
            size -= len(part)
    except (OSError, urllib3.exceptions.HTTPError) as error:
        raise TransientError(f"what was to be pushed cannot be read: {error}") from error
    return b"".join(parts)


def of_bytes(content: bytes, digest: str) -> Content:
    """Make a content of bytes in memory."""
    return Content(digest, len(content), lambda: io.BytesIO(content))


def of_blob(source: Repository, descriptor: Mapping[str, Any]) -> Content:
    """Make a content of a blob in another repository."""
    digest = descriptor["digest"]
    return Content(digest, descriptor["size"], lambda: source.open(digest))
