"""The parent of a rank: forwards its lines and signals, and ends as it ended."""

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
from types import FrameType
from typing import Final, NoReturn

from manycpu.pipeline.node import leftovers
from manycpu.pipeline.node.exit_record import ExitRecord
from manycpu.pipeline.node.hidden_secrets import HiddenSecrets
from manycpu.pipeline.node.lines import Lines, pieces
from manycpu.pipeline.node.orphan_killer import start_orphan_killer
from manycpu.pipeline.node.pipe_writer import OrphanedError, PipeWriter
from manycpu.pipeline.spec import events, kernel

__all__ = ["die_with_parent", "forward_logs"]

_FORWARDED: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_TICK = 1.0  # seconds between looks at whether the launcher still lives
_GRACE = 3.0  # seconds that a rank has to end by itself once its launcher is gone
_MOMENT = 2.0  # seconds that helpers of a script that has ended have to end by themselves
_NAMED = 10  # processes, at most, that are named in a warning
_BAR_EVERY = 30.0  # seconds, at most, between states of a progress bar that does not end its line
_BLOCK = 1 << 16
_BLOCKS = 64  # more than a pipe holds; then look up, for whoever writes may never pause
# Of the run as a whole, so that no rank is named: one that waits to start has not spoken yet.
_OF_THE_RUN: Final = events.encode("start").removesuffix("}").encode()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however the parent dies (Linux)."""
    kernel.end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def forward_logs(child: int, stream: int, signature: str, rank: int, host: str) -> NoReturn:
    """Forward a rank's lines and signals until it ends, then end as it did.

    Args:
        child: Its process id; leads a process group.
        stream: Where its stdout and stderr can be read.
        signature: What its own events begin with, and nothing that its script prints.
        rank: Its rank, for the prefix of its lines.
        host: The name of this host, for the same.
    """
    launcher = os.getppid()
    killer = start_orphan_killer(child)
    # What the script leaves behind becomes ours, so that it can be found and ended.
    kernel.adopt_orphans()
    wake = _wake_on_signals(child)
    writer = _Writer(events.join(rank, host, "").encode(), signature.encode())
    left = list[str]()
    try:
        status = _serve(child, stream, writer, wake, launcher)
        if status == 0:  # of one that failed nothing else was to be expected
            left = _left_running(stream, writer, killer)
    except OrphanedError:
        status = _end(child)
    leftovers.end(child)
    code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(OrphanedError):
        writer.read(stream)
    name = socket.gethostname()
    where = {"host": host} | ({} if name == host else {"hostname": name})  # a host may have several pods
    writer.record.write(code, rank=rank, **where)  # first: a log may be stuck
    with contextlib.suppress(OrphanedError):
        writer.finish(*_warning(left), events.encode("exit", code=code, rank=rank, **where))
    if code:
        _abort(code if code > 0 else 128 - code)
    _exit_like(code)


class _Writer:
    """Writes a rank's lines."""

    def __init__(self, prefix: bytes, signature: bytes) -> None:
        self._prefix = prefix
        self.record = ExitRecord()
        self._out = PipeWriter()
        self._lines = Lines(signature)
        self._secrets = HiddenSecrets(os.environ, sys.argv[1:])
        self._last = time.monotonic()
        stall_timeout = float(os.environ.get("MANYCPU_STALL_TIMEOUT") or "inf")
        self.bar_every = min(_BAR_EVERY, stall_timeout / 3)

    def read(self, stream: int) -> bool:
        """Forward what can be read without waiting; False at the stream's end."""
        for _ in range(_BLOCKS):
            try:
                block = os.read(stream, _BLOCK)
            except BlockingIOError:
                return True
            if not block:
                return False
            self._write(self._lines.feed(block))
        return True

    def tick(self) -> None:
        """Show a progress bar now and then: a long epoch is no silence."""
        if time.monotonic() - self._last > self.bar_every and (bar := self._lines.bar()):
            self._write([bar])

    def finish(self, *last: str) -> None:
        """Write what had no newline yet, and the last lines."""
        self._write([*self._lines.rest(), *(line.encode() for line in last)])
        self._out.drain()

    def _write(self, lines: list[bytes]) -> None:
        for line in map(self._secrets.hide, lines):
            self.record.note(line)
            prefix = b"" if line.startswith(_OF_THE_RUN) else self._prefix
            for piece in pieces(prefix, line):
                self._out.write(piece)
        if lines:
            self._last = time.monotonic()


def _serve(child: int, stream: int, writer: _Writer, wake: int, launcher: int) -> int:
    """Forward lines until the rank has ended; its wait status."""
    os.set_blocking(stream, False)
    readers, tick = [stream, wake], min(_TICK, writer.bar_every)
    while (status := _reap(child)) is None:
        ready, _, _ = select.select(readers, [], [], tick)
        if wake in ready:
            _drain(wake)
        if stream in ready and not writer.read(stream):
            readers.remove(stream)
        writer.tick()
        if os.getppid() != launcher:
            raise OrphanedError
    return status


def _end(child: int) -> int:
    """Ask the rank to end, then make it; its wait status."""
    deadline = time.monotonic() + _GRACE
    _kill(child, signal.SIGTERM)
    while (status := _reap(child)) is None:
        if time.monotonic() > deadline:
            _kill(child, signal.SIGKILL)
        time.sleep(0.05)
    return status


def _reap(child: int) -> int | None:
    """Reap whatever has ended, also orphans that became ours; the wait status of the rank once it has."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return status
            if pid == 0:
                return None
    return None


def _left_running(stream: int, writer: _Writer, killer: int) -> list[str]:
    """Name what the script left running, once what ends by itself within a moment has ended."""
    deadline = time.monotonic() + _MOMENT
    while (names := leftovers.names(but=killer)) and time.monotonic() < deadline:
        time.sleep(0.05)
        with contextlib.suppress(OrphanedError):
            writer.read(stream)  # nobody waits for room to write
    return names


def _warning(left: list[str]) -> list[str]:
    """Tell that something was left running: a service that the script needs, an upload that never ended."""
    if not left:
        return []
    which = "1 process" if len(left) == 1 else f"{len(left)} processes"
    was = "was" if len(left) == 1 else "were"
    names = ", ".join([*left[:_NAMED], *(["…"] if len(left) > _NAMED else [])])
    message = f"{which} that the script left running {was} ended: {names}"
    return [events.encode("warning", message=message)]


def _wake_on_signals(child: int) -> int:
    """Forward signals from now on, also while a write blocks; a pipe that wakes the loop up."""
    wake, wakened = os.pipe()
    for end in (wake, wakened):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)

    def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        _kill(child, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake


def _drain(wake: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(wake, 512):
            pass


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _abort(code: int) -> None:
    """Tell Hydra (Intel MPI, MPICH) to end the other ranks: it does so by itself for MPI programs only.

    One line of the PMI protocol, on the descriptor that Hydra gives to every rank.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % code)


def _exit_like(code: int) -> NoReturn:
    if code < 0:
        # The same signal, so that the launcher sees the truth; one core file is enough.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)
