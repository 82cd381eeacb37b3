"""Pull and push images of an OCI registry, verified by digest, by HTTP alone without a container runtime.

Requests go by https or http, with basic auth or bearer tokens; transient errors are retried.
"""

import io
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from typing import Any, BinaryIO, Final, NamedTuple, cast
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from requests.auth import AuthBase
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    stop_all,
    wait_random_exponential,
)

from manycpu.pipeline.adapters.registry_login import Login
from manycpu.pipeline.spec.credentials import proxies
from manycpu.pipeline.spec.errors import RegistryError, TransientError
from manycpu.pipeline.spec.image import DOCKER, INDEXES, OCI, Image, check_platform, choose, sha256

Scopes = tuple[str, ...]
"""Scopes of a token, such as ``("repository:ml/train:pull,push",)``."""

RETRY_TIMEOUT_S: Final = 60.0  # seconds of retries
_TIMEOUT: Final = (5.0, 60.0)  # seconds to connect, and between two packets
# Ways to log in that a registry offers, in one line; those of a token have parameters.
_BASIC: Final = re.compile(r"(?i)(?:^|,)\s*basic\b")
_BEARER: Final = re.compile(r'(?i)(?:^|,)\s*bearer\b\s*((?:[\w-]+=(?:"[^"]*"|[^",\s]+)[\s,]*)*)')
_PARAMETER: Final = re.compile(r'(\w+)="([^"]*)"')
CHUNK: Final = 32 << 20
"""Bytes of a part: larger blobs are sent in several parts."""
_ACCEPTED: Final = {"Accept": ", ".join((OCI, DOCKER, *INDEXES))}
# The last one: the connection ended in the middle of an answer.
_BROKEN: Final = (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError)
_BYTES: Final = {"Content-Type": "application/octet-stream"}
_CONFIG_LIMIT_BYTES: Final = 8 << 20
# Statuses of HTTP.
_CREATED, _BEGUN = 201, 202
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 401, 403, 404
# Errors that pass: the registry is just writing a pushed blob again, for another client; it lost an upload.
_TRANSIENT_CODES: Final = ("MANIFEST_BLOB_UNKNOWN", "BLOB_UPLOAD_UNKNOWN")


