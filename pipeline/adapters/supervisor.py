"""Supervise a training: ``python -m manycpu.pipeline.adapters.supervisor DIRECTORY``.

It outlives the worker that started it, keeps the time budgets, adopts and ends every process that the
training leaves behind, and writes the exit record last.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from manycpu.pipeline.adapters import process
from manycpu.pipeline.adapters.log_copy import LogCopy
from manycpu.pipeline.spec import kernel

__all__ = ["main"]

_GRACE = 3.0  # seconds between asking the training to end and killing it
_UNKILLABLE = 60.0  # seconds for what was killed to be gone: a disk that does not answer may hold on to it
_TICK = 1.0  # seconds between looks at the log for a stall
_SIGNALS = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


def main(directory: str) -> None:
    """Fork, so that whoever starts this has nothing to reap; return once the child can be found."""
    ready, announce = os.pipe()
    if os.fork():
        os.close(announce)
        os._exit(0 if os.read(ready, 1) else 1)
    os.close(ready)
    record = process.ExitRecord(Path(directory))  # before it is found: what cannot be recorded does not begin
    _become_findable(Path(directory), announce)
    supervise(Path(directory), record)


def _become_findable(directory: Path, announce: int) -> None:
    os.setsid()
    command = json.loads((directory / process.COMMAND).read_text())
    handle = process.handle_of_this_process(directory, command["run"], command["attempt"])
    process.write_json(directory / process.HANDLE, handle.model_dump())
    _close_all_but(announce)
    os.write(announce, b"1")
    os.close(announce)


def _close_all_but(announce: int) -> None:
    """Close every inherited file, such as the one that holds the ledger's lock; the log has 1 and 2."""
    inherited = Path("/proc/self/fd")
    numbers = [int(each.name) for each in inherited.iterdir()] if inherited.exists() else [1023]
    last = max(announce, *numbers) + 1
    os.closerange(3, announce)
    os.closerange(announce + 1, last)


def supervise(directory: Path, record: process.ExitRecord) -> None:
    """Run the command of ``command.json`` to its end, and leave the exit record."""
    command = json.loads((directory / process.COMMAND).read_text())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, nobody learns how a child ended
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    kernel.adopt_orphans()
    started = time.time()
    code, reason = _run(command)
    record.write(code, reason, started)


def _run(command: dict[str, Any]) -> tuple[int, str]:
    source, printed = os.pipe()
    try:
        child = subprocess.Popen(
            command["argv"],
            cwd=command["cwd"],
            stdout=printed,
            stderr=printed,
            preexec_fn=_begin,  # noqa: PLW1509 - no thread runs yet
        )
    except OSError as error:
        os.close(source)
        return 127, f"{command['argv'][0]!r} cannot be run: {error}"
    finally:
        os.close(printed)
    log = LogCopy(source, sys.stdout.fileno())
    code, reason = _wait(child.pid, command, log)
    code = end_tree(child.pid) if code is None else end_tree(code=code)
    log.end()
    child.returncode = code  # reaped here, not by Popen
    return code, reason


def _wait(pid: int, command: dict[str, Any], log: LogCopy) -> tuple[int | None, str]:
    deadline = time.monotonic() + command["run_timeout"]
    watch = _LogWatch(log, command)
    while (seconds := deadline - time.monotonic()) > 0:
        code = _reap(pid)
        if code is not None:
            return code, ""
        received = signal.sigtimedwait(_SIGNALS, min(seconds, _TICK))
        if received is not None and received.si_signo != signal.SIGCHLD:
            return None, "cancelled"
        if silence := watch.silence():
            return None, silence
    return None, f"run.run_timeout: not done after {command['run_timeout']} s"


class _LogWatch:
    """Tells whether the ranks are silent for longer than the run allows."""

    def __init__(self, log: LogCopy, command: dict[str, Any]) -> None:
        self._log, self._started = log, time.monotonic()
        self._received, self._grown = -1, self._started
        self._start_timeout, self._stall_timeout = command["start_timeout"], command["stall_timeout"]

    def silence(self) -> str:
        """Name the budget that silence used up; empty while there is none."""
        if not self._log.spoken and time.monotonic() - self._started > self._start_timeout:
            return f"run.start_timeout: no rank spoke within {self._start_timeout} s"
        if (received := self._log.received) != self._received:
            self._received, self._grown = received, time.monotonic()
        stalled = self._stall_timeout and time.monotonic() - self._grown > self._stall_timeout
        return f"run.stall_timeout: no line from any rank for {self._stall_timeout} s" if stalled else ""


def end_tree(pid: int | None = None, code: int | None = None) -> int:
    """End every descendant: a launcher is asked first, so that it ends its ranks on other hosts too.

    Args:
        pid: The launcher, where it still runs.
        code: Its exit code, where it has ended.

    Returns:
        Its exit code.
    """
    if pid is not None:
        _signal(pid, signal.SIGTERM)
    code = _drain(pid, time.monotonic() + (_GRACE if pid is not None else 0), code)
    until = time.monotonic() + _UNKILLABLE
    while living := psutil.Process().children(recursive=True):
        for orphan in living:
            _signal(orphan.pid, signal.SIGKILL)
        code = _drain(pid, time.monotonic() + _GRACE, code)
        if time.monotonic() > until:
            pids = ", ".join(str(orphan.pid) for orphan in living)
            with suppress(OSError):  # of a full disk: the record is still to be written
                sys.stdout.write(
                    f"manycpu: killed, and still there: {pids}; what they wait for does not answer\n"
                )
                sys.stdout.flush()
            break
    return -signal.SIGKILL if code is None else code


def _drain(pid: int | None, deadline: float, code: int | None = None) -> int | None:
    """Reap until no descendant is left, or the deadline; the exit code of ``pid`` where it was among them."""
    while True:
        status = _reap(pid)
        code = status if status is not None else code
        seconds = deadline - time.monotonic()
        if seconds <= 0 or not psutil.Process().children(recursive=True):
            return code
        signal.sigtimedwait({signal.SIGCHLD}, min(seconds, 0.1))


def _reap(awaited: int | None) -> int | None:
    """Reap every child that has ended; the exit code of ``awaited`` where it is among them."""
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


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _begin() -> None:
    """Prepare the launcher: signals reach it again, and it is ended when this supervisor is killed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    kernel.end_with_parent(signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1])
