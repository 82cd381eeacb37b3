"""Supervise a training: ``python -m manycpu.pipeline.adapters.supervisor DIRECTORY``.

The supervisor outlives the worker that started it. It enforces the time budgets, adopts and ends every
process that the training leaves behind, copies the training's output to its log, and writes the exit record
last.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

from manycpu.pipeline.adapters import process
from manycpu.pipeline.spec import events, kernel
from manycpu.pipeline.spec.event_types import decode

_BLOCK_BYTES: Final = 1 << 16
_LINE_LIMIT_BYTES: Final = 1 << 20  # of a line that is written in one piece
_DECISIVE_EVENTS: Final = events.RESERVED - {"start", "pace"}  # the end of a run depends on these
_KEPT_LINES_LIMIT: Final = 4096  # while the disk is full
_RETRY_INTERVAL_S: Final = 0.2
_FULL_DISK_TIMEOUT_S: Final = 600.0  # at the end, for the lines that are kept
_RECORD_BYTES: Final = 1 << 14  # reserved for an exit record
_REASON_CHARACTERS: Final = 2000  # of its reason: at most six times as many bytes in JSON
_RECORD_TIMEOUT_S: Final = 86_400.0  # to write a record to a full disk
_RECORD_PAUSE_LIMIT_S: Final = 5.0  # between two tries
_GRACE_S: Final = 3.0  # between SIGTERM and SIGKILL
_UNKILLABLE_S: Final = 60.0  # for killed processes to be gone: a disk that does not answer may delay them
_STALL_CHECK_S: Final = 1.0  # between two checks of the log
_SIGNALS: Final = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


class ExitRecord:
    """The exit record of an attempt; its space on the disk is reserved at the start."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / process.EXIT
        self._reserved = self._path.with_name(f".{process.EXIT}.reserved")
        with self._reserved.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RECORD_BYTES)
            os.fsync(file.fileno())

    def write(self, code: int, reason: str, started: float, ended: float) -> None:
        """Write the record; retry on a full disk, for at most a day.

        Raises:
            OSError: The disk was full for a day, or the folder is gone.
        """
        reason = reason[:_REASON_CHARACTERS]
        record = {"code": code, "reason": reason, "started": started, "ended": ended}
        deadline, pause = time.monotonic() + _RECORD_TIMEOUT_S, 0.1
        while True:
            try:
                # r+b: the file keeps its reserved blocks, so there is space for the record on a full disk.
                # wb: another process deleted the reserved file.
                with self._reserved.open("r+b" if self._reserved.exists() else "wb") as file:
                    # Blanks, with which JSON may end, take the place of the reserved zero bytes.
                    file.write(json.dumps(record).encode().ljust(_RECORD_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
                self._reserved.replace(self._path)
            except OSError:
                if time.monotonic() > deadline or not self._path.parent.exists():
                    raise
            else:
                return
            time.sleep(pause)
            pause = min(2 * pause, _RECORD_PAUSE_LIMIT_S)


class LogCopy:
    """Copies lines from a pipe to a file, in a thread: a full disk neither ends nor blocks the training.

    A line that cannot be written is dropped. Before the next line that can be written, a warning says how
    many were dropped. Events on which the end of the run depends are kept instead, and written first.
    """

    def __init__(self, source: int, log: int) -> None:
        self._source, self._log = source, log
        self._pending = b""  # the beginning of a line whose end has not come
        self._torn = False  # whether the log ends in the middle of a line
        self._kept: list[bytes] = []
        self._dropped = 0  # lines since the last warning
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self.received = 0  # bytes so far, written or not
        self.spoken = False  # whether a rank has written a line
        os.set_blocking(source, False)
        self._thread.start()

    def end(self) -> None:
        """Copy the rest of the pipe; wait for disk space for the kept lines, for ten minutes at most."""
        self._ending.set()
        self._thread.join()
        os.close(self._source)

    def _copy(self) -> None:
        """Copy lines until :meth:`end` and the pipe is empty; then wait for disk space for the kept lines."""
        while self._read(_RETRY_INTERVAL_S) or not self._ending.is_set():
            self._catch_up()
        self._write([self._pending] if self._pending else [])  # a last line without a newline
        deadline = time.monotonic() + _FULL_DISK_TIMEOUT_S
        while not self._catch_up() and time.monotonic() < deadline:
            time.sleep(_RETRY_INTERVAL_S)

    def _read(self, seconds: float) -> bool:
        """Copy the next block of output. False: none came within ``seconds``, or the pipe has ended."""
        if not select.select([self._source], [], [], seconds)[0]:
            return False
        block = os.read(self._source, _BLOCK_BYTES)
        if not block:  # no process can write any more: wait for :meth:`end`
            self._ending.wait()
            return False
        self.received += len(block)
        *whole, self._pending = (self._pending + block).split(b"\n")
        if len(self._pending) > _LINE_LIMIT_BYTES:  # a longer line is written in pieces
            whole, self._pending = [*whole, self._pending], b""
        self.spoken = self.spoken or any(
            events.split(line.decode(errors="replace")).rank is not None for line in whole
        )
        self._write(whole)
        return True

    def _write(self, lines: list[bytes]) -> None:
        """Write lines to the log; if the disk is full, keep decisive events for later, and drop others."""
        # Lines that were kept before come first: while they do not fit, no new line is written.
        written = self._put(lines) if self._catch_up() else 0
        for line in lines[written:]:
            has_room = len(self._kept) < _KEPT_LINES_LIMIT
            event = decode(events.split(line.decode(errors="replace")).text) if has_room else None
            if event is not None and event.event in _DECISIVE_EVENTS:
                self._kept.append(line)
            else:
                self._dropped += 1

    def _catch_up(self) -> bool:
        """Write the kept lines and a warning with the count of dropped ones; False: the disk has no room."""
        del self._kept[: self._put(self._kept)]
        if self._kept:
            return False
        if self._dropped and self._put([events.missing_lines(self._dropped).encode()]):
            self._dropped = 0
        return not self._dropped

    def _put(self, lines: list[bytes]) -> int:
        """Write lines while the disk has room; returns how many were written whole."""
        if not lines:
            return 0
        text = b"".join(line + b"\n" for line in lines)
        start = b"\n" if self._torn else b""  # ends the line that an earlier call has cut
        content = start + text
        sent = 0
        while sent < len(content):
            try:
                sent += os.write(self._log, content[sent:])
            except OSError:  # mostly a full disk
                break
        written = sent - len(start)  # bytes of the text; less than 0: not even the newline before it
        if written < 0:
            return 0
        # With no byte of the text written, the newline has ended the cut line, or there was none.
        self._torn = written > 0 and text[written - 1 : written] != b"\n"
        return text[:written].count(b"\n")


def main(directory: str) -> None:
    """Run the command of ``command.json`` to its end in a child process, and write the exit record.

    The child is the supervisor. The parent exits as soon as the child has written the handle by which other
    processes find it. So the child is an orphan: the process that started the parent need not reap it.
    """
    ready, announce = os.pipe()
    # The child writes a byte when it can be found; if it ends before that, the parent reads nothing.
    if os.fork():  # the parent
        os.close(announce)
        os._exit(0 if os.read(ready, 1) else 1)
    os.close(ready)
    os.setsid()  # a session of its own: that of the parent loses its leader
    try:
        record = ExitRecord(Path(directory))  # first: without space for its record, no training starts
        command = json.loads((Path(directory) / process.COMMAND).read_text())
        handle = process.handle_of_this_process(Path(directory), command["run"], command["attempt"])
        process.write_json(Path(directory) / process.HANDLE, handle.model_dump())
    except OSError as error:  # such as a full disk: the starter passes this on
        sys.exit(f"no training can begin in {directory}: {error}")
    # Close every inherited file, such as the one with the ledger's lock, but not the log (1 and 2).
    fd_folder = Path("/proc/self/fd")
    # Without /proc, the usual limit of open files counts.
    open_files = [int(entry.name) for entry in fd_folder.iterdir()] if fd_folder.exists() else [1023]
    os.closerange(3, announce)
    os.closerange(announce + 1, max(announce, *open_files) + 1)
    os.write(announce, b"1")
    os.close(announce)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for number in (signal.SIGCHLD, signal.SIGINT):  # ignored ones are lost: exit codes, and a cancellation
        signal.signal(number, signal.SIG_DFL)
    kernel.adopt_orphans()
    started, began = time.time(), time.monotonic()
    code, reason = _run(command)
    record.write(code, reason, started, started + time.monotonic() - began)  # the clock may have been set


def _run(command: dict[str, Any]) -> tuple[int, str]:
    """Run the launcher, and end all processes that it leaves.

    Returns:
        Its exit code, and why it was ended or could not be run; an empty reason: it ended by itself.
    """
    source, printed = os.pipe()
    try:
        child = subprocess.Popen(
            command["argv"],
            cwd=command["cwd"],
            stdout=printed,
            stderr=printed,
            preexec_fn=_prepare_launcher,  # noqa: PLW1509 - no thread runs yet
        )
    except OSError as error:
        os.close(source)
        return 127, f"{command['argv'][0]!r} cannot be run: {error}"
    finally:
        os.close(printed)
    log = LogCopy(source, sys.stdout.fileno())
    code, reason = _wait(child.pid, command, log)
    # None: the launcher still runs, and must be ended too.
    code = end_tree(child.pid) if code is None else end_tree(code=code)
    log.end()
    child.returncode = code  # reaped here, not by Popen
    return code, reason


def _wait(pid: int, command: dict[str, Any], log: LogCopy) -> tuple[int | None, str]:
    """Wait for the launcher to end; returns its exit code and "". If it must be ended: None, and why."""
    deadline = time.monotonic() + command["run_timeout"]
    watch = _LogWatch(log, command)
    while (seconds := deadline - time.monotonic()) > 0:
        code = _reap(pid)
        if code is not None:
            return code, ""
        # SIGCHLD wakes this loop when a child ends. Only `process.cancel` sends SIGINT; the others come when
        # the machine is stopped, or a service that this process belongs to.
        received = signal.sigtimedwait(_SIGNALS, min(seconds, _STALL_CHECK_S))
        if received is not None and received.si_signo != signal.SIGCHLD:
            is_cancel = received.si_signo == signal.SIGINT
            return None, "cancelled" if is_cancel else signal.Signals(received.si_signo).name
        if silence := watch.silence():
            return None, silence
    return None, f"run.run_timeout: not done after {command['run_timeout']} s"


class _LogWatch:
    """Watches whether the ranks are silent for longer than the run allows."""

    def __init__(self, log: LogCopy, command: dict[str, Any]) -> None:
        self._log, self._started = log, time.monotonic()
        # Bytes of output at the last look (-1: none yet), and when output last came.
        self._received, self._last_output_at = -1, self._started
        self._start_timeout, self._stall_timeout = command["start_timeout"], command["stall_timeout"]

    def silence(self) -> str:
        """Return a reason if the silence of the ranks has used up a time budget; empty: it has not."""
        if not self._log.spoken and time.monotonic() - self._started > self._start_timeout:
            return f"run.start_timeout: no rank spoke within {self._start_timeout} s"
        received = self._log.received
        if received != self._received:  # output has come since the last call
            self._received, self._last_output_at = received, time.monotonic()
        if self._stall_timeout and time.monotonic() - self._last_output_at > self._stall_timeout:
            return f"run.stall_timeout: no line from any rank for {self._stall_timeout} s"
        return ""


def end_tree(pid: int | None = None, code: int | None = None) -> int:
    """End every descendant of this process.

    The launcher gets SIGTERM first, so that it ends remote ranks too; what is left gets SIGKILL.

    Args:
        pid: The launcher, if it still runs.
        code: The launcher's exit code, if it has ended.

    Returns:
        The launcher's exit code, -SIGKILL if that is unknown.
    """
    if pid is not None:
        kernel.send_signal(pid, signal.SIGTERM)
    code = _drain(pid, time.monotonic() + (_GRACE_S if pid is not None else 0), code)
    deadline = time.monotonic() + _UNKILLABLE_S
    # More than once: a process may start another one before it is killed.
    while living := psutil.Process().children(recursive=True):
        killed = [orphan for orphan in living if kernel.send_signal(orphan.pid, signal.SIGKILL)]
        if not killed:
            _say_of(living, "left running, as another user owns them: {}")
            break
        code = _drain(pid, time.monotonic() + _GRACE_S, code)
        if time.monotonic() > deadline:
            _say_of(killed, "killed, and still there: {}; what they wait for does not answer")
            break
    return -signal.SIGKILL if code is None else code


def _say_of(processes: list[psutil.Process], text: str) -> None:
    """Write ``text`` as a line of the log, with the ids of processes in place of its ``{}``."""
    with suppress(OSError):  # such as a full disk: the record must still be written
        sys.stdout.write(f"manycpu: {text.format(', '.join(str(one.pid) for one in processes))}\n")
        sys.stdout.flush()


def _drain(pid: int | None, deadline: float, code: int | None = None) -> int | None:
    """Reap children until no descendant is left, or until ``deadline``, a time of ``monotonic()``.

    Returns:
        The exit code of ``pid`` if that child was reaped, else ``code``.
    """
    while True:
        status = _reap(pid)
        code = status if status is not None else code
        seconds = deadline - time.monotonic()
        if seconds <= 0 or not psutil.Process().children(recursive=True):
            return code
        # At most 0.1 s: the end of a descendant that is no child sends no signal to this process.
        signal.sigtimedwait({signal.SIGCHLD}, min(seconds, 0.1))


def _reap(awaited: int | None) -> int | None:
    """Reap every child that has ended; returns the exit code of ``awaited``, None if it is not among them."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == awaited:
            code = os.waitstatus_to_exitcode(status)


def _prepare_launcher() -> None:
    """Prepare the launcher: unblock its signals, and end it when this supervisor is killed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    kernel.end_with_parent(signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1])
