"""Connect to a helper pod directly over TLS, instead of through the streams of an exec and the API server.

It begins with an exec, over which both ends agree:

1. The worker makes a key and a certificate for this one command (``make_identity``), and sends them to the
   pod over the exec's stdin (``offer``). The pod listens, and returns its port (``accept``).
2. The worker tries to connect to that port (``connect``).
3. The worker sends over the exec which way it uses (``choose``): the connections, or the exec if it could not
   connect.

Key and certificate are never on a disk, except outside of Linux while the worker's OpenSSL reads them.
Both ends prove that they have the key (mutual TLS 1.3), and trust only this certificate. There are two
connections, one for each direction: OpenSSL does not allow two threads to read and write one at once.
"""

import os
import select
import selectors
import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from tempfile import NamedTemporaryFile
from typing import BinaryIO, Final, Protocol

from manycpu.pipeline.pod.channel import Content, Reader, Writer

PORT: Final = 23457
"""The port of a pod; if it is in use, the pod chooses another."""
CONNECT_TIMEOUT_S: Final = 3.0  # seconds to connect
HANDSHAKE_TIMEOUT_S: Final = 5.0  # seconds until both ends have proved their identity
ANSWER_TIMEOUT_S: Final = 60.0  # for the next message over the exec
_VALIDITY: Final = timedelta(days=8)  # before and after now: more than a pod's life and any clock skew
_MAX_HANDSHAKES: Final = 256  # at the same time: a limit for peers that connect and send nothing
_SIZE_PREFIX: Final = struct.Struct(">I")
_ACCEPTED: Final = b"k"
_TO_POD, _FROM_POD = b"w", b"r"  # first byte on a connection: its direction
_DIRECT, _EXEC = b"D", b"E"  # the worker's choice
_POLL_INTERVAL_S: Final = 0.05  # between two checks whether the server must stop
_RECORD_BYTES: Final = 1 << 14  # smaller parts are sent in one TLS record


class Streams:
    """Two TLS connections: one to read, one to write."""

    def __init__(self, reading: ssl.SSLSocket, writing: ssl.SSLSocket) -> None:
        self._reading, self._writing = reading, writing

    def read(self, size: int) -> memoryview:
        """Read exactly ``size`` bytes; fewer only at the end of the stream."""
        content, received = memoryview(bytearray(size)), 0
        while received < size:
            count = self._reading.recv_into(content[received:])
            if not count:
                break
            received += count
        return content[:received]

    def writelines(self, parts: Sequence[Content]) -> None:
        """Write all parts.

        Raises:
            OSError: The connection is broken.
        """
        if sum(map(len, parts)) <= _RECORD_BYTES:
            self._writing.sendall(b"".join(parts))
            return
        for part in parts:
            self._writing.sendall(part)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""

    def close(self) -> None:
        """End both connections, also while other threads read and write."""
        for connection in (self._reading, self._writing):
            with suppress(OSError):  # SSLSocket's own shutdown would end TLS while these threads use it
                socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def release(self) -> None:
        """Release the sockets, when no thread uses them any more."""
        self._reading.close()
        self._writing.close()


def make_identity(name: str) -> bytes:
    """Make a key (P-256) and a self-signed certificate for one command of a helper pod, both in PEM.

    Args:
        name: The certificate's common name, which is never compared.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])  # X.509 allows 64 characters
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - _VALIDITY)
        .not_valid_after(now + _VALIDITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    unencrypted = serialization.NoEncryption()
    encoding, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, pkcs8, unencrypted) + certificate.public_bytes(encoding)


class _Exec(Reader, Writer, Protocol):
    """The streams of an exec."""


def offer(running: _Exec, identity: bytes) -> int:
    """Send a pod the key and the certificate, in PEM, over an exec; return the port on which the pod listens.

    Raises:
        OSError: The exec has ended.
    """
    running.writelines((_SIZE_PREFIX.pack(len(identity)), identity))
    running.flush()
    answer = running.read(_SIZE_PREFIX.size)
    if len(answer) < _SIZE_PREFIX.size:
        raise ConnectionResetError("it ended before it listened")
    (port,) = _SIZE_PREFIX.unpack(answer)
    return int(port)


def connect(host: str, port: int, identity: bytes) -> Streams:
    """Open both connections to a pod that listens.

    Args:
        host: The pod's IP address.
        port: The port that :func:`offer` returned.
        identity: The key and the certificate that :func:`offer` sent, in PEM.

    Raises:
        OSError: The pod cannot be reached in time, or another process listens there; also errors of TLS.
    """
    reading = _open_connection(host, port, identity, _FROM_POD)
    try:
        writing = _open_connection(host, port, identity, _TO_POD)
    except BaseException:
        reading.close()
        raise
    return Streams(reading, writing)


def choose(running: _Exec, *, direct: bool) -> None:
    """Tell the listening pod which way the worker uses: the direct connections, or the exec.

    Raises:
        OSError: The exec has ended.
    """
    running.writelines((_DIRECT if direct else _EXEC,))
    running.flush()


def _open_connection(host: str, port: int, identity: bytes, direction: bytes) -> ssl.SSLSocket:
    """Open a connection for one direction, and let both ends prove that they have the key.

    ``direction``: ``_TO_POD`` or ``_FROM_POD``.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT, identity)
    with ExitStack() as stack:
        plain = stack.enter_context(socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S))
        plain.settimeout(HANDSHAKE_TIMEOUT_S)
        connection = stack.enter_context(context.wrap_socket(plain))
        connection.sendall(direction)
        if connection.recv(1) != _ACCEPTED:
            raise ConnectionRefusedError("it does not take the connection")
        _set_up(connection)
        stack.pop_all()  # the connection stays open
        return connection


