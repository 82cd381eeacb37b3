"""Start and observe supervised trainings, which outlive the process that started them."""

import glob
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict

from manycpu.pipeline.adapters.commands import END_TIMEOUT_S, end
from manycpu.pipeline.spec import kernel
from manycpu.pipeline.spec.errors import LaunchError, LedgerError, UnseenError
from manycpu.pipeline.spec.handle import ProcessHandle

LOG, EXIT, HANDLE, COMMAND = "log", "exit.json", "handle.json", "command.json"
# Airflow's own settings, which may hold secrets and are not passed to a training.
_PRIVATE_PREFIXES = ("AIRFLOW_", "AIRFLOW__", "_AIRFLOW_")
_START_TIMEOUT_S = 60
_TOKEN_DIGITS = 8
_ERROR_CHARACTERS = 300
Record = TypeVar("Record", bound=BaseModel)


class _Exit(BaseModel):
    """An exit record."""

    model_config = ConfigDict(strict=True)  # a text is no code 0

    code: int
    reason: str
    started: float = 0.0
    """Seconds since the epoch; so is ``ended``."""
    ended: float = 0.0


class Job(NamedTuple):
    """The attempt of a run that a supervisor runs, and its budgets in seconds."""

    run: str
    attempt: int
    run_timeout: float
    start_timeout: float
    """Until the first line of a rank."""
    stall_timeout: float | None
    """Without output; None: no limit."""


def start(manifest: Mapping[str, Any], directory: Path, job: Job, lock: int) -> ProcessHandle:
    """Start a training under a supervisor that outlives this process; returns the supervisor's handle.

    Args:
        manifest: ``{argv, env, cwd, files}`` as the launchers write it; files are relative to ``directory``.
        directory: The attempt's folder, for the log, the handle and, at the end, the exit record.
        job: The attempt and its budgets.
        lock: A file descriptor that holds the ledger's lock. The starter inherits it, so no other process
            starts this run before the handle is on disk, even if this process is killed in between.

    Raises:
        LaunchError: The supervisor ended before it had written its handle, or did not write it within 60 s.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for file, text in manifest["files"].items():
        (directory / file).write_text(text)
    write_json(directory / COMMAND, {"argv": manifest["argv"], "cwd": manifest["cwd"], **job._asdict()})
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_PRIVATE_PREFIXES)}
    try:
        # The starter forks the supervisor, and ends as soon as the supervisor has written its handle.
        with (directory / LOG).open("ab") as log:
            starter = subprocess.run(
                # -P: the folder of the command may have modules with the names of Python's own.
                [sys.executable, "-P", "-m", "manycpu.pipeline.adapters.supervisor", str(directory)],
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=inherited | manifest["env"],
                pass_fds=(lock,),
                start_new_session=True,
                timeout=_START_TIMEOUT_S,
            )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"the supervisor of {job.run} did not come up within {error.timeout:g} s",
            fix="See whether the machine is overburdened, and run again",
        ) from error
    handle = read_handle(directory)
    if handle is None:
        tail = (directory / LOG).read_text(errors="replace")[-2000:].strip()
        raise LaunchError(
            f"the supervisor of {job.run} ended with exit code {starter.returncode}; it said: {tail}"
        )
    return handle


def read_handle(directory: Path) -> ProcessHandle | None:
    """Read the handle that a supervisor wrote into its attempt's folder; None: no supervisor has started.

    Raises:
        LedgerError: It cannot be read.
    """
    return read_record(ProcessHandle, directory / HANDLE)


def observe(handle: ProcessHandle) -> dict[str, Any]:
    """Observe the supervisor of an attempt.

    Returns:
        ``exit``: the fields of the exit record; None: there is none yet. Only then the other two count:
        ``alive``, whether the supervisor lives (None: unknown), and ``unseen``, why that is unknown.

    Raises:
        LedgerError: The exit record cannot be read.
    """
    # Alive first: a process that ends between the two reads has written its record by then.
    alive, unseen = _liveness(handle)
    record = read_record(_Exit, Path(handle.directory) / EXIT)
    return {"alive": alive, "unseen": unseen, "exit": record and record.model_dump()}


def cancel(handle: ProcessHandle) -> None:
    """End a supervisor and all its descendants; do nothing if the supervisor has ended.

    Raises:
        LaunchError: The supervisor still lives, also after SIGKILL.
        UnseenError: This process cannot see whether the supervisor lives: it may be on another machine.
    """
    alive, unseen = _liveness(handle)
    if alive is None:
        raise unseen_error(handle, unseen)
    if not alive:
        return
    try:
        process = psutil.Process(handle.pid)
        tree = [process, *process.children(recursive=True)]
        process.send_signal(signal.SIGINT)  # it then ends the training, and writes the exit record
        process.wait(END_TIMEOUT_S)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        end(tree)
        if is_alive(handle) is not False:
            raise LaunchError(f"process {handle.pid} of run {handle.run} does not end") from None


def end_leftovers(handle: ProcessHandle) -> None:
    """Kill the ranks of an attempt that still run after its supervisor has ended.

    They would write to the checkpoints of the next attempt. They are recognised by their output folder, which
    no other attempt has. A launcher gets SIGTERM when its supervisor dies, but a rank may ignore that.

    Raises:
        LaunchError: One of them cannot be killed.
    """
    output = f"{handle.directory}/output"

    def writes_there(process: psutil.Process) -> bool:
        """Whether a living process has the attempt's output folder in its environment."""
        with suppress(psutil.Error, OSError):  # it ended, or belongs to another user
            return process.environ().get("MANYCPU_OUTPUT") == output
        return False

    leftovers = [process for process in psutil.process_iter() if writes_there(process)]
    end(leftovers)
    if survivors := [process for process in leftovers if writes_there(process)]:
        raise LaunchError(f"process {survivors[0].pid} of run {handle.run} does not end")


