"""A command in a running container, with its streams, over one websocket.

Not by the client's own stream, which masks in Python and gathers all that comes: see bench/transfer.py.
"""

import io
import json
import ssl
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlencode, urlsplit, urlunsplit

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.spec.errors import ClusterError

__all__ = ["Exec", "start"]

_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
_PROTOCOLS: Final = [Subprotocol("v5.channel.k8s.io"), Subprotocol("v4.channel.k8s.io")]
_OPEN: Final = 30.0  # seconds
_LAST: Final = 4000  # bytes of what it said on stderr


def start(cluster: Cluster, pod: str, container: str, argv: Sequence[str]) -> "Exec":
    """Start a command in a container.

    Raises:
        ClusterError: The cluster refuses it (with its HTTP status), or is away (status 0).
    """
    settings = cluster.api.configuration
    headers: dict[str, str] = {}
    cluster.api.update_params_for_auth(headers, [], ["BearerToken"])
    query = [("container", container), *(("command", word) for word in argv)]
    query += [(name, "true") for name in ("stdin", "stdout", "stderr")]
    server = urlsplit(settings.host)
    path = server.path.rstrip("/") + cluster.path("Pod", pod) + "/exec"
    scheme = "wss" if server.scheme == "https" else "ws"
    try:
        return Exec(
            connect(
                urlunsplit((scheme, server.netloc, path, urlencode(query), "")),
                ssl=_tls(settings) if scheme == "wss" else None,
                server_hostname=settings.tls_server_name or None,
                additional_headers=headers,
                subprotocols=_PROTOCOLS,
                proxy=settings.proxy or None,
                compression=None,
                open_timeout=_OPEN,
                ping_interval=None,  # both ends of a channel give signs of life of their own
                max_size=None,
            )
        )
    except InvalidStatus as error:
        raise _refused(error, pod) from error
    except (InvalidHandshake, OSError) as error:
        raise ClusterError(f"no command could be started in pod {pod}: {error}") from error


def _tls(settings: object) -> ssl.SSLContext:
    if not getattr(settings, "verify_ssl", True):
        return ssl._create_unverified_context()  # noqa: S323, SLF001 - as the kubeconfig says
    context = ssl.create_default_context(cafile=getattr(settings, "ssl_ca_cert", None))
    certificate = getattr(settings, "cert_file", None)
    if certificate:
        context.load_cert_chain(certificate, getattr(settings, "key_file", None))
    return context


def _refused(error: InvalidStatus, pod: str) -> ClusterError:
    body = error.response.body or b""
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace") or error.response.reason_phrase
    refused = ClusterError(f"no command could be started in pod {pod}: {message}")
    refused.status = error.response.status_code
    return refused


class Exec:
    """A command that runs: its stdin and stdout, and how it ended."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self.stdout = io.BufferedReader(_Stdout(self), 1 << 20)
        self._stderr = b""
        self._status: dict[str, object] = {}

    def write(self, data: bytes | bytearray) -> None:
        """Write to its stdin.

        Raises:
            BrokenPipeError: It has ended, or the connection is broken.
        """
        frame = bytearray(1)
        frame += data
        try:
            self._socket.send(frame)
        except ConnectionClosed as error:
            raise BrokenPipeError(str(error)) from error

    def flush(self) -> None:
        """Do nothing: what is written is sent."""

    def close(self) -> None:
        """End the connection, also under other threads that read and write."""
        try:
            self._socket.socket.shutdown(2)
        except OSError:
            return  # closed already
        self._socket.close_socket()

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; None while it runs, and when nobody knows."""
        if self._status.get("status") == "Success":
            return 0
        details = self._status.get("details")
        causes = details.get("causes", []) if isinstance(details, dict) else []
        return next((int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"), None)

    @property
    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        return self._stderr.decode(errors="replace").strip()

    def receive(self) -> bytes | memoryview:
        """Wait for the next bytes of its stdout; empty at the end."""
        while True:
            try:
                message = self._socket.recv(decode=False)
            except ConnectionClosed:
                return b""
            channel, content = message[0], memoryview(message)[1:]
            if channel == _STDOUT and content:
                return content
            if channel == _STDERR:
                self._stderr = (self._stderr + bytes(content))[-_LAST:]
            elif channel == _STATUS:
                self._status = json.loads(bytes(content))


class _Stdout(io.RawIOBase):
    def __init__(self, command: Exec) -> None:
        self._command, self._rest = command, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = memoryview(self._command.receive())
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
