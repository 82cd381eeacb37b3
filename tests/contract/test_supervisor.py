"""A supervised process outlives its starter, keeps its budgets, and leaves nothing."""

import fcntl
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.waiting import processes_of, until

from manycpu.pipeline.adapters import process, supervisor
from manycpu.pipeline.spec.errors import LaunchError
from manycpu.pipeline.spec.handle import ProcessHandle

pytestmark = pytest.mark.usefixtures("no_process_left")
SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ProcessHandle]]:
    """Start commands; whatever still runs at the end of the test is ended."""
    started: list[ProcessHandle] = []
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)

    def begin(
        argv: list[str],
        *,
        run_timeout: float = 60,
        start_timeout: float = 60,
        stall_timeout: float | None = None,
    ) -> ProcessHandle:
        directory = tmp_path / f"attempt-{len(started)}"
        manifest = {"argv": argv, "env": {"MARK": str(tmp_path)}, "cwd": str(tmp_path), "files": {}}
        job = process.Job("test", 1, run_timeout, start_timeout, stall_timeout)
        started.append(process.start(manifest, directory, job, lock))
        return started[-1]

    yield begin
    for handle in started:
        process.cancel(handle)
    os.close(lock)


def ended(handle: ProcessHandle) -> dict[str, object]:
    assert process.wait_until_gone(handle, 300)
    record = process.observe(handle)["exit"]
    assert isinstance(record, dict)
    return record


def log(handle: ProcessHandle) -> str:
    return (Path(handle.directory) / process.LOG).read_text()


@pytest.mark.parametrize(("text", "code"), [("pass", 0), ("raise SystemExit(3)", 3)])
def test_the_exit_code_is_recorded(start: Callable[..., ProcessHandle], text: str, code: int) -> None:
    record = ended(start([sys.executable, "-c", text]))
    assert (record["code"], record["reason"]) == (code, "")


