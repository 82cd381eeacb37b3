"""Pass a process's streams over a websocket, as kubelet and API server do for an exec."""

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol, Self

from support.killable_programs import Program
from websocket import ABNF, WebSocket, WebSocketException

_STDOUT, _STDERR, _STATUS = b"\1", b"\2", b"\3"


class Process(Protocol):
    """A process whose streams are passed on."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""


class PodForks:
    """Starts the program of helper pods quickly: as a fork of a process that has imported it already.

    ``library`` is the folder from which that process imports manycpu.
    """

    def __init__(self, library: Path) -> None:
        self._asks, other = socket.socketpair()
        env = os.environ | {"PYTHONPATH": f"{library}:{os.environ.get('PYTHONPATH', '')}"}
        script = Path(__file__).parents[1] / "scripts" / "pod_forks.py"
        self._server: Program[bytes] = Program([sys.executable, str(script)], stdin=other.fileno(), env=env)
        other.close()
        self.plan()

    def plan(self, fault: str = "", count: int = 0, log: str = os.devnull) -> None:
        """Plan a fault at the ``count``-th change that programs make from now on; 0: no fault.

        The file ``log``, which is emptied, gets a line for each change.
        """
        Path(log).write_text("")
        self._plan = {"fault": fault, "count": count, "log": log}

    def start(self, words: Sequence[str]) -> "Fork":
        """Start a command of the program; return its process."""
        (stdin, our_in), *outs = os.pipe(), os.pipe(), os.pipe(), os.pipe()
        theirs = [stdin, *(out for _, out in outs)]
        message = json.dumps(self._plan | {"words": words})
        socket.send_fds(self._asks, [message.encode()], theirs)
        for each in theirs:
            os.close(each)
        return Fork(our_in, *(ours for ours, _ in outs))

    def end(self) -> None:
        """End the process that starts the others."""
        self._asks.close()
        self._server.wait()


class Fork:
    """A process that :class:`PodForks` started; it is killed at the end of the with block."""

    def __init__(self, stdin: int, stdout: int, stderr: int, told: int) -> None:
        self.stdin: IO[bytes] | None = open(stdin, "wb")  # noqa: SIM115 - closed below
        self.stdout: IO[bytes] | None = open(stdout, "rb")  # noqa: SIM115
        self.stderr: IO[bytes] | None = open(stderr, "rb")  # noqa: SIM115
        self._told = open(told)  # noqa: SIM115
        self._pid = int(self._told.readline())

    def wait(self) -> int:
        code = int(self._told.readline())
        return code if code >= 0 else 128 - code  # as container runtimes report a signal

    def end(self) -> None:
        """Kill it."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for stream in (self.stdin, self.stdout, self.stderr, self._told):
            with suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]


def pass_in(far: WebSocket, program: Process) -> None:
    """Write what comes over a websocket to the process's stdin, until the connection ends."""
    assert program.stdin
    with suppress(OSError, WebSocketException):
        while frame := far.recv_frame():
            if frame.opcode == ABNF.OPCODE_CLOSE:
                break
            program.stdin.write(frame.data[1:])
            program.stdin.flush()
    with suppress(BrokenPipeError):
        program.stdin.close()


def pass_out(write: Callable[[bytes], object], program: Process) -> None:
    """Send what the process prints over a websocket, and its exit code at the end.

    ``write`` sends bytes to the client: a frame of the websocket, marked with the stream's channel.
    """
    sending = threading.Lock()

    def send(content: bytes) -> None:
        with sending, suppress(OSError):
            write(ABNF(1, 0, 0, 0, ABNF.OPCODE_BINARY, 0, content).format())

    def pass_on(stream: Any, channel: bytes) -> None:
        while content := os.read(stream.fileno(), 1 << 15):
            send(channel + content)

    beside = threading.Thread(target=pass_on, args=(program.stderr, _STDERR))
    beside.start()
    pass_on(program.stdout, _STDOUT)
    beside.join()
    causes = [{"reason": "ExitCode", "message": str(program.wait())}]
    send(_STATUS + json.dumps({"status": "Failure", "details": {"causes": causes}}).encode())
