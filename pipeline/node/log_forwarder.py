"""The parent of a rank: forwards its lines and signals, records how it ended, and ends in the same way.

Before it ends it kills the processes that the script has left running. If the forwarder itself is killed, a
small process that it started before kills them.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple, NoReturn

from manycpu.pipeline.node.lines import HiddenSecrets, Lines, OrphanedError, PipeWriter, pieces
from manycpu.pipeline.node.world import Rank
from manycpu.pipeline.spec import events, exit_records, kernel
from manycpu.pipeline.spec.rank_logs import RankLog

_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED: Final = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_PARENT_CHECK_INTERVAL_S: Final = 1.0  # between checks that the launcher still runs
_ORPHAN_GRACE_S: Final = 3.0  # that a rank has to end by itself once its launcher is gone
_HELPER_GRACE_S: Final = 2.0  # that processes of a script that has ended have to end by themselves
_POLL_INTERVAL_S: Final = 0.05  # between two looks at processes that are to end
_MAX_NAMED: Final = 10  # processes that are named in a warning
_MAX_BAR_INTERVAL_S: Final = 30.0  # between states of a progress bar that does not end its line
_BLOCK_BYTES: Final = 1 << 16
_MAX_BLOCKS: Final = 64  # read at once: more than a pipe holds; bounded, because a script may never pause
# A `start` event is about the run as a whole, so it gets no rank's prefix.
_START_EVENT: Final = events.encode("start").removesuffix("}").encode()
_MARK: Final = events.PREFIX.encode()
# Events that only the rank itself can report.
_RECORDED_EVENTS: Final = frozenset({"proof", "backend", "returned", "result"})


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however the parent dies (Linux)."""
    kernel.end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


def forward_logs(child: int, launcher: int, stream: int, signature: str, identity: Rank) -> NoReturn:
    """Forward a rank's lines and signals until it ends, then end as it did.

    Before that, kill what the script left running, write the exit record, and report the exit.

    Args:
        child: The rank's process id; the rank leads a process group.
        launcher: The process id of this process's parent, read before the fork of the rank.
        stream: The read end of the rank's stdout and stderr.
        signature: Begins each of the rank's own events, and nothing that its script prints.
        identity: The rank; its number and the host's name, MANYCPU_HOST, are the prefix of its lines.
    """
    rank, host = identity.rank, os.environ["MANYCPU_HOST"]
    killer = _start_orphan_killer(child)  # ends the rank's children even if this process is killed
    kernel.adopt_orphans()  # what the script leaves running becomes a child of this process, which ends it
    signals = list[int]()  # those that were forwarded
    wake = _wake_on_signals(child, signals)
    folder = os.environ.get("MANYCPU_LOGS")
    log = RankLog(Path(folder), rank, identity.world_size) if folder else None
    writer = _Writer(events.join(rank, host, "").encode(), signature.encode(), log)
    warnings = list[str]()
    try:
        status = _serve(child, stream, writer, wake, launcher)
        received = [number for number in signals if number in _ENDING]  # before the rank ended
        if status == 0:  # a script that failed is expected to leave processes
            warnings = _warnings_of_leftovers(stream, writer, killer)
    except OrphanedError:
        received = [signal.SIGTERM]  # which the rank gets here, in place of its launcher
        status = _end(child)
    _kill_all(child)  # also what the script left running
    code = os.waitstatus_to_exitcode(status)
    if code == 0 and received:
        code = 128 + received[0]  # its program may have saved at the signal, and stopped before its end
    with suppress(OrphanedError):
        writer.read(stream)  # what the pipe still holds
    where = {"host": host}
    if socket.gethostname() != host:  # in a pod it is the pod's name: a host may have several pods
        where["hostname"] = socket.gethostname()
    writer.record.write(code, rank=rank, **where)  # before the last lines, which may wait for a reader
    with suppress(OrphanedError):
        writer.finish(*warnings, events.encode("exit", code=code, rank=rank, **where))
    _exit_as(code)


def _exit_as(code: int) -> NoReturn:
    """End this process as the rank ended: with its exit code, or, if that is negative, by its signal.

    If the rank failed, the launcher Hydra is asked to end the other ranks.
    """
    exit_code = code if code >= 0 else 128 - code  # for a signal, as shells report it
    if code:
        # Hydra (Intel MPI, MPICH) ends the other ranks of MPI programs only: ask for it, by a line of the PMI
        # protocol to the descriptor that it gives to every rank.
        with suppress(OSError, ValueError, KeyError):
            os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=%d\n" % exit_code)
    if code < 0:
        # The same signal, so that the launcher sees how the rank ended; one core file is enough.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):  # for these two no handler can be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(exit_code)