def test_the_folder_of_the_command_is_not_imported_from(
    start: Callable[..., ProcessHandle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert ended(start(["true"]))["code"] == 0


def test_death_by_a_signal_is_recorded_as_such(start: Callable[..., ProcessHandle]) -> None:
    record = ended(start([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]))
    assert record["code"] == -9


def test_a_program_that_is_not_there_is_named(start: Callable[..., ProcessHandle]) -> None:
    record = ended(start(["/no/such/program"]))
    assert record["code"] == 127
    assert "'/no/such/program' cannot be run" in str(record["reason"])


def test_a_disk_that_takes_no_record_is_an_error_in_words(
    start: Callable[..., ProcessHandle], tmp_path: Path
) -> None:
    (tmp_path / "attempt-0" / ".exit.json.reserved").mkdir(parents=True)
    with pytest.raises(
        LaunchError, match=r"no training can begin in \S+/attempt-0: .*Is a directory"
    ) as caught:
        start(SLEEP)
    assert "Traceback" not in str(caught.value)


def test_it_is_no_child_of_its_starter_and_lives_in_a_session_of_its_own(
    start: Callable[..., ProcessHandle],
) -> None:
    handle = start(SLEEP)
    assert handle.pid not in [child.pid for child in psutil.Process().children(recursive=True)]
    assert os.getsid(handle.pid) == handle.pid


def test_cancelling_ends_it_and_is_harmless_twice(start: Callable[..., ProcessHandle]) -> None:
    handle = start(SLEEP)
    until(lambda: "up" in log(handle))
    process.cancel(handle)
    process.cancel(handle)
    assert process.observe(handle)["exit"]["reason"] == "cancelled"


def test_cancelling_ends_it_if_its_starter_ignores_the_signal(start: Callable[..., ProcessHandle]) -> None:
    """So does a shell for what it starts in the background."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        handle = start(SLEEP)
    finally:
        signal.signal(signal.SIGINT, handler)
    until(lambda: "up" in log(handle))
    process.cancel(handle)
    assert process.observe(handle)["exit"]["reason"] == "cancelled"


def test_one_whose_service_is_stopped_was_not_cancelled(start: Callable[..., ProcessHandle]) -> None:
    handle = start(SLEEP)
    until(lambda: "up" in log(handle))
    os.kill(handle.pid, signal.SIGTERM)
    assert ended(handle)["reason"] == "SIGTERM"


def test_one_that_ignores_sigterm_is_killed(start: Callable[..., ProcessHandle]) -> None:
    stubborn = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    handle = start([sys.executable, "-c", stubborn])
    until(lambda: "up" in log(handle))
    process.cancel(handle)
    assert process.observe(handle)["alive"] is False


def test_orphans_in_sessions_of_their_own_are_ended_too(
    start: Callable[..., ProcessHandle], tmp_path: Path
) -> None:
    spawn = f"import subprocess; subprocess.Popen({SLEEP!r}, start_new_session=True); print('gone')"
    handle = start([sys.executable, "-c", spawn])
    assert ended(handle)["code"] == 0
    assert list(processes_of(tmp_path)) == []


def test_the_run_timeout_ends_it_and_names_its_field(start: Callable[..., ProcessHandle]) -> None:
    assert ended(start(SLEEP, run_timeout=1))["reason"] == "run.run_timeout: not done after 1 s"


def test_a_rank_that_never_speaks_uses_up_the_start_timeout(start: Callable[..., ProcessHandle]) -> None:
    reason = ended(start(SLEEP, start_timeout=1))["reason"]
    assert reason == "run.start_timeout: no rank spoke within 1 s"


def test_silence_beyond_the_stall_timeout_ends_it(start: Callable[..., ProcessHandle]) -> None:
    assert "run.stall_timeout" in str(ended(start(SLEEP, stall_timeout=1))["reason"])


@pytest.mark.parametrize("written", [0, 2**32], ids=["past", "future"])
def test_a_clock_that_is_set_neither_ends_it_nor_has_it_stall_for_ever(
    start: Callable[..., ProcessHandle], written: int, tmp_path: Path
) -> None:
    steps = (
        "import pathlib, sys, time; print('up', flush=True)\nwhile not pathlib.Path(sys.argv[1]).exists(): "
    )
    handle = start([sys.executable, "-c", steps + "time.sleep(0.1)", str(tmp_path / "go")], stall_timeout=4)
    until(lambda: "up" in log(handle))
    os.utime(Path(handle.directory) / process.LOG, (written, written))
    assert not process.wait_until_gone(handle, 2)  # two looks at the log, at least
    assert "run.stall_timeout" in str(ended(handle)["reason"])


def test_an_hour_that_the_clock_is_set_forward_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    log = SimpleNamespace(spoken=True, received=1)
    watch = supervisor._LogWatch(log, {"start_timeout": 60, "stall_timeout": 60})  # type: ignore[arg-type] # noqa: SLF001
    assert watch.silence() == ""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert watch.silence() == ""


def test_a_lock_that_it_inherits_under_a_high_number_is_free_at_once(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    path = tmp_path / "lock"
    path.touch()
    first = os.open(path, os.O_RDWR)
    high = fcntl.fcntl(first, fcntl.F_DUPFD, 1500)
    os.close(first)
    fcntl.flock(high, fcntl.LOCK_EX)
    manifest = {"argv": SLEEP, "env": {}, "cwd": str(tmp_path), "files": {}}
    handle = process.start(manifest, tmp_path / "attempt", process.Job("test", 1, 60, 60, None), high)
    try:
        os.close(high)  # not unlocked: that would unlock it for all who inherited it
        with path.open() as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        process.cancel(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_supervisor_that_was_killed_is_a_failure_and_takes_its_training_along(
    start: Callable[..., ProcessHandle], tmp_path: Path
) -> None:
    handle = start(SLEEP)
    until(lambda: "up" in log(handle))
    os.kill(handle.pid, signal.SIGKILL)
    assert process.wait_until_gone(handle, 10)
    observed = process.observe(handle)
    assert (observed["alive"], observed["exit"]) == (False, None)
    until(lambda: not list(processes_of(tmp_path)))


def test_a_reused_pid_is_not_mistaken_for_it(start: Callable[..., ProcessHandle]) -> None:
    handle = start(SLEEP)
    assert handle.start_ticks
    stranger = handle.model_copy(update={"start_ticks": handle.start_ticks - 100})
    assert process.observe(stranger)["alive"] is False
    process.cancel(stranger)
    assert process.observe(handle)["alive"] is True


def test_a_log_is_followed_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = process.LogFollower(path)
    assert follower.read() == []
    path.write_text("one\ntw")
    assert follower.read() == ["one"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert follower.read() == ["two", "three"]
    assert follower.read() == []


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\r"])
def test_only_a_newline_ends_a_line_of_a_log(separator: str, tmp_path: Path) -> None:
    """What follows in a rank's line must not be of no rank, or claim to be of another."""
    line = f"[rank 0 here] one{separator}[rank 1 there] two"
    path = tmp_path / "log"
    path.write_bytes(f"{line}\n\nthree\r\n{line}\n".encode())
    assert process.LogFollower(path).read() == [line, "", "three", line]
    assert process.LogFollower(path).read(limit=12) == ["[rank 0 here"]
