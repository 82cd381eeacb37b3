"""Run a command in a running container, with its streams, over one websocket.

The websocket is opened like the client's own stream. This module reads and writes its frames directly on the
socket: to mask and join them in Python costs more than the transfer itself.
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
_OPEN_TIMEOUT_S: Final = 30.0
_LAST_BYTES: Final = 4000  # of stderr, for messages
_KEPT_BYTES: Final = 1 << 16  # of each stream beside stdout
_BUFFER_BYTES: Final = 1 << 16
_DATA: Final = (ABNF.OPCODE_CONT, ABNF.OPCODE_BINARY)
# RFC 6455, 5.2: the first byte of a frame that is a whole message, and values of the second byte.
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
    tls = {
        "cert_reqs": ssl.CERT_REQUIRED if settings.verify_ssl else ssl.CERT_NONE,
        "check_hostname": settings.verify_ssl and settings.assert_hostname is not False,
        "ca_certs": settings.ssl_ca_cert,
        "certfile": settings.cert_file,
        "keyfile": settings.key_file,
        "server_hostname": settings.tls_server_name,
    }
    tls = {name: value for name, value in tls.items() if value is not None}
    web_socket = WebSocket(sslopt=tls, skip_utf8_validation=True)
    try:
        web_socket.connect(url, **_options(settings, url, headers))
        web_socket.settimeout(None)  # from here on the channel watches for silence
    except WebSocketBadStatusException as error:
        try:
            reason = json.loads(error.resp_body or "")["message"]
        except (ValueError, KeyError, TypeError):
            reason = str(error)
        message = f"no command could be started in pod {pod}: {reason}"
        raise ClusterError.of_status(error.status_code, message) from error
    except (WebSocketException, OSError) as error:
        raise ClusterError(f"no command could be started in pod {pod}: {error}") from error
    return Exec(web_socket)


def _options(settings: Any, url: str, headers: dict[str, str]) -> dict[str, Any]:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    options = {"header": [*lines, f"Sec-WebSocket-Protocol: {_PROTOCOLS}"], "timeout": _OPEN_TIMEOUT_S}
    proxied: dict[str, Any] = ws_client.websocket_proxycare(options, settings, url, headers)
    return proxied


class Exec:
    """A running command: its stdin and stdout, and its exit code."""

    def __init__(self, web_socket: WebSocket) -> None:
        self._socket = web_socket
        self._connection = cast("ssl.SSLSocket", web_socket.sock)
        self._frames = cast("BufferedReader", self._connection.makefile("rb", _BUFFER_BYTES))
        self._channel, self._unread = _STDOUT, 0  # of the present frame: bytes that are still to be read
        self._output: dict[int, bytes] = {}  # by channel

    def writelines(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write to its stdin, in one frame.

        Raises:
            OSError: It has ended, or the connection is broken.
        """
        frame = b"".join((_frame_head(1 + sum(map(len, parts))), bytes([_STDIN]), *parts))
        with self._socket.lock:
            self._connection.sendall(frame)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def close(self) -> None:
        """End the connection, also under threads that read and write: their stream ends."""
        with suppress(OSError):  # SSLSocket's own shutdown would remove TLS under them
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)

    def limit(self, seconds: float | None) -> None:
        """Set a timeout for reads and writes, in seconds; None: the channel watches for silence instead."""
        self._connection.settimeout(seconds)

    def release(self) -> None:
        """Release the socket, when no thread uses it any more."""
        self._frames.close()
        self._socket.shutdown()

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; None: it runs, or the code is unknown."""
        status = json.loads(self._output.get(_STATUS) or b"{}")
        if status.get("status") == "Success":
            return 0
        causes = (status.get("details") or {}).get("causes") or []
        return next((int(cause["message"]) for cause in causes if cause.get("reason") == "ExitCode"), None)

    @property
    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        return self._output.get(_STDERR, b"")[-_LAST_BYTES:].decode(errors="replace").strip()

    def read(self, size: int) -> memoryview:
        """Read exactly ``size`` bytes from its stdout; fewer only at the end."""
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
            first, size = self._take(2)  # servers do not mask
            if size >= _IN_TWO:
                size = int.from_bytes(self._take(2 if size == _IN_TWO else 8))
            opcode = first & 0x0F
            if opcode == ABNF.OPCODE_CLOSE:
                return False
            if opcode == ABNF.OPCODE_BINARY and size:
                self._channel, size = self._take(1)[0], size - 1
            if opcode in _DATA and self._channel == _STDOUT:
                self._unread = size
            else:
                self._note(opcode, self._take(size))
        return True

    def _note(self, opcode: int, content: bytes) -> None:
        if opcode == ABNF.OPCODE_PING:
            self._socket.pong(content)
        elif opcode in _DATA:
            self._output[self._channel] = (self._output.get(self._channel, b"") + content)[-_KEPT_BYTES:]

    def _take(self, size: int) -> bytes:
        content: bytes = self._frames.read(size)
        if len(content) < size:
            raise EOFError
        return content


def _frame_head(size: int) -> bytes:
    """Build a frame's head with a zero mask: masking matters for browsers only."""
    if size < _IN_TWO:
        return struct.pack("!BB4x", _WHOLE, _MASKED | size)
    if size <= 0xFFFF:  # noqa: PLR2004 - what two bytes hold
        return struct.pack("!BBH4x", _WHOLE, _MASKED | _IN_TWO, size)
    return struct.pack("!BBQ4x", _WHOLE, _MASKED | _IN_EIGHT, size)