def accept(stdin: BinaryIO, stdout: BinaryIO) -> Streams | None:
    """Listen, in a pod, until the worker has connected; return the connections. None: it chose the exec.

    Args:
        stdin: The exec's stdin, which brings the identity.
        stdout: The exec's stdout.

    Raises:
        ConnectionError: The worker is gone.
    """
    _wait_readable(stdin)
    (size,) = _SIZE_PREFIX.unpack(_read_exactly(stdin, _SIZE_PREFIX.size))
    identity = _read_exactly(stdin, size)
    with _listen() as listener:
        server = _Server(listener, identity)
        port = listener.getsockname()[1]
        stdout.write(_SIZE_PREFIX.pack(port))
        stdout.flush()
        _wait_readable(stdin)  # the worker chooses after it has the port: nothing is in the buffer yet
        choice = _read_exactly(stdin, 1)
        connections = server.end()
    if choice == _EXEC:
        return None
    return Streams(connections[_TO_POD], connections[_FROM_POD])


class _Server:
    """Accepts connections in a thread, and keeps those whose peer proves that it has the key.

    The handshake of each connection runs in a thread of its own.
    """

    def __init__(self, listener: socket.socket, identity: bytes) -> None:
        self._listener, self._ended = listener, threading.Event()
        self._context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
        self._connections: dict[bytes, ssl.SSLSocket] = {}
        self._room = threading.Semaphore(_MAX_HANDSHAKES)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def end(self) -> dict[bytes, ssl.SSLSocket]:
        """Stop accepting connections, and return those of the worker, by direction."""
        self._ended.set()
        self._thread.join()
        return self._connections

    def _accept(self) -> None:
        """Run in a thread: accept until :meth:`end`, and start a handshake for each connection."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._ended.is_set():
                if selector.select(timeout=_POLL_INTERVAL_S) and self._room.acquire(timeout=_POLL_INTERVAL_S):
                    plain, _ = self._listener.accept()
                    threading.Thread(target=self._handshake, args=(plain,), daemon=True).start()

    def _handshake(self, plain: socket.socket) -> None:
        """Run in a thread: keep a connection if its peer proves that it has the key."""
        try:
            plain.settimeout(HANDSHAKE_TIMEOUT_S)
            connection = self._context.wrap_socket(plain, server_side=True)
            _set_up(connection)
            direction = connection.recv(1)
            # Kept before the answer: after it the worker may choose, which ends this server.
            self._connections[direction] = connection
            connection.sendall(_ACCEPTED)
        except OSError:  # a peer without the key, or a broken connection
            plain.close()
        finally:
            self._room.release()


def _listen() -> socket.socket:
    """Listen on the known port, or on any free port if that one is in use."""
    try:
        return _listen_at(PORT)
    except OSError:
        return _listen_at(0)


def _listen_at(port: int) -> socket.socket:
    """Listen on a port, for IPv4 and IPv6 if the system can."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _context(side: "ssl._SSLMethod", identity: bytes) -> ssl.SSLContext:
    """Make a TLS context, for a client or a server, that has the key and trusts only this certificate.

    ``identity``: the key and the certificate, in PEM.
    """
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is compared
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # the peer would have to read them, also where it only writes
    _, mark, certificate = identity.partition(b"-----BEGIN CERTIFICATE-----")
    context.load_verify_locations(cadata=(mark + certificate).decode())
    with _readable_path(identity) as path:
        context.load_cert_chain(path)
    return context


@contextmanager
def _readable_path(content: bytes) -> Iterator[str]:
    """Write content to a file, and yield its path for OpenSSL, which cannot read from memory.

    The file itself is in memory where the system can do that.
    """
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("identity"), "wb", buffering=0) as file:
            file.write(content)
            yield f"/proc/self/fd/{file.fileno()}"
        return
    with NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        yield file.name


def _set_up(connection: ssl.SSLSocket) -> None:
    """Set the options of a connection whose handshake has succeeded."""
    connection.settimeout(None)  # from here on the channel watches for silence
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _wait_readable(stream: BinaryIO) -> None:
    """Wait a minute at most for bytes: the worker may be gone although the stream is open.

    The stream's buffer must be empty: ``select`` does not see the bytes in it.

    Raises:
        ConnectionResetError: Nothing came in time.
    """
    ready, _, _ = select.select([stream], [], [], ANSWER_TIMEOUT_S)
    if not ready:
        raise ConnectionResetError(f"no word of the worker for {ANSWER_TIMEOUT_S:g} s")


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    """Read ``size`` bytes; raise ConnectionResetError if the stream ends before."""
    content = stream.read(size)
    if len(content) < size:
        raise ConnectionResetError("the worker is gone")
    return content
