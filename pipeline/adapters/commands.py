"""Run commands to their end, and end all processes that they started."""

import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import psutil

from manycpu.pipeline.spec.errors import LaunchError

END_TIMEOUT_S: Final = 10.0
"""Seconds for killed processes to be gone."""


class Completed(NamedTuple):
    """A command that ended: its exit code (negative: the signal), and its stdout, mostly with its stderr."""

    code: int
    output: bytes

    @property
    def out(self) -> str:
        """The output as text; bytes that are not UTF-8 are replaced."""
        return self.output.decode(errors="replace")


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    secret: bool = False,
    input: bytes | None = None,  # noqa: A002 - the name that subprocess gives it
) -> Completed:
    """Run a command to its end, or kill it after ``timeout`` seconds.

    Args:
        argv: The command.
        timeout: Seconds.
        env: Its whole environment; None: that of this process.
        secret: Whether the output is a secret: then no error quotes it, and stderr is dropped.
        input: What it reads from stdin.

    Raises:
        LaunchError: The command cannot be run, or it timed out.
    """
    try:
        done = subprocess.run(
            list(argv),
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if secret else subprocess.STDOUT,
            timeout=timeout,
            env=dict(env) if env is not None else None,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
        )
    except OSError as error:
        raise LaunchError(f"{argv[0]!r} cannot be run: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        output = bytes(error.stdout or b"").decode(errors="replace").strip()[-2000:]
        said = "" if secret else f"; it said: {output}"
        raise LaunchError(f"{' '.join(argv)!r} did not end within {timeout:g} s{said}") from error
    return Completed(done.returncode, done.stdout)


def follow(
    argv: Sequence[str],
    tell: Callable[[str], object],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run a command to its end, and pass each of its lines to ``tell`` as it comes; returns its exit code.

    ``timeout`` is in seconds; ``env`` is added to the environment of this process.

    Raises:
        LaunchError: The command cannot be run, or it timed out and was killed with all its descendants.
    """
    try:
        process = psutil.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
        )
    except OSError as error:
        raise LaunchError(f"{argv[0]!r} cannot be run: {error.strerror or error}") from error
    # The timer kills and does not wait: only one waiter gets the exit code.
    timer = threading.Timer(timeout, _kill_tree, [process])
    began = time.monotonic()
    timer.start()
    try:
        for line in _lines_of(process, began + timeout):
            tell(line.decode(errors="replace").rstrip())
        code = int(process.wait())
    finally:  # also if `tell` raises: then the process may still run
        timer.cancel()
        psutil.wait_procs(_kill_tree(process), timeout=END_TIMEOUT_S)
    if time.monotonic() - began >= timeout:
        raise LaunchError(f"{argv[0]!r} did not end within {timeout:g} s")
    return code


def _lines_of(process: psutil.Popen, until: float) -> Iterator[bytes]:
    """Yield a process's lines as they come, until its output ends or ``until``, a time of ``monotonic()``.

    The output may continue after the process has ended, while a child still has its stdout open.
    """
    rest = b""
    with process.stdout as stream, selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while selector.select(max(0.0, until - time.monotonic())):
            block = os.read(stream.fileno(), 1 << 16)
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
            if not block:  # every process has closed its end
                break
    if rest:
        yield rest


def _kill_tree(process: psutil.Process) -> list[psutil.Process]:
    """Kill a process and all its descendants, without waiting; returns them. Empty if it had ended before."""
    try:
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:  # nothing says any more which processes it had started
        return []
    _kill(tree)
    return tree


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone."""
    _kill(processes)
    psutil.wait_procs(processes, timeout=END_TIMEOUT_S)


def _kill(processes: Sequence[psutil.Process]) -> None:
    """Send SIGKILL to the processes that still exist."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
