"""The way to a helper pod, straight or by its exec; the pod's program is a process of this machine here.

The exec is the real one, over a websocket on a pair of sockets; what is behind it passes the process's
streams on as kubelet and API server do, and each hop waits while the next one is full.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from support.exec_streams import pass_in, pass_out
from support.folder_contents import contents
from support.killable_programs import Program
from support.waiting import until
from websocket import WebSocket

from manycpu.pipeline.adapters import cluster_exec
from manycpu.pipeline.adapters.cluster_exec import Exec
from manycpu.pipeline.pod import channel, client, direct
from manycpu.pipeline.pod.channel import Channel, LostError
from manycpu.pipeline.targets.kubernetes.volume import way_to_pod
from manycpu.pipeline.targets.kubernetes.volume.helper_pod import Helper
from manycpu.pipeline.targets.kubernetes.volume.way_to_pod import WayToPod
from manycpu.pipeline.transfer import Progress

ON_A_WIRE = 1400  # bytes that a packet carries where larger ones vanish
PROGRAM = (
    "import sys; from manycpu.pipeline.pod import __main__ as program; sys.exit(program.main(sys.argv[1]))"
)


class Execs:
    """Starts a process for each exec, and passes its streams on."""

    def __init__(self, code: str) -> None:
        self.ways: list[list[str]] = []
        """What each was told beside its command."""
        self.processes: list[Program[bytes]] = []
        self._code, self._cleanup = code, ExitStack()

    def start(self, _: object, __: str, ___: str, words: Sequence[str]) -> Exec:
        command, *way = words[3:]
        self.ways.append(way)
        words = [sys.executable, "-c", self._code, command, *way]
        pipe = subprocess.PIPE
        program: Program[bytes] = Program(words, stdin=pipe, stdout=pipe, stderr=pipe)
        self.processes.append(program)
        ours, server = socket.socketpair()
        near, far = WebSocket(), WebSocket()
        near.sock, far.sock = ours, server
        near.connected = True
        threads = [
            threading.Thread(target=pass_in, args=(far, program)),
            threading.Thread(target=_pass_out, args=(server, program)),
        ]
        for thread in threads:
            thread.start()
        self._cleanup.callback(_end, program, server, threads)
        return Exec(near)

    def end(self) -> None:
        self._cleanup.close()


def _pass_out(server: socket.socket, program: "Program[bytes]") -> None:
    pass_out(server.sendall, program)
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)


def _end(program: "Program[bytes]", server: socket.socket, threads: list[threading.Thread]) -> None:
    program.kill()
    with suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    server.close()
    for stream in (program.stdin, program.stdout, program.stderr):
        with suppress(BrokenPipeError):
            stream.close()  # type: ignore[union-attr]


@pytest.fixture
def execs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Execs]]:
    """Have execs start processes of this machine, with a program of the test's own."""
    with ExitStack() as made:

        def having(code: str = PROGRAM) -> Execs:
            execs = Execs(code)
            monkeypatch.setattr(cluster_exec, "start", execs.start)
            made.callback(execs.end)
            return execs

        yield having


class Here:
    """A cluster whose pod has the address of this machine."""

    def get(self, *_: str) -> dict[str, Any]:
        return {"status": {"podIP": "127.0.0.1"}}


def way() -> WayToPod:
    return WayToPod(Here(), "x", direct=True)  # type: ignore[arg-type]


class Ready(Helper):
    """A helper whose pod runs."""

    def __init__(self) -> None:
        self.name, self._progress, self._way = "x", lambda *_: None, way()
        self._most_done, self._progressed, self._owned = 0, False, False

    def wait_ready(self) -> None:
        """Be ready at once."""


class Hole:
    """A path to a port that takes connections, and swallows them from the first large packet on."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [near, far]
                for ends in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._carry, args=ends))
                    self._threads[-1].start()

    def _carry(self, of: socket.socket, to: socket.socket) -> None:
        swallows = False
        with suppress(OSError):
            while packet := of.recv(1 << 16):
                swallows = swallows or len(packet) > ON_A_WIRE
                if not swallows:
                    to.sendall(packet)


def test_a_path_that_greets_and_then_swallows_gives_way_to_the_exec(
    source: Path,
    tmp_path: Path,
    execs: Callable[..., Execs],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    offer, silence = direct.offer, 0.5

    def impatient(reader: Any, writer: Any, close: Callable[[], None], progress: Progress) -> Channel:
        straight = isinstance(reader, direct.Streams)
        return Channel(reader, writer, close, progress, silence if straight else channel.SILENCE_TIMEOUT_S)

    with ExitStack() as stack:

        def through_a_hole(*args: Any) -> int:
            hole = Hole(offer(*args))
            stack.callback(hole.close)
            return hole.port

        monkeypatch.setattr(direct, "offer", through_a_hole)
        monkeypatch.setattr(way_to_pod, "Channel", impatient)
        monkeypatch.setattr("manycpu.pipeline.targets.kubernetes.volume.helper_pod.STALL_TIMEOUT_S", 20.0)
        started = execs()
        out = tmp_path / "out"
        Ready().run("send", lambda to: client.pull(to, str(source), out, "key", lambda *_: None))
    assert started.ways == [["direct"], []]
    assert contents(out).items() >= contents(source).items()
    assert "through the API server, since nothing comes through straight any more" in caplog.text


CHATTY = """
import sys
from manycpu.pipeline.pod import __main__ as program, channel, commands
channel.STUCK_AFTER_S = 2.0
def chatty(channel, size):
    for _ in range(size >> 10):
        print("x" * 1023, file=sys.stderr)
        channel.tick()
    channel.send_message("done")
commands.COMMANDS["chatty"] = chatty
sys.exit(program.main(sys.argv[1]))
"""


def test_what_a_pods_program_prints_never_keeps_it_from_its_work(execs: Callable[..., Execs]) -> None:
    started = execs(CHATTY)
    done = way().talk("chatty", lambda to: client.ask(to, size=4 << 20), lambda *_: None)
    assert done["kind"] == "done"
    assert started.ways == [["direct"]]


HURRIED = "from manycpu.pipeline.pod import direct; direct.ANSWER_TIMEOUT_S = 0.1; " + PROGRAM


def test_a_pod_that_waited_in_vain_for_its_worker_is_asked_again(
    execs: Callable[..., Execs], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = direct.offer
    started = execs(HURRIED)

    def late(*args: Any) -> int:
        until(lambda: started.processes[-1].poll() is not None)
        return offer(*args)

    monkeypatch.setattr(direct, "offer", late)
    with pytest.raises(LostError):
        way().talk("remove", lambda to: client.ask(to, folder="/nowhere"), lambda *_: None)
    assert started.processes[-1].returncode == os.EX_UNAVAILABLE
