"""Run a command in a running container, with its streams, over one websocket."""

import json
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
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

_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
_PROTOCOLS: Final = "v5.channel.k8s.io,v4.channel.k8s.io"
_OPEN_TIMEOUT_S: Final = 30.0
_LAST_BYTES: Final = 4000  # of stderr, for messages
_KEPT_BYTES: Final = 1 << 16  # of each stream beside stdout


def start(cluster: Cluster, pod: str, container: str, argv: Sequence[str]) -> "Exec":
    """Start a command in a container of a pod; returns its streams.

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
    web_socket = WebSocket(sslopt=tls, skip_utf8_validation=True, enable_multithread=True)
    try:
        web_socket.connect(url, **_options(settings, url, headers))  # with a timeout
        web_socket.settimeout(None)  # from here on, the user of the Exec watches for silence
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
    """Build the options of a websocket: headers, timeout, and the proxy if there is one."""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    options = {"header": [*lines, f"Sec-WebSocket-Protocol: {_PROTOCOLS}"], "timeout": _OPEN_TIMEOUT_S}
    with_proxy: dict[str, Any] = ws_client.websocket_proxycare(options, settings, url, headers)
    return with_proxy


class Exec:
    """A running command: its stdin and stdout, and its exit code."""

    def __init__(self, web_socket: WebSocket) -> None:
        self._socket = web_socket
        # Kept for :meth:`close`: the library drops it at the end of the stream.
        self._connection = cast("socket.socket", web_socket.sock)
        self._unread = memoryview(b"")  # of stdout
        self._output: dict[int, bytes] = {}  # of the other channels

    def writelines(self, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Write to its stdin, in one frame.

        Raises:
            OSError: It has ended, or the connection is broken.
        """
        try:
            self._socket.send_binary(b"".join((bytes([_STDIN]), *parts)))
        except WebSocketException as error:
            raise ConnectionError(str(error)) from error

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def close(self) -> None:
        """End the connection, also while threads read and write: for them the stream ends."""
        with suppress(OSError):  # SSLSocket's own shutdown would remove TLS under them
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)

    def limit(self, seconds: float | None) -> None:
        """Set a timeout for reads and writes, in seconds; None: no timeout."""
        self._socket.settimeout(seconds)

    def release(self) -> None:
        """Release the socket, when no thread uses it any more."""
        self._socket.shutdown()

    @property
    def exit_code(self) -> int | None:
        """The command's exit code; None: the command still runs, or its code is unknown."""
        # At the end of a command, Kubernetes writes an object of kind Status to this channel.
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
        """Read exactly ``size`` bytes from its stdout; fewer only at its end, or if the connection breaks."""
        content, filled = memoryview(bytearray(size)), 0
        with suppress(OSError, WebSocketException):  # a broken connection is the end, too
            while filled < size:
                if not self._unread and not self._receive():
                    break
                part = self._unread[: size - filled]
                content[filled : filled + len(part)] = part
                filled += len(part)
                self._unread = self._unread[len(part) :]
        return content[:filled]

    def _receive(self) -> bool:
        """Receive messages until one has bytes of stdout; keep what comes of the other streams.

        True: there are bytes of stdout. False: the connection has ended.
        """
        while not self._unread:
            opcode, message = self._socket.recv_data()
            if opcode == ABNF.OPCODE_CLOSE:
                return False
            # The first byte is the channel's number; a message without it counts as no output.
            channel = message[0] if message else _STDOUT
            if channel == _STDOUT:
                self._unread = memoryview(message)[1:]
            else:
                self._output[channel] = (self._output.get(channel, b"") + message[1:])[-_KEPT_BYTES:]
        return True