class Connection:
    """A registry, as one user.

    Args:
        host: Host and port, as in an image's name.
        login: The user; None: anonymous.
        ca: File with the certificate authority.
        plain: Whether to use plain HTTP: only if the user wrote ``http://``.
        deadline: Seconds of retries.
    """

    def __init__(
        self,
        host: str,
        *,
        login: Login | None = None,
        ca: str | None = None,
        plain: bool = False,
        deadline: float = RETRY_TIMEOUT_S,
    ) -> None:
        self.host, self.deadline = host, deadline
        self._address = "registry-1.docker.io" if host in ("docker.io", "index.docker.io") else host
        self.plain, self._login = plain, login
        self._basic = False  # whether the registry has asked for basic auth
        self._tokens: dict[Scopes, str] = {}
        # Passed with each call: REQUESTS_CA_BUNDLE would win over that of the session.
        self._verify = ca or True
        self._session = _Session()

    def close(self) -> None:
        """Close its connections."""
        self._session.close()

    def ask(
        self,
        method: str,
        path: str,
        scopes: Scopes,
        *,
        fine: Collection[int] = (),
        patient: bool = True,
        **options: Any,
    ) -> requests.Response:
        """Send a request to the registry; retry transient errors for ``deadline`` seconds.

        Args:
            method: The HTTP method.
            path: The path below ``/v2/``, or a URL from the registry.
            scopes: The scopes that the call needs.
            fine: Statuses that are no errors, beside those below 400.
            patient: Whether to retry.
            options: Options of requests, such as the body, in bytes since it may be sent twice.

        Raises:
            RegistryError: The registry refuses the request, or cannot be called.
            TransientError: The registry is away or overloaded, also after the retries.
        """
        call_with_retries = self.retrying(self.deadline if patient else 0)  # 0: one try
        return call_with_retries(self._ask, method, path, scopes, fine, options)

    @staticmethod
    def retrying(deadline: float) -> Retrying:
        """Build a Retrying: it calls a function, and retries a TransientError for ``deadline`` seconds."""
        return Retrying(
            retry=retry_if_exception_type(TransientError),
            stop=stop_after_delay(deadline),
            wait=wait_random_exponential(multiplier=0.2, max=5),
            reraise=True,
        )

    def url(self, path: str) -> str:
        """Make a URL from a path below ``/v2/``, or from a location that the registry returned.

        Raises:
            RegistryError: The registry is called by https, and its location is on another host without https.
        """
        url = urlsplit(urljoin(f"{'http' if self.plain else 'https'}://{self._address}/v2/", path))
        if self.plain or url.scheme == "https":
            return url.geturl()
        if url.netloc != self._address:
            raise RegistryError(
                f"registry {self.host} sends an upload to {url.scheme}://{url.netloc}, which is no https URL",
                field="target.registry",
            )
        # Behind a proxy that ends TLS, a registry may not know that it is called by https.
        return url._replace(scheme="https").geturl()

    def _ask(
        self, method: str, path: str, scopes: Scopes, fine: Collection[int], options: Mapping[str, Any]
    ) -> requests.Response:
        """Send a request; if the registry asks for a login, log in and send it once more.

        Raises:
            RegistryError: The answer is an error, and its status is not in ``fine``.
        """
        url = self.url(path)
        response = self._send(method, url, scopes, options)
        if response.status_code == _UNAUTHORIZED and self._log_in(response, scopes):
            response = self._send(method, url, scopes, options)
        if response.ok or response.status_code in fine:
            return response
        raise self._refusal(response, method)

    def _send(self, method: str, url: str, scopes: Scopes, options: Mapping[str, Any]) -> requests.Response:
        """Send a request once, with the token or the login that the registry has asked for before, if any."""
        header = None
        if token := self._tokens.get(scopes):
            header = f"Bearer {token}"
        elif self._basic and self._login:
            header = f"Basic {self._login.pair}"
        common: dict[str, Any] = {"auth": _Header(self.url(""), header), "verify": self._verify}
        try:
            return self._session.request(method, url, timeout=_TIMEOUT, **common, **options)
        except requests.exceptions.SSLError as error:
            raise RegistryError(
                f"the certificate of registry {self.host} cannot be trusted: {_cause(error)}",
                field="target.registry_ca",
                fix="Give the file of its certificate authority in target.registry_ca; if it speaks plain "
                "HTTP, write http:// before its name",
            ) from error
        except _BROKEN as error:
            raise self._no_answer(error) from error
        except (requests.RequestException, ValueError) as error:  # a ValueError: an unknown kind of proxy
            raise self._no_call(error) from error

    def _log_in(self, response: requests.Response, scopes: Scopes) -> bool:
        """Log in as a refusal (401) asks: fetch a token, or begin to send the login with each request.

        Returns:
            Whether to send the request once more.
        """
        offers = response.headers.get("WWW-Authenticate", "")
        if bearer := _BEARER.search(offers):
            self._tokens[scopes] = self._token(dict(_PARAMETER.findall(bearer[1])), scopes)
            return True
        # If the login was sent already, the registry has refused it.
        begins_basic = _BASIC.search(offers) is not None and self._login is not None and not self._basic
        self._basic = self._basic or begins_basic
        return begins_basic

    def _token(self, challenge: Mapping[str, str], scopes: Scopes) -> str:
        """Fetch a token for the scopes, from the service that the challenge names.

        ``challenge``: the parameters of the registry's header WWW-Authenticate, such as ``realm``.
        """
        realm = challenge.get("realm", "")  # the URL of that service, which receives the login
        if urlsplit(realm).scheme != "https" and not self.plain:
            raise RegistryError(
                f"registry {self.host} sends to {realm or 'nowhere'} for tokens, which is no https URL",
                field="target.registry",
            )
        login, service = self._login, challenge.get("service", self.host)
        common: dict[str, Any] = {"timeout": _TIMEOUT, "verify": self._verify}
        try:
            if login and login.identity_token:
                form = {"grant_type": "refresh_token", "service": service, "client_id": "manycpu"}
                form |= {"scope": " ".join(scopes), "refresh_token": login.identity_token}
                response = self._session.post(realm, data=form, auth=_ANONYMOUS, **common)
            else:
                query = [("service", service), *(("scope", scope) for scope in scopes)]
                auth = _Header(realm, f"Basic {login.pair}") if login else _ANONYMOUS
                response = self._session.get(realm, params=query, auth=auth, **common)
        except _BROKEN as error:
            raise self._no_answer(error) from error
        except (requests.RequestException, ValueError) as error:  # such as a realm that is no URL
            raise self._no_call(error) from error
        if not response.ok:
            raise self._refusal(response, "token")
        try:
            body = response.json()
            return str(body.get("token") or body["access_token"])  # a service uses either name
        except (ValueError, AttributeError, KeyError):
            raise RegistryError(
                f"registry {self.host}: the service at {realm} answers without a token",
                field="target.registry",
            ) from None

    def _refusal(self, response: requests.Response, method: str) -> RegistryError:
        """Build the error for an answer whose status is an error, with the registry's own reasons."""
        status = response.status_code
        who = f"as {self._login.username or 'a token'}" if self._login else "without a login"
        summary = f"registry {self.host} answers {method} {urlsplit(response.url).path} {who} with {status}"
        try:
            errors = response.json()["errors"]
            reason = ": " + "; ".join(f"{e['code']} {e.get('message', '')}".strip() for e in errors)
        except (KeyError, TypeError, ValueError):
            reason = ""
        fix = "See that the image's name is right" if status == _NOT_FOUND else None
        if status in (_UNAUTHORIZED, _FORBIDDEN):
            need = "another login" if self._login else "a login"
            fix = f"Give {need} for {self.host} in target.registry_connection or target.pull_secret"
        kind = TransientError if any(code in reason for code in _TRANSIENT_CODES) else RegistryError
        return kind.of_status(status, f"{summary}{reason}", field="target.registry", fix=fix)

    def no_registry(self, why: str) -> RegistryError:
        """Build the error for an answer that no registry gives, such as the page of a website."""
        return RegistryError(
            f"{self.host} is no registry: {why}",
            field="target.registry",
            fix="See that the registry's name is right",
        )

    def _no_call(self, error: Exception) -> RegistryError:
        """Build the error for a call that cannot be made, or whose redirects do not end."""
        if isinstance(error, requests.TooManyRedirects):
            return self.no_registry(_cause(error))
        named = proxies(os.environ) or "none"
        return RegistryError(
            f"registry {self.host} cannot be called: {_cause(error)}",
            field="target.registry",
            fix=f"See that its name is right, and the proxy in the environment: {named}",
        )

    def _no_answer(self, error: Exception) -> TransientError:
        """Build the error for a connection that failed."""
        return TransientError(
            f"registry {self.host} does not answer: {_cause(error)}",
            field="target.registry",
            fix="See that it is reachable from here; for plain HTTP write http:// before its name",
        )