class _ExitRecord:
    """Collects what an exit record needs from the rank's lines, and writes it (spec/exit_records.py)."""

    def __init__(self) -> None:
        self._folder = os.environ.get("MANYCPU_EXITS")
        self._proof: dict[str, Any] = {}
        self._lines: dict[tuple[str, int], str] = {}

    def note(self, line: bytes) -> None:
        """Keep a line if it is an event that is needed to judge how the rank ended.

        A later line of the same event and part replaces an earlier one. If the run has no exit records,
        nothing is kept.
        """
        if not self._folder or not line.startswith(_MARK):
            return
        kind, event = "", {}
        with suppress(ValueError, RecursionError):  # a program may print what only looks like one
            event = json.loads(line[len(_MARK) :])
            kind = event["event"]
        if kind == "proof":
            self._proof = event
        if kind in _RECORDED_EVENTS:
            self._lines[kind, event.get("part", 0)] = line.decode()

    def write(self, code: int, **fields: Any) -> None:
        """Write the record, if the ranks have met; a full or read-only volume does not fail the run."""
        if not self._folder or not self._proof:
            return
        meeting, ended = self._proof["meeting"], round(time.time(), 3)
        end = events.encode("exit", code=code, time=ended, meeting=meeting, **fields)
        record = {name: self._proof[name] for name in ("meeting", "rank", "world_size", "host", "hostname")}
        record |= {"code": code, "time": ended, "lines": [*self._lines.values(), end]}
        with suppress(OSError):
            exit_records.write(Path(self._folder), record)


class _Writer:
    """Writes the lines of the rank: to the launcher, to the log on the volume, to the exit record.

    ``prefix`` begins each line; ``signature`` begins the rank's own events; ``log`` None: there is no volume.
    """

    def __init__(self, prefix: bytes, signature: bytes, log: RankLog | None) -> None:
        self._prefix, self._log = prefix, log
        self.record = _ExitRecord()
        self._out = PipeWriter()
        self._lines = Lines(signature)
        self._secrets = HiddenSecrets(os.environ, sys.argv[1:])
        self._written_at = time.monotonic()
        stall_timeout = float(os.environ.get("MANYCPU_STALL_TIMEOUT") or "inf")
        # Several times within a stall timeout, so that a long epoch is not taken for a stall.
        self.bar_interval_s = min(_MAX_BAR_INTERVAL_S, stall_timeout / 3)

    def read(self, stream: int) -> bool:
        """Forward what can be read without waiting, at most 4 MiB; returns False at the stream's end."""
        for _ in range(_MAX_BLOCKS):
            try:
                block = os.read(stream, _BLOCK_BYTES)
            except BlockingIOError:
                return True
            if not block:
                return False
            self._write(self._lines.feed(block))
        return True

    def tick(self) -> None:
        """Show the present state of a progress bar if no line was written for some time."""
        if time.monotonic() - self._written_at <= self.bar_interval_s:
            return
        bar = self._lines.bar()
        if bar:
            self._write([bar])

    def finish(self, *last: str) -> None:
        """Write the line that has no newline yet, and then the last lines; wait until they are read."""
        self._write([*self._lines.rest(), *(line.encode() for line in last)])
        if self._log:
            self._log.close()
        self._out.drain()

    def _write(self, lines: list[bytes]) -> None:
        """Write lines without their secrets: to the exit record, to the log, and to the launcher."""
        for line in map(self._secrets.hide, lines):
            self.record.note(line)
            prefix = b"" if line.startswith(_START_EVENT) else self._prefix
            if self._log:
                self._log.add(prefix + line)
            for piece in pieces(prefix, line):
                self._out.write(piece)
        if lines:
            self._written_at = time.monotonic()


def _serve(child: int, stream: int, writer: _Writer, wake: int, launcher: int) -> int:
    """Forward lines until the rank has ended; returns its wait status (see ``os.waitpid``).

    ``wake`` is a descriptor that is readable after each signal.

    Raises:
        OrphanedError: The launcher has ended, or reads no more.
    """
    os.set_blocking(stream, False)
    readers = [stream, wake]
    interval_s = min(_PARENT_CHECK_INTERVAL_S, writer.bar_interval_s)
    while (status := _reap(child)) is None:
        ready, _, _ = select.select(readers, [], [], interval_s)
        if wake in ready:
            with suppress(BlockingIOError):
                while os.read(wake, 512):  # empties the pipe
                    pass
        if stream in ready and not writer.read(stream):
            readers.remove(stream)  # the rank closed it, but may still run
        writer.tick()
        if os.getppid() != launcher:
            raise OrphanedError
    return status


