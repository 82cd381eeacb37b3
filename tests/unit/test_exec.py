"""A command's streams are what the server puts into frames, however it cuts them."""

import json
import socket
import ssl
import struct
import threading
from collections.abc import Iterator

import pytest
import trustme
from websocket import ABNF, WebSocket

from manycpu.pipeline.adapters.cluster_exec import Exec

STDOUT, STDERR, STATUS = b"\1", b"\2", b"\3"


def frame(content: bytes, opcode: int = ABNF.OPCODE_BINARY, *, last: bool = True) -> bytes:
    """Spell a frame as a server does: not masked."""
    size = len(content)
    head = bytes([last << 7 | opcode])
    if size < 126:
        return head + bytes([size]) + content
    return (
        head + (struct.pack("!BH", 126, size) if size < 1 << 16 else struct.pack("!BQ", 127, size)) + content
    )


@pytest.fixture
def ends() -> Iterator[tuple[Exec, socket.socket]]:
    """Give a command and the server's end of its connection."""
    ours, server = socket.socketpair()
    connected = WebSocket()
    connected.sock = ours
    command = Exec(connected)
    with server:
        yield command, server
    command.release()


def test_stdout_is_read_across_frames_of_any_size(ends: tuple[Exec, socket.socket]) -> None:
    command, server = ends
    parts = [b"a" * 10, b"b" * 125, b"c" * 126, b"d" * 70_000, b""]
    server.sendall(b"".join(frame(STDOUT + part) for part in parts))
    server.shutdown(socket.SHUT_WR)
    whole = b"".join(parts)
    assert bytes(command.read(200)) == whole[:200]
    assert bytes(command.read(60_000)) == whole[200:60_200]
    assert bytes(command.read(100_000)) == whole[60_200:]
    assert not command.read(1)


def test_a_message_in_several_frames_is_one(ends: tuple[Exec, socket.socket]) -> None:
    command, server = ends
    server.sendall(frame(STDOUT, last=False) + frame(b"one ", ABNF.OPCODE_CONT, last=False))
    server.sendall(frame(b"two", ABNF.OPCODE_CONT) + frame(STDOUT + b" three"))
    assert bytes(command.read(13)) == b"one two three"


def test_what_is_said_beside_stdout_is_kept_apart(ends: tuple[Exec, socket.socket]) -> None:
    command, server = ends
    status = {"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "3"}]}}
    server.sendall(frame(STDERR) + frame(STATUS) + frame(STDOUT))  # what opens the streams
    assert [command.exit_code] == [None]
    server.sendall(frame(STDOUT + b"he") + frame(STDERR + b"no such file\n") + frame(STDOUT + b"re"))
    assert bytes(command.read(4)) == b"here"
    server.sendall(frame(STATUS + json.dumps(status).encode()) + frame(b"\x03\xe8", ABNF.OPCODE_CLOSE))
    assert not command.read(1)
    assert (command.exit_code, command.last_words) == (3, "no such file")


def test_a_ping_is_answered(ends: tuple[Exec, socket.socket]) -> None:
    command, server = ends
    server.sendall(frame(b"there?", ABNF.OPCODE_PING) + frame(STDOUT + b"x"))
    assert bytes(command.read(1)) == b"x"
    assert server.recv(1)[0] == 0x80 | ABNF.OPCODE_PONG


def test_a_frame_that_ends_early_is_an_end(ends: tuple[Exec, socket.socket]) -> None:
    command, server = ends
    server.sendall(frame(STDOUT + b"whole") + frame(STDOUT + b"half")[:-2])
    server.shutdown(socket.SHUT_WR)
    assert bytes(command.read(100)) == b"whole"
    command.close()  # also after the library has closed the socket


@pytest.fixture
def tls_ends() -> Iterator[tuple[Exec, ssl.SSLSocket]]:
    """Give a command and the server's end of its connection, over TLS."""
    authority, (ours, server) = trustme.CA(), socket.socketpair()
    trusts, proves = ssl.create_default_context(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.configure_trust(trusts)
    authority.issue_cert("localhost").configure_cert(proves)
    proves.num_tickets = 0
    there = proves.wrap_socket(server, server_side=True, do_handshake_on_connect=False)
    greeting = threading.Thread(target=there.do_handshake)
    greeting.start()
    connected = WebSocket()
    connected.sock = trusts.wrap_socket(ours, server_hostname="localhost")
    greeting.join()
    command = Exec(connected)
    with there:
        yield command, there
    command.release()


def test_what_is_closed_under_a_reader_never_reads_what_tls_encrypts(
    tls_ends: tuple[Exec, ssl.SSLSocket],
) -> None:
    command, server = tls_ends
    server.sendall(frame(STDOUT + b"whole"))
    command.close()
    assert bytes(command.read(100)) == b"whole"


@pytest.mark.parametrize("size", [0, 124, 125, 70_000])
def test_what_is_written_is_one_frame(ends: tuple[Exec, socket.socket], size: int) -> None:
    command, server = ends
    reader = WebSocket()
    reader.sock = server
    command.writelines((b"", b"x" * size))
    assert reader.recv_frame().data == b"\0" + b"x" * size
