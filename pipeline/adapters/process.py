"""Start and observe supervised trainings, which outlive whoever started them."""

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from manycpu.pipeline.adapters.commands import END_TIMEOUT, end
from manycpu.pipeline.spec.errors import LaunchError
from manycpu.pipeline.spec.handle import ProcessHandle

__all__ = [
    "Job",
    "LogFollower",
    "boot_id",
    "cancel",
    "is_another",
    "is_dead",
    "observe",
    "start",
]

LOG, EXIT, HANDLE, COMMAND = "log", "exit.json", "handle.json", "command.json"
# Airflow's own settings may hold secrets, and are none of a training's business.
_PRIVATE = ("AIRFLOW_", "AIRFLOW__", "_AIRFLOW_")


class Job(NamedTuple):
    """The command of an attempt, and what else its supervisor must know."""

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


def boot_id() -> str:
    """Identify this boot of this machine."""
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
        # No splitlines: it also splits within a line of a rank, and the second half would be of no rank.
        lines = whole.decode(errors="replace").removesuffix("\n").split("\n") if whole else []
        return [line.removesuffix("\r") for line in lines]  # of a launcher that writes to a terminal


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


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