def _end(child: int) -> int:
    """End the rank by SIGTERM, and after a grace period by SIGKILL; returns its wait status."""
    deadline = time.monotonic() + _ORPHAN_GRACE_S
    kernel.send_signal(child, signal.SIGTERM)
    while (status := _reap(child)) is None:
        if time.monotonic() > deadline:
            kernel.send_signal(child, signal.SIGKILL)
        time.sleep(_POLL_INTERVAL_S)
    return status


def _reap(child: int) -> int | None:
    """Reap children that have ended, also adopted orphans; returns the rank's wait status; None: it runs."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return status
            if pid == 0:  # no other child has ended
                return None
    return None


def _warnings_of_leftovers(stream: int, writer: _Writer, killer: int) -> list[str]:
    """Return one warning, as a line, about processes that the script left running; empty: all have ended.

    An example is an upload that hangs. Waits for these processes for two seconds at most, and forwards what
    they print. ``killer`` is the process of :func:`_start_orphan_killer`, which does not count.
    """
    deadline = time.monotonic() + _HELPER_GRACE_S
    while (running := _names_of_leftovers(but=killer)) and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL_S)
        with suppress(OrphanedError):
            writer.read(stream)  # so that none of them hangs because the pipe is full
    if not running:
        return []
    names = ", ".join(running[:_MAX_NAMED])
    if len(running) > _MAX_NAMED:
        names += ", …"
    if len(running) == 1:
        message = f"1 process that the script left running was ended: {names}"
    else:
        message = f"{len(running)} processes that the script left running were ended: {names}"
    return [events.encode("warning", message=message)]


def _wake_on_signals(child: int, forwarded: list[int]) -> int:
    """Forward signals to the rank from now on, also while a write blocks, and append them to ``forwarded``.

    Returns a descriptor that is readable after each signal, which wakes up the loop in :func:`_serve`.
    """
    wake, write_end = os.pipe()
    for end in (wake, write_end):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        forwarded.append(number)
        kernel.send_signal(child, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler, it would not wake the loop up
    return wake


class _Process(NamedTuple):
    pid: int
    parent: int
    name: str


def _names_of_leftovers(but: int) -> list[str]:
    """Name the descendants of this process that still run, without the process ``but``."""
    children: defaultdict[int, list[_Process]] = defaultdict(list)
    for process in _running():
        children[process.parent].append(process)
    parents, names = [os.getpid()], list[str]()
    while parents:
        offspring = [process for process in children[parents.pop()] if process.pid != but]
        parents.extend(process.pid for process in offspring)
        names.extend(process.name for process in offspring)
    return sorted(names)


def _kill_all(group: int) -> None:
    """Kill the process group ``group`` and all children of this process, also the orphans that it adopts.

    Processes of other users stay.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    with suppress(ChildProcessError):
        # Again and again: the children of a killed process become children of this one.
        while True:  # until waitpid raises ChildProcessError, because no child is left
            children = [process.pid for process in _running() if process.parent == os.getpid()]
            killed = [kernel.send_signal(pid, signal.SIGKILL) for pid in children]
            if killed and not any(killed):  # only processes of other users are left, which may never end
                return
            os.waitpid(-1, 0)


def _start_orphan_killer(group: int) -> int:
    """Fork a process that kills the process group ``group`` once this process is gone; returns its id.

    When the log forwarder is killed, the kernel kills the rank with it (``die_with_parent``), but not the
    rank's own children.
    """
    watched, _held = os.pipe()  # only this process holds the other end, which stays open until it ends
    if killer := os.fork():
        os.close(watched)
        return killer
    try:
        # Out of reach of a launcher that kills its ranks by session or group, and holding none of its pipes.
        os.setsid()
        for name in [entry.name for entry in Path("/proc/self/fd").iterdir()]:
            if int(name) != watched:
                with suppress(OSError):
                    os.close(int(name))
        os.read(watched, 1)  # returns when the kernel closes the other end, as the log forwarder is gone
        os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)


def _running() -> Iterator[_Process]:
    """Yield the processes of this PID namespace that have not ended."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name in parentheses may contain anything; state and parent follow the last parenthesis.
            start, _, rest = file.read_bytes().rpartition(b")")
            state, parent = rest.split()[:2]
            if state != b"Z":  # a zombie has ended, and only waits to be reaped
                name = start.partition(b"(")[2].decode(errors="replace")
                yield _Process(int(file.parent.name), int(parent), name)