def unseen_error(handle: ProcessHandle, unseen: str, gone: str = "") -> UnseenError:
    """Build the error for a process whose state cannot be seen from here.

    ``gone`` is the command with which a person declares the process's machine gone for good. The error
    suggests it, unless it is empty.
    """
    fix = f"Continue or cancel it there ({handle})"
    return UnseenError(
        f"whether attempt {handle.attempt} of run {handle.run} still runs is unknown: {unseen}",
        fix=f"{fix}. If that place is gone for good, say so: {gone}" if gone else fix,
    )


def declare_gone(handle: ProcessHandle, cancelling: str) -> None:
    """Write the exit record of a process whose host or container is gone for good, as a person confirms.

    Raises:
        LaunchError: The process lives on this host. The error names the command ``cancelling``, which ends
            the process.
    """
    if is_alive(handle):
        raise LaunchError(
            f"process {handle.pid} of run {handle.run} lives on this host", fix=f"End it: {cancelling}"
        )
    Path(handle.directory).mkdir(parents=True, exist_ok=True)  # a removal that was killed may have deleted it
    times = {"started": handle.start_time, "ended": time.time()}
    # It counts as cancelled; the code is that of a killed process.
    write_json(Path(handle.directory) / EXIT, {"code": -signal.SIGKILL, "reason": "cancelled", **times})


def boot_id() -> str:
    """Identify this boot of this machine."""
    return kernel.boot_id() or str(int(psutil.boot_time()))


class LogFollower:
    """Reads a growing log: each line once, and only whole lines."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def read(self, limit: int = 1 << 20) -> list[str]:
        """Read the lines that came since the last call, about ``limit`` bytes at most; empty: none came."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                block = file.read(limit)
        except FileNotFoundError:
            return []
        whole = block[: block.rfind(b"\n") + 1]
        if len(block) == limit:  # a line of more than ``limit`` bytes comes in pieces
            whole = whole or block
        self.offset += len(whole)
        # Not splitlines: it also splits within a rank's line, and the rest would have no rank prefix.
        lines = whole.decode(errors="replace").removesuffix("\n").split("\n") if whole else []
        return [line.removesuffix("\r") for line in lines]  # a launcher may write to a terminal


def last_lines(path: Path, limit: int) -> list[str]:
    """Return the last whole lines of a log, of ``limit`` bytes at most; empty: there is no log."""
    size = path.stat().st_size if path.exists() else 0
    follower = LogFollower(path, max(0, size - limit))
    lines = follower.read(limit)
    return lines[1:] if size > limit else lines  # the first one may be cut