class _Session(requests.Session):
    """A session that takes no login from ~/.netrc for the storage to which a registry redirects."""

    def rebuild_auth(self, prepared_request: requests.PreparedRequest, response: requests.Response) -> None:
        """Remove the login from a redirected request if that goes to another host."""
        url = prepared_request.url or ""
        if self.should_strip_auth(response.request.url or "", url):  # type: ignore[no-untyped-call]
            prepared_request.headers.pop("Authorization", None)


class _Header(AuthBase):
    """Sets the Authorization header, but only of requests to the host of ``url``.

    If ``url`` is an https URL, requests by plain HTTP get no header. A ``value`` of None sets no header. In
    each case, the package requests then reads no ~/.netrc.
    """

    def __init__(self, url: str, value: str | None) -> None:
        self._url, self._value = urlsplit(url.lower()), value  # requests writes hosts in lower case

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Add the header to a request if it goes to the host; requests calls this when it prepares one."""
        url = urlsplit(request.url or "")
        if self._value and url.netloc == self._url.netloc and url.scheme in ("https", self._url.scheme):
            request.headers["Authorization"] = self._value
        return request


_ANONYMOUS: Final = _Header(url="", value=None)


def _cause(error: BaseException) -> str:
    """Return the text of the innermost cause of an error of requests.

    requests wraps errors of urllib3, which may wrap others as their ``reason``; the outer texts are long.
    """
    inner = error.args[0] if error.args else None
    reason = getattr(inner, "reason", inner)
    return _cause(reason) if isinstance(reason, BaseException) else str(error)


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
        """Look up the digest of the image with a tag or a digest; None: the registry has no such image."""
        answer = self._ask("HEAD", f"manifests/{version}", self._pull, fine=(_NOT_FOUND,), headers=_ACCEPTED)
        if answer.status_code == _NOT_FOUND:
            return None
        # A registry may leave the header out.
        return answer.headers.get("Docker-Content-Digest") or sha256(self._manifest(version).content)

    def digest_of_whole(self, version: str) -> str | None:
        """Look up the digest of an image; None: there is no such image, or a blob of it is missing."""
        digest = self.digest(version)
        if digest is None:
            return None
        manifest = self._manifest(digest).json()
        blobs = (manifest["config"], *manifest["layers"])
        return digest if all(self._has(blob["digest"], self._pull) for blob in blobs) else None

    def pull(self, version: str) -> Image:
        """Read an image's manifest and config; of an image for several platforms, those for linux/amd64.

        Raises:
            RegistryError: There is no such image, or the content does not match its digest.
            BuildError: The image is not for linux/amd64.
        """
        answer = self._manifest(version)
        name = f"{self.connection.host}/{self.name}:{version}"
        if answer.headers.get("Content-Type", "").partition(";")[0] in INDEXES:
            answer = self._manifest(choose(answer.json(), name))
        manifest = answer.json()
        content_type = answer.headers.get("Content-Type", OCI).partition(";")[0]
        media_type = manifest.get("mediaType") or content_type  # an OCI manifest may leave it out
        if media_type not in (OCI, DOCKER):
            raise RegistryError(f"{name} is a {media_type}, which is no image", field="target.image")
        descriptor = manifest["config"]
        if descriptor["size"] > _CONFIG_LIMIT_BYTES:  # the config is read whole into memory
            raise RegistryError(f"{self.name}: a config of {descriptor['size']} bytes is none")
        config = self._ask("GET", f"blobs/{descriptor['digest']}", self._pull).content
        self._verify(config, descriptor["digest"])
        image = Image(answer.content, config, media_type)
        check_platform(image, name)
        return image

    def has(self, digest: str) -> bool:
        """Whether the repository has a blob; asks with the scopes of a push."""
        return self._has(digest, self._push)

    def _has(self, digest: str, scopes: tuple[str, ...]) -> bool:
        return self._ask("HEAD", f"blobs/{digest}", scopes, fine=(_NOT_FOUND,)).ok

    def open(self, digest: str) -> BinaryIO:
        """Open a blob, to read it once."""
        raw = {"Accept-Encoding": "identity"}  # no compression by a proxy: `raw` would not undo it
        answer = self._ask("GET", f"blobs/{digest}", self._pull, stream=True, headers=raw)
        return cast("BinaryIO", answer.raw)

    def mount(self, digest: str, source: str) -> bool:
        """Mount a blob of another repository of this registry, without a copy.

        Returns False if the registry did not mount it: then the blob must be copied.
        """
        scopes = (*self._push, f"repository:{source}:pull")
        query = {"mount": digest, "from": source}
        try:
            answer = self._ask("POST", "blobs/uploads/", scopes, params=query)
        except TransientError:
            raise
        except RegistryError:  # it does not mount, or not for this user: the blob is copied
            return False
        if answer.status_code == _BEGUN:  # an upload was begun instead
            self._cancel(answer)
        return answer.status_code == _CREATED

    def push(self, content: Content) -> None:
        """Push a blob, unless the repository has it.

        An upload that breaks is repeated from its start until the deadline, and at least three times: the
        upload of a large blob may break only after the deadline.
        """
        if self.has(content.digest):
            return
        stop = stop_all(stop_after_delay(self.connection.deadline), stop_after_attempt(3))
        self.connection.retrying(self.connection.deadline).copy(stop=stop)(self._upload, content)

    def push_image(self, image: Image, tag: str) -> str:
        """Push an image's manifest, and return its digest. The blobs that it names must be pushed before.

        Raises:
            RegistryError: The registry refuses the manifest, or names another digest.
        """
        headers, body = {"Content-Type": image.media_type}, image.manifest_bytes
        answer = self._ask("PUT", f"manifests/{tag}", self._push, data=body, headers=headers)
        digest = answer.headers.get("Docker-Content-Digest", image.digest)
        if digest != image.digest:
            raise RegistryError(f"{self.connection.host} keeps {image.digest} as {digest}")
        return image.digest

    def check_push(self) -> None:
        """Check that pushes are allowed: begin an upload, and cancel it."""
        self._cancel(self._ask("POST", "blobs/uploads/", self._push))

    def _upload(self, content: Content) -> None:
        """Upload a blob, in parts if it is larger than ``CHUNK``; the last request names its digest.

        No single request is retried (``patient``), as :meth:`push` repeats the whole upload.
        """
        begun = self._ask("POST", "blobs/uploads/", self._push, patient=False)
        url = self._upload_url(begun)
        with closing(content.open()) as stream:
            sent = 0
            body = _read(stream, min(CHUNK, content.size))
            while sent + len(body) < content.size:
                url = self._send_part(url, body, sent)
                sent += len(body)
                body = _read(stream, min(CHUNK, content.size - sent))
        if sent:  # the last part goes like the others, and the PUT is empty; one part alone goes with the PUT
            url = self._send_part(url, body, sent)
            body = b""
        query = {"digest": content.digest}
        self._ask("PUT", url, self._push, params=query, data=body, headers=_BYTES, patient=False)

    def _send_part(self, url: str, body: bytes, start: int) -> str:
        """Send a part of a blob, which begins at byte ``start``; returns the URL for the next part."""
        if not body:
            raise TransientError("what was to be pushed ended too early", field="target.registry")
        headers = {**_BYTES, "Content-Range": f"{start}-{start + len(body) - 1}"}
        answer = self._ask("PATCH", url, self._push, data=body, headers=headers, patient=False)
        return self._upload_url(answer)

    def _cancel(self, begun: requests.Response) -> None:
        """Cancel an upload; ``begun`` is the answer with which it began."""
        url = self._upload_url(begun)
        # Registries may lack or refuse this call: they delete unfinished uploads in time.
        with suppress(RegistryError):
            self._ask("DELETE", url, self._push, patient=False)

    def _upload_url(self, answer: requests.Response) -> str:
        """Return the URL at which an upload continues; raise RegistryError if the answer names none."""
        location = answer.headers.get("Location")
        if location is None:
            raise self.connection.no_registry("it does not say where an upload goes")
        return self.connection.url(location)

    def _manifest(self, version: str) -> requests.Response:
        """Fetch the manifest of a tag or a digest; that of a digest is verified."""
        answer = self._ask("GET", f"manifests/{version}", self._pull, headers=_ACCEPTED)
        if ":" in version:  # a digest
            self._verify(answer.content, version)
        with suppress(ValueError):
            if isinstance(answer.json(), dict):
                return answer
        raise self.connection.no_registry(f"it sends {answer.headers.get('Content-Type')} for a manifest")

    def _verify(self, content: bytes, digest: str) -> None:
        """Raise RegistryError if a content does not match its digest."""
        if sha256(content) != digest:
            raise RegistryError(
                f"{self.connection.host} sent {sha256(content)} for {digest} of {self.name}",
                field="target.registry",
            )

    def _ask(self, method: str, path: str, scopes: tuple[str, ...], **options: Any) -> requests.Response:
        """Call the registry at a path below this repository, or at a URL that it returned."""
        full_path = path if "://" in path else f"{self.name}/{path}"
        return self.connection.ask(method, full_path, scopes, **options)


def _read(stream: BinaryIO, size: int) -> bytes:
    """Read ``size`` bytes of a stream; fewer only at its end. Raises TransientError if it cannot be read."""
    parts = []
    try:
        while size and (part := stream.read(size)):
            parts.append(part)
            size -= len(part)
    except (OSError, urllib3.exceptions.HTTPError) as error:
        raise TransientError(f"what was to be pushed cannot be read: {error}") from error
    return b"".join(parts)


def of_bytes(content: bytes, digest: str) -> Content:
    """Make a Content of bytes in memory."""
    return Content(digest, len(content), open=lambda: io.BytesIO(content))


def of_blob(source: Repository, descriptor: Mapping[str, Any]) -> Content:
    """Make a Content of a blob in another repository; ``descriptor`` is its entry in a manifest."""
    digest = descriptor["digest"]
    return Content(digest, descriptor["size"], open=lambda: source.open(digest))
