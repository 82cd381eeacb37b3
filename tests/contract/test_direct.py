"""A helper pod that is spoken to straight over TLS; here as a process of this machine, on loopback."""

import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from support.folder_contents import contents, location
from support.killable_programs import Program

from manycpu.pipeline.pod import client, direct
from manycpu.pipeline.pod.channel import Channel, Content, LostError
from manycpu.pipeline.pod.direct import make_identity


class Pod:
    """What an exec with ``direct`` starts, and the exec's streams."""

    def __init__(self, process: "Program[bytes]") -> None:
        self.process = process

    def read(self, size: int) -> bytes:
        assert self.process.stdout
        return self.process.stdout.read(size)

    def writelines(self, parts: Sequence[Content]) -> None:
        assert self.process.stdin
        self.process.stdin.writelines(parts)

    def flush(self) -> None:
        assert self.process.stdin
        self.process.stdin.flush()


@contextmanager
def started(command: str) -> Iterator[Pod]:
    words = [sys.executable, "-m", "manycpu.pipeline.pod", command, "direct"]
    program: Program[bytes] = Program(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with program as process:
        yield Pod(process)
        process.kill()
        assert process.stdin
        with suppress(BrokenPipeError):
            process.stdin.close()


def straight(exec_: "Pod | _Pipes", port: int, identity: bytes) -> direct.Streams:
    streams = direct.connect("127.0.0.1", port, identity)
    direct.choose(exec_, direct=True)
    return streams


@contextmanager
def connected(command: str) -> Iterator[tuple[Channel, direct.Streams, Pod]]:
    with started(command) as pod:
        identity = make_identity("test")
        streams = straight(pod, direct.offer(pod, identity), identity)
        with Channel(streams, streams, streams.close) as channel:
            yield channel, streams, pod
        streams.release()


def test_a_folder_goes_there_and_back_over_tls(source: Path, tmp_path: Path) -> None:
    with connected("receive") as (channel, streams, pod):
        assert {each.version() for each in (streams._reading, streams._writing)} == {"TLSv1.3"}  # noqa: SLF001
        done = client.push(channel, location(source), str(tmp_path / "volume"))
        assert pod.process.wait(300) == 0
    with connected("send") as (channel, _, _):
        client.pull(channel, done["path"], tmp_path / "out", "key", lambda *_: None)
    assert contents(tmp_path / "out").items() >= contents(source).items()


def test_what_broke_in_the_middle_goes_on_where_it_was(source: Path, tmp_path: Path) -> None:
    with connected("receive") as (channel, streams, _):
        said = channel.send_message

        def breaks(kind: str, **fields: object) -> None:
            said(kind, **fields)
            streams.close()

        channel.send_message = breaks  # type: ignore[method-assign]
        with pytest.raises(LostError):
            client.push(channel, location(source), str(tmp_path / "volume"))
    with connected("receive") as (channel, _, _):
        done = client.push(channel, location(source), str(tmp_path / "volume"))
    assert contents(Path(done["path"])) == contents(source)


def test_where_the_pod_cannot_be_reached_its_exec_serves(source: Path, tmp_path: Path) -> None:
    with started("receive") as pod:
        direct.offer(pod, make_identity("test"))
        direct.choose(pod, direct=False)
        with Channel(pod, pod, pod.process.kill) as channel:
            done = client.push(channel, location(source), str(tmp_path / "volume"))
    assert contents(Path(done["path"])) == contents(source)


def test_a_pod_whose_worker_goes_before_it_has_chosen_ends() -> None:
    with started("receive") as pod:
        direct.offer(pod, make_identity("test"))
        assert pod.process.stdin
        pod.process.stdin.close()
        assert pod.process.wait(300) != 0


def test_who_has_no_key_or_another_is_not_let_in_and_learns_nothing(source: Path, tmp_path: Path) -> None:
    own, foreign = make_identity("own"), make_identity("foreign")
    with started("receive") as pod:
        port = direct.offer(pod, own)
        with pytest.raises(ssl.SSLError):  # another certificate is not the pod's
            direct.connect("127.0.0.1", port, foreign)
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            anybody.wrap_socket(plain) as stranger,
            pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
        ):
            stranger.recv(1)
        with socket.create_connection(("127.0.0.1", port), 5) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        silent = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(8)]
        streams = straight(pod, port, own)  # and the worker is let in beside them
        with Channel(streams, streams, streams.close) as channel:
            client.push(channel, location(source), str(tmp_path / "volume"))
        streams.release()
        for each in silent:
            each.close()


