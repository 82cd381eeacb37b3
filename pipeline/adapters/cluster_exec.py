"""A command in a running container, with its streams, over one websocket.

The websocket is that of the client's own stream; what is large goes around two things of it that cost more
than the transfer itself: masking in Python, and gathering all that comes (see bench/transfer.py).
"""

import io
import json
import ssl
import struct
from collections.abc import Sequence
from typing import Any, Final, cast
from urllib.parse import urlsplit, urlunsplit

from kubernetes.stream import ws_client
from websocket import (
    ABNF,
    WebSocket,
    WebSocketBadStatusException,
    WebSocketConnectionClosedException,
    WebSocketException,
)

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.spec.errors import ClusterError

__all__ = ["Exec", "start"]

_STDOUT, _STDERR, _STATUS = 1, 2, 3
_PROTOCOLS: Final = f"{ws_client.V5_CHANNEL_PROTOCOL},{ws_client.V4_CHANNEL_PROTOCOL}"
_OPEN: Final = 30.0  # seconds
_LAST: Final = 4000  # bytes of what it said on stderr
_LARGE: Final = 1 << 16


def start(cluster: Cluster, pod: str, container: str, argv: Sequence[str]) -> "Exec":
    """Start a command in a container.

    Raises:
        ClusterError: The cluster refuses it (with its HTTP status), or is away (status 0).
    """
    settings = cluster.api.configuration
    query = [("container", container), *(("command", word) for word in argv)]
    query += [(name, "true") for name in ("stdin", "stdout", "stderr")]
    server = urlsplit(settings.host)
    path = server.path.rstrip("/") + cluster.path("Pod", pod) + "/exec"
    url = ws_client.get_websocket_url(urlunsplit((server.scheme, server.netloc, path, "", "")), query)
    headers: dict[str, str] = {}
    cluster.api.update_params_for_auth(headers, [], ["BearerToken"])
    socket = WebSocket(sslopt=_tls(settings), skip_utf8_validation=True)
    try:
        socket.connect(url, **_options(settings, url, headers))
        socket.settimeout(None)  # from here on, who talks over it gives up whoever is silent
    except WebSocketBadStatusException as error:
        raise _refused(error, pod) from error
    except (WebSocketException, OSError) as error:
        raise ClusterError(f"no command could be started in pod {pod}: {error}") from error
    return Exec(socket)


def _options(settings: Any, url: str, headers: dict[str, str]) -> dict[str, Any]:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    options = {"header": [*lines, f"Sec-WebSocket-Protocol: {_PROTOCOLS}"], "timeout": _OPEN}
    found: dict[str, Any] = ws_client.websocket_proxycare(options, settings, url, headers)
    return found


def _tls(settings: Any) -> dict[str, Any]:
    options = {
        "cert_reqs": ssl.CERT_REQUIRED if settings.verify_ssl else ssl.CERT_NONE,
        "check_hostname": settings.verify_ssl and settings.assert_hostname is not False,
        "ca_certs": settings.ssl_ca_cert,
        "certfile": settings.cert_file,
        "keyfile": settings.key_file,
        "server_hostname": settings.tls_server_name,
    }
    return {name: value for name, value in options.items() if value is not None}


def _refused(error: WebSocketBadStatusException, pod: str) -> ClusterError:
    try:
        message = json.loads(error.resp_body or "")["message"]
    except (ValueError, KeyError, TypeError):
        message = str(error)
    refused = ClusterError(f"no command could be started in pod {pod}: {message}")
    refused.status = error.status_code
    return refused


class _Large(ABNF):
    """A frame with a mask of zeros: masks guard proxies against what web pages send, and this is none."""

    def format(self) -> bytes:
        header = struct.pack("!BBQ", 0x80 | ABNF.OPCODE_BINARY, 0x80 | 127, len(self.data))
        return b"".join((header, bytes(4), cast("bytes", self.data)))


class Exec:
    """A command that runs: its stdin and stdout, and how it ended."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self.stdout = io.BufferedReader(_Stdout(self), 1 << 18)
        self._stderr = b""
        self._status: dict[str, Any] = {}

    def write(self, data: bytes | bytearray) -> None:
        """Write to its stdin.

        Raises:
            BrokenPipeError: It has ended, or the connection is broken.
        """
        kind = _Large if len(data) > _LARGE else ABNF
        try:
            self._socket.send_frame(kind(1, 0, 0, 0, ABNF.OPCODE_BINARY, 1, b"\0" + data))
        except (WebSocketException, OSError) as error:
            raise BrokenPipeError(str(error)) from error

    def flush(self) -> None:
        """Do nothing: what is written is sent."""

    def close(self) -> None:
        """End the connection, also under other threads that read and write; they have an end of stream."""
        self._socket.abort()

    def release(self) -> None:
        """Give the socket back, when no thread uses it any more."""
        self._socket.shutdown()

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; None while it runs, and when nobody knows."""
        if self._status.get("status") == "Success":
            return 0
        causes = (self._status.get("details") or {}).get("causes") or []
        return next((int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"), None)

    @property
    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        return self._stderr.decode(errors="replace").strip()

    def receive(self) -> memoryview:
        """Wait for the next bytes of its stdout; empty at the end."""
        while True:
            try:
                opcode, frame = self._socket.recv_data_frame(control_frame=True)
            except (WebSocketConnectionClosedException, OSError):
                return memoryview(b"")
            if opcode == ABNF.OPCODE_CLOSE:
                return memoryview(b"")
            if opcode != ABNF.OPCODE_BINARY or len(frame.data) < 2:  # noqa: PLR2004 - a channel, and content
                continue
            channel, content = frame.data[0], memoryview(frame.data)[1:]
            if channel == _STDOUT:
                return content
            self._note(channel, bytes(content))

    def _note(self, channel: int, content: bytes) -> None:
        if channel == _STDERR:
            self._stderr = (self._stderr + content)[-_LAST:]
        elif channel == _STATUS:
            self._status = json.loads(content)


class _Stdout(io.RawIOBase):
    def __init__(self, command: Exec) -> None:
        self._command, self._rest = command, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = self._command.receive()
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
