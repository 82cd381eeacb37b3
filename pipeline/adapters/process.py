"""Commands, and supervised trainings that outlive whoever started them. The door to :mod:`subprocess`."""

import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from manycpu.pipeline.spec.errors import LaunchError
from manycpu.pipeline.spec.handle import ProcessHandle

__all__ = [
    "Completed",
    "Job",
    "LogFollower",
    "boot_id",
    "cancel",
    "follow",
    "is_another",
    "is_dead",
    "observe",
    "run",
    "start",
]

# A person who ends a run wants it gone within 5 s: the tree gets most of that to end by itself.
END_TIMEOUT = 10.0
LOG, EXIT, HANDLE, COMMAND = "log", "exit.json", "handle.json", "command.json"
# Airflow's own settings may hold secrets, and are none of a training's business.
_PRIVATE = ("AIRFLOW_", "AIRFLOW__", "_AIRFLOW_")


class Completed(NamedTuple):
    """A command that ended: its exit code (negative: the signal) and what it printed on both streams."""

    code: int
    out: str


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    input: bytes | None = None,  # noqa: A002 - the name that subprocess gives it
) -> Completed:
    """Run a command to its end.

    Args:
        argv: The program and its arguments; never meets a shell.
        timeout: Seconds after which it is killed.
        env: Its whole environment; default: this process's own.
        cwd: Its working folder.
        input: What it reads on stdin.

    Raises:
        LaunchError: There is no such program, or the time was used up.
    """
    try:
        done = subprocess.run(
            list(argv),
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
        )
    except OSError as error:
        raise LaunchError(f"{argv[0]!r} cannot be run: {error.strerror or error}") from error
    except subprocess.TimeoutExpired as error:
        said = _text(error.stdout).strip()[-2000:]
        raise LaunchError(f"{' '.join(argv)!r} did not end within {timeout:g} s; it said: {said}") from error
    return Completed(done.returncode, done.stdout.decode(errors="replace"))