def write_json(path: Path, value: object, mode: int = 0o666) -> None:
    """Write a JSON file as :func:`write_text` does."""
    write_text(path, json.dumps(value), mode)


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file atomically; the umask restricts its mode."""
    # A unique name: threads may write the same file.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:_TOKEN_DIGITS]}")
    try:
        partial.touch(mode)
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a loss of power may leave an empty file of the final name
        partial.replace(path)
    except OSError:  # such as a full disk
        partial.unlink(missing_ok=True)
        raise


def partials(path: Path) -> list[Path]:
    """List the unfinished files that killed calls of :func:`write_text` left beside a file."""
    return list(path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * _TOKEN_DIGITS}"))


def handle_of_this_process(directory: Path, name: str, attempt: int) -> ProcessHandle:
    """Make a handle of the calling process."""
    return ProcessHandle(
        run=name,
        attempt=attempt,
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid=os.getpid(),
        start_time=psutil.Process().create_time(),
        start_ticks=_start_ticks("self"),
        pid_namespace=kernel.pid_namespace(),
        machine=_machine_digest(),
        directory=str(directory),
    )


def wait_until_gone(handle: ProcessHandle, timeout: float) -> bool:
    """Wait for a supervisor to end, for at most ``timeout`` seconds.

    Returns True if it has ended; False if it still lives, or if that cannot be seen from here.
    """
    if is_alive(handle):
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            psutil.Process(handle.pid).wait(timeout)
    return is_alive(handle) is False


def is_this_process(handle: ProcessHandle) -> bool:
    """Whether a handle is that of the calling process."""
    return handle.pid == os.getpid() and bool(is_alive(handle))


def is_alive(handle: ProcessHandle) -> bool | None:
    """Whether a supervisor lives; None: it cannot be seen from here."""
    return _liveness(handle)[0]


def _liveness(handle: ProcessHandle) -> tuple[bool | None, str]:
    """Return whether a supervisor lives, and "". If it cannot be seen from here: None, and why not."""
    host, namespace = socket.gethostname(), kernel.pid_namespace()
    if handle.host != host:
        return None, f"it was started on host {handle.host}, and this is {host}"
    if handle.pid_namespace not in (None, namespace):
        return None, f"it was started in another container (PID namespace) of host {host}"
    if handle.boot_id != boot_id():
        # The number of the machine's own PID namespace; a container has another. Some systems have none.
        is_outside_containers = namespace in (None, "pid:[4026531836]")
        if is_outside_containers and handle.machine is not None and handle.machine == _machine_digest():
            return False, ""  # the same machine has restarted since, so the process has ended
        return None, f"host {host} was restarted since, or is another of that name"
    return _liveness_here(handle)


def _liveness_here(handle: ProcessHandle) -> tuple[bool | None, str]:
    """Look for a supervisor of this host, boot and PID namespace.

    Returns whether it lives, and "". If that cannot be seen: None, and why not.
    """
    try:
        if handle.start_ticks is not None:
            # Another start time: another process has got the same number.
            return _start_ticks(handle.pid) == handle.start_ticks, ""
        process = psutil.Process(handle.pid)  # not Linux, or a handle of an earlier version
        alive = process.status() != psutil.STATUS_ZOMBIE
        same = abs(process.create_time() - handle.start_time) < 1  # and no other process with this number
    except _HiddenError:
        return None, f"the processes of host {handle.host} are hidden from this one"
    except psutil.NoSuchProcess:
        alive = same = False
    # On Linux, a time that differs proves nothing: it is computed from the clock, which may have been set.
    if (alive and same) or sys.platform != "linux":
        return alive and same, ""
    return None, "an earlier version of manycpu started it, which did not record what tells its process"


class _HiddenError(Exception):
    """A process exists and may not be read; or /proc shows another PID namespace."""


def _start_ticks(pid: int | str) -> int | None:
    """Read when a process started, in clock ticks since the boot; None: it has ended, or this is not Linux.

    Raises:
        _HiddenError: The process exists and may not be read, or /proc shows another PID namespace.
    """
    if sys.platform != "linux":
        return None
    if pid != "self" and Path("/proc/self").readlink() != Path(str(os.getpid())):
        raise _HiddenError  # /proc numbers the processes of another PID namespace
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
        try:
            os.kill(int(pid), 0)  # no signal: only asks the kernel whether the process exists
        except ProcessLookupError:
            return None
        except PermissionError:  # it exists, and belongs to another user
            pass
        raise _HiddenError from error
    # The name in parentheses may hold anything: the state follows the last one, the start 19 fields later.
    state, *fields = text.rpartition(b")")[2].split()
    return None if state in (b"Z", b"X") else int(fields[18])


def _machine_digest() -> str | None:
    """Return a digest of this machine's id, which is independent of the host's name; None: it has no id.

    The id itself is confidential, says machine-id(5), and the digest is written to handles.
    """
    machine_id = _read(Path("/etc/machine-id")) if sys.platform == "linux" else f"{uuid.getnode():x}"
    if not machine_id:
        return None
    return hashlib.sha256(f"manycpu {machine_id.strip()}".encode()).hexdigest()[:32]


def read_record(model: type[Record], path: Path) -> Record | None:
    """Read a JSON file as a record of the class ``model``; None: there is no file.

    Raises:
        LedgerError: Its content is not such a record.
    """
    try:
        text = _read(path)
        return None if text is None else model.model_validate_json(text)
    except ValueError as error:
        raise LedgerError(
            f"{path} cannot be read: {' '.join(str(error).split())[:_ERROR_CHARACTERS]}",
            fix="Restore it; or delete it, if no process of its run lives",
        ) from error


def _read(path: Path) -> str | None:
    """Read a text file; None: it does not exist."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
