"""Run a command in a running container, with its streams, over one websocket.

The websocket is opened as the client's own stream opens it. Its frames are read and written here, straight
from and to the socket: masking and gathering them in Python costs more than the transfer itself.
"""

import json
import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from io import BufferedReader
from typing import Any, Final, cast
from urllib.parse import urlsplit, urlunsplit

from kubernetes.stream import ws_client
from websocket import (
    ABNF,
    WebSocket,
    WebSocketBadStatusException,
    WebSocketException,
)

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.spec.errors import ClusterError

__all__ = ["Exec", "start"]

_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
_PROTOCOLS: Final = f"{ws_client.V5_CHANNEL_PROTOCOL},{ws_client.V4_CHANNEL_PROTOCOL}"
_OPEN: Final = 30.0  # seconds
_LAST: Final = 4000  # bytes of its last output on stderr
_KEPT: Final = 1 << 16  # bytes of output beside stdout
_BUFFER: Final = 1 << 16  # bytes
_DATA: Final = (ABNF.OPCODE_CONT, ABNF.OPCODE_BINARY)
# RFC 6455, 5.2: the first byte of a frame that is a whole message, and what the second may be.
_WHOLE, _MASKED, _IN_TWO, _IN_EIGHT = 0x80 | ABNF.OPCODE_BINARY, 0x80, 126, 127


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
    web_socket = WebSocket(sslopt=_tls(settings), skip_utf8_validation=True)
    try:
        web_socket.connect(url, **_options(settings, url, headers))
        web_socket.settimeout(None)  # from here on, who talks over it gives up whoever is silent
    except WebSocketBadStatusException as error:
        raise _refused(error, pod) from error
    except (WebSocketException, OSError) as error:
        raise ClusterError(f"no command could be started in pod {pod}: {error}") from error
    return Exec(web_socket)


def _options(settings: Any, url: str, headers: dict[str, str]) -> dict[str, Any]:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    options = {"header": [*lines, f"Sec-WebSocket-Protocol: {_PROTOCOLS}"], "timeout": _OPEN}
    proxied: dict[str, Any] = ws_client.websocket_proxycare(options, settings, url, headers)
    return proxied


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
    return ClusterError.of_status(error.status_code, f"no command could be started in pod {pod}: {message}")


class Exec:
    """A command that runs: its stdin and stdout, and how it ended."""

    def __init__(self, web_socket: WebSocket) -> None:
        self._socket = web_socket
        self._connection = cast("ssl.SSLSocket", web_socket.sock)
        self._frames = cast("BufferedReader", self._connection.makefile("rb", _BUFFER))
        self._channel, self._unread = _STDOUT, 0  # of the frame that is read: bytes that were not read yet
        self._output: dict[int, bytes] = {}  # by channel

    def writelines(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write to its stdin, in one frame.

        Raises:
            OSError: It has ended, or the connection is broken.
        """
        frame = b"".join((_spelled(1 + sum(map(len, parts))), bytes([_STDIN]), *parts))
        with self._socket.lock:
            self._connection.sendall(frame)

    def flush(self) -> None:
        """Do nothing: what is written is sent."""

    def close(self) -> None:
        """End the connection, also under other threads that read and write; they have an end of stream."""
        with suppress(OSError):  # SSLSocket's own would take TLS away under them
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)

    def limit(self, seconds: float | None) -> None:
        """Give up to read or write after so many seconds; None: never, since who talks over it does."""
        self._connection.settimeout(seconds)

    def release(self) -> None:
        """Release the socket, when no thread uses it any more."""
        self._frames.close()
        self._socket.shutdown()

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; None while it runs, and when nobody knows."""
        status = json.loads(self._output.get(_STATUS) or b"{}")
        if status.get("status") == "Success":
            return 0
        causes = (status.get("details") or {}).get("causes") or []
        return next((int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"), None)

    @property
    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        return self._output.get(_STDERR, b"")[-_LAST:].decode(errors="replace").strip()

    def read(self, size: int) -> memoryview:
        """Read from its stdout: exactly this much, less only at the end."""
        content, done = memoryview(bytearray(size)), 0
        with suppress(OSError, EOFError, ValueError, WebSocketException):  # ValueError: the socket was closed
            while done < size and (self._unread or self._await()):
                count = self._frames.readinto(content[done : done + self._unread])
                if not count:
                    break
                done, self._unread = done + count, self._unread - count
        return content[:done]

    def _await(self) -> bool:
        """Wait for the next bytes of its stdout; False at the end."""
        while not self._unread:
            opcode, size = self._head()
            if opcode == ABNF.OPCODE_CLOSE:
                return False
            if opcode == ABNF.OPCODE_BINARY and size:
                self._channel, size = self._take(1)[0], size - 1
            if opcode in _DATA and self._channel == _STDOUT:
                self._unread = size
            else:
                self._note(opcode, self._take(size))
        return True

    def _head(self) -> tuple[int, int]:
        """Read the next frame's opcode and length; servers do not mask."""
        first, size = self._take(2)
        if size >= _IN_TWO:
            size = int.from_bytes(self._take(2 if size == _IN_TWO else 8))
        return first & 0x0F, size

    def _note(self, opcode: int, content: bytes) -> None:
        if opcode == ABNF.OPCODE_PING:
            self._socket.pong(content)
        elif opcode in _DATA:
            self._output[self._channel] = (self._output.get(self._channel, b"") + content)[-_KEPT:]

    def _take(self, size: int) -> bytes:
        content: bytes = self._frames.read(size)
        if len(content) < size:
            raise EOFError
        return content


def _spelled(size: int) -> bytes:
    """Build a frame's head, with a mask of zeros: masks guard proxies against web pages, and this is none."""
    if size < _IN_TWO:
        return struct.pack("!BB4x", _WHOLE, _MASKED | size)
    if size <= 0xFFFF:  # noqa: PLR2004 - what two bytes hold
        return struct.pack("!BBH4x", _WHOLE, _MASKED | _IN_TWO, size)
    return struct.pack("!BBQ4x", _WHOLE, _MASKED | _IN_EIGHT, size)