def test_a_host_that_is_another_is_refused() -> None:
    identity = make_identity("own")
    with started("receive") as pod, started("receive") as other:
        direct.offer(pod, identity)
        with pytest.raises(ssl.SSLError, match="certificate verify failed"):
            direct.connect("127.0.0.1", direct.offer(other, make_identity("other")), identity)


def test_an_address_that_does_not_answer_is_given_up_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(direct, "HANDSHAKE_TIMEOUT_S", 0.5)
    with started("receive") as pod, socket.create_server(("127.0.0.1", 0)) as silent:
        direct.offer(pod, make_identity("test"))
        with pytest.raises(TimeoutError):  # it takes the connection, and says nothing
            direct.connect("127.0.0.1", silent.getsockname()[1], make_identity("test"))
        with pytest.raises(ConnectionRefusedError):
            direct.connect("127.0.0.1", 1, make_identity("test"))


def test_the_key_is_in_no_argument_no_environment_and_no_file(tmp_path: Path) -> None:
    identity = make_identity("test")
    secret = identity.split(b"\n")[1]
    with started("receive") as pod:
        direct.offer(pod, identity)
        process = psutil.Process(pod.process.pid)
        seen = " ".join([*process.cmdline(), *process.environ().values()])
        assert secret.decode() not in seen
        files = [Path(file.path) for file in process.open_files()]
        assert not [path for path in files if path.is_file() and secret in path.read_bytes()]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def both_ends() -> tuple[direct.Streams, direct.Streams]:
    """Have both ends meet, in this process."""
    identity = make_identity("test")
    reading, writing = os.pipe(), os.pipe()
    with os.fdopen(reading[0], "rb") as stdin, os.fdopen(writing[1], "wb") as stdout:
        accepted: list[direct.Streams | None] = []
        thread = threading.Thread(target=lambda: accepted.append(direct.accept(stdin, stdout)))
        thread.start()
        with os.fdopen(reading[1], "wb") as to_pod, os.fdopen(writing[0], "rb") as from_pod:
            exec_ = _Pipes(from_pod, to_pod)
            near = straight(exec_, direct.offer(exec_, identity), identity)
        thread.join()
    far = accepted[0]
    assert far is not None
    return near, far


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no files in memory alone")
def test_neither_end_needs_room_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    near, far = both_ends()
    near.writelines((b"here",))
    assert bytes(far.read(4)) == b"here"
    for end in (near, far):
        end.close()
        end.release()


def test_both_directions_at_once_do_not_disturb_each_other() -> None:
    """Many megabytes each way, read and written by threads of their own on both ends."""
    size = 32 << 20
    sent = os.urandom(1 << 20)
    near, far = both_ends()
    received: list[int] = []
    threads = [threading.Thread(target=_send, args=(end, sent, size)) for end in (near, far)]
    threads += [threading.Thread(target=_receive, args=(end, sent, size, received)) for end in (near, far)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(300)
    assert received == [size, size]
    for end in (near, far):
        end.close()
        end.release()


def test_a_pod_that_hears_nothing_of_its_worker_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "ANSWER_TIMEOUT_S", 0.2)
    reading, writing = os.pipe(), os.pipe()
    with os.fdopen(reading[0], "rb") as stdin, os.fdopen(writing[1], "wb") as stdout:
        with pytest.raises(ConnectionResetError, match=r"no word of the worker for 0\.2 s"):
            direct.accept(stdin, stdout)
        identity = make_identity("test")
        os.write(reading[1], len(identity).to_bytes(4, "big") + identity)
        with pytest.raises(ConnectionResetError, match="no word"):
            direct.accept(stdin, stdout)
        os.close(reading[1])
        os.close(writing[0])


class _Pipes:
    def __init__(self, reading: object, writing: object) -> None:
        self.read, self.writelines = reading.read, writing.writelines  # type: ignore[attr-defined]
        self.flush = writing.flush  # type: ignore[attr-defined]


def _send(end: direct.Streams, block: bytes, size: int) -> None:
    for _ in range(size // len(block)):
        end.writelines((b"head!", block))


def _receive(end: direct.Streams, block: bytes, size: int, received: list[int]) -> None:
    total = 0
    for _ in range(size // len(block)):
        assert bytes(end.read(5)) == b"head!"
        assert end.read(len(block)) == block
        total += len(block)
    received.append(total)