def follow(
    argv: Sequence[str],
    tell: Callable[[str], object],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run a command to its end, and tell each of its lines as it comes; its exit code.

    Raises:
        LaunchError: There is no such program, or the time was used up: it and all it started is killed.
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
    timer = threading.Timer(timeout, _end_tree, [process])
    began = time.monotonic()
    timer.start()
    try:
        for line in _lines_of(process, began + timeout):
            tell(line.decode(errors="replace").rstrip())
        code = int(process.wait())
    finally:
        timer.cancel()
        _end_tree(process)
    if time.monotonic() - began >= timeout:
        raise LaunchError(f"{argv[0]!r} did not end within {timeout:g} s")
    return code


def _lines_of(process: psutil.Popen, until: float) -> Iterator[bytes]:
    """Tell lines as they come, up to a time: what a program leaves behind may keep its stdout open."""
    rest = b""
    with process.stdout as stream, selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while selector.select(max(0.0, until - time.monotonic())):
            block = os.read(stream.fileno(), 1 << 16)
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
            if not block:
                break
    if rest:
        yield rest


def _end_tree(process: psutil.Process) -> None:
    try:
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    end(tree)


class Job(NamedTuple):
    """What a supervisor must know of the attempt that it is given."""

    run: str
    """Name of the run."""
    attempt: int
    run_timeout: float
    """Seconds that it may run."""
    start_timeout: float
    """Seconds until the first rank must have spoken."""
    stall_timeout: float | None
    """Seconds without output after which it is ended; None: never."""


def start(manifest: Mapping[str, Any], directory: Path, job: Job, lock: int) -> ProcessHandle:
    """Start a supervised process that outlives this one.

    Args:
        manifest: ``{argv, env, cwd, files}`` as the launchers write it; files are relative to ``directory``.
        directory: The attempt's folder: gets the log, the handle and, at the end, the exit record.
        job: Which attempt this is, and its budgets.
        lock: A file descriptor that holds the ledger's lock. The starter inherits it, so that nobody else
            starts this run before the handle is on disk, even if this process is killed in between.

    Raises:
        LaunchError: The supervisor did not come up.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in manifest["files"].items():
        (directory / file).write_text(text)
    command = {"argv": manifest["argv"], "cwd": manifest["cwd"], **job._asdict()}
    write_json(directory / COMMAND, command)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_PRIVATE)}
    with (directory / LOG).open("ab") as log, _in_time(job.run):
        starter = subprocess.run(
            [sys.executable, "-m", "manycpu.pipeline.adapters.supervisor", str(directory)],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=inherited | manifest["env"],
            pass_fds=(lock,),
            start_new_session=True,
            timeout=60,
        )
    handle = read_handle(directory)
    if handle is None:
        tail = (directory / LOG).read_text(errors="replace")[-2000:].strip()
        raise LaunchError(
            f"the supervisor of {job.run} ended with exit code {starter.returncode}; it said: {tail}"
        )
    return handle


@contextmanager
def _in_time(run: str) -> Iterator[None]:
    try:
        yield
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"the supervisor of {run} did not come up within {error.timeout:g} s",
            fix="See whether the machine is overburdened, and run again",
        ) from error


def read_handle(directory: Path) -> ProcessHandle | None:
    """Read the handle that a supervisor left in its attempt's folder; None where none ever started."""
    text = _read(directory / HANDLE)
    return ProcessHandle.model_validate_json(text) if text else None


def observe(handle: ProcessHandle) -> dict[str, Any]:
    """Look at a supervised process: ``alive``, and ``exit`` (its record, or None).

    Raises:
        LaunchError: The process was started on another machine.
    """
    if handle.host != socket.gethostname():
        raise LaunchError(
            f"run {handle.run} was started on host {handle.host}, this is {socket.gethostname()}",
            fix="Run the tasks of one run on one machine: give its DAG a queue with a single worker",
        )
    # Alive first: a process that ends in between has written its record by then.
    alive = _process(handle) is not None
    record = _read(Path(handle.directory) / EXIT)
    return {"alive": alive, "exit": json.loads(record) if record else None}


def cancel(handle: ProcessHandle) -> None:
    """End a supervised process and everything it started; harmless when it is gone.

    Raises:
        LaunchError: It is still there after 10 s.
    """
    process = _process(handle)
    if process is None:
        return
    tree = [process, *process.children(recursive=True)]
    process.terminate()
    try:
        process.wait(END_TIMEOUT)
    except psutil.TimeoutExpired:
        end(tree)
        if process.is_running():
            raise LaunchError(f"process {handle.pid} of run {handle.run} does not end") from None


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill processes at once, and wait until they are gone."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=END_TIMEOUT)


def boot_id() -> str:
    """Tell this boot of this machine from every other."""
    linux = _read(Path("/proc/sys/kernel/random/boot_id"))
    return linux.strip() if linux else str(int(psutil.boot_time()))


class LogFollower:
    """Reads a growing log: each line once, and only whole lines."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def read(self, limit: int = 1 << 20) -> list[str]:
        """Read the lines that came since the last call, about ``limit`` bytes at most."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                block = file.read(limit)
        except FileNotFoundError:
            return []
        whole = block[: block.rfind(b"\n") + 1] or (block if len(block) == limit else b"")
        self.offset += len(whole)
        return whole.decode(errors="replace").splitlines()


def write_json(path: Path, value: object, mode: int = 0o666) -> None:
    """Write a file that is there whole or not at all; the umask takes from its mode."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")  # threads write the same file too
    partial.touch(mode)
    partial.write_text(json.dumps(value))
    partial.replace(path)


def handle_of_this_process(directory: Path, name: str, attempt: int) -> ProcessHandle:
    """Describe the calling process, so that others can find it."""
    return ProcessHandle(
        run=name,
        attempt=attempt,
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        start_time=psutil.Process().create_time(),
        directory=str(directory),
    )


def wait_until_gone(handle: ProcessHandle, timeout: float) -> bool:
    """Wait for a supervised process to end; True when it has."""
    deadline = time.monotonic() + timeout
    process = _process(handle)
    if process is None:
        return True
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except psutil.TimeoutExpired:
        return False
    return True


def is_another(handle: ProcessHandle) -> bool:
    """Whether a process surely lives on this machine, and is not the calling one."""
    mine = (handle.host, handle.pid) == (socket.gethostname(), os.getpid())
    return handle.host == socket.gethostname() and not mine and _process(handle) is not None


def is_dead(handle: ProcessHandle) -> bool:
    """Whether a process of this machine, since it was booted last, has surely ended."""
    here = (handle.host, handle.boot_id) == (socket.gethostname(), boot_id())
    return here and _process(handle) is None


def _process(handle: ProcessHandle) -> psutil.Process | None:
    if handle.boot_id != boot_id():
        return None
    try:
        process = psutil.Process(handle.pid)
        same = abs(process.create_time() - handle.start_time) < 1
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
