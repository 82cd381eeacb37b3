"""Commands end in time, also where what they left behind holds on to their streams."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.killable_programs import Program

from manycpu.pipeline.adapters import commands, ssh, ssh_copies, supervisor
from manycpu.pipeline.node import log_forwarder
from manycpu.pipeline.spec.errors import LaunchError, StageError


def test_lines_are_told_as_they_are() -> None:
    told: list[str] = []
    assert commands.follow(["printf", "one\\n\\ntwo \\nlast"], told.append, timeout=30) == 0
    assert told == ["one", "", "two", "last"]


def test_what_a_command_leaves_behind_is_not_waited_for() -> None:
    told: list[str] = []
    try:
        with pytest.raises(LaunchError, match="did not end within"):
            commands.follow(["sh", "-c", "setsid sleep 60 & echo $!"], told.append, timeout=0.5)
    finally:
        os.kill(int(told[0]), signal.SIGKILL)


def test_who_sends_a_folder_ends_with_who_takes_it() -> None:
    with pytest.raises(StageError, match="copying to or from host a failed"):
        ssh_copies._stream(["sh", "-c", "while echo x; do :; done"], ["false"], "a")  # noqa: SLF001 - needs no host


def test_a_copy_may_take_long_if_it_is_never_silent_for_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "COPY_TIMEOUT_S", 4.0)
    speaks = "printf 'login:begin:'; for word in 1 2 3 4 5 6 7 8 9; do printf $word; sleep .5; done"
    ssh_copies._stream(["sh", "-c", speaks], ["tee", f"{tmp_path}/copy"], "a", b":begin:")  # noqa: SLF001 - needs no host
    assert (tmp_path / "copy").read_text() == "123456789"


@pytest.mark.parametrize(
    ("source", "sink"), [(["sleep", "60"], ["cat"]), (["cat", "/dev/zero"], ["sleep", "60"])]
)
def test_a_copy_in_which_nothing_moves_is_ended(
    source: list[str], sink: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh, "COPY_TIMEOUT_S", 0.3)
    with pytest.raises(StageError, match=r"copying to or from host a made no progress for 0\.3 s"):
        ssh_copies._stream(source, sink, "a")  # noqa: SLF001 - needs no host


def test_a_copy_says_why_its_sink_failed_while_its_source_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "COPY_TIMEOUT_S", 5.0)
    monkeypatch.setattr(ssh_copies, "_END_TIMEOUT_S", 0.3)
    sink = ["sh", "-c", "echo no space >&2; exit 3"]
    with pytest.raises(StageError, match="copying to or from host a failed: no space"):
        ssh_copies._stream(["sleep", "60"], sink, "a")  # noqa: SLF001 - needs no host


def test_what_does_not_go_when_it_is_killed_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "_UNKILLABLE_S", 0.2)
    monkeypatch.setattr(supervisor, "_GRACE_S", 0.1)
    # As if it waited for a disk.
    monkeypatch.setattr("manycpu.pipeline.spec.kernel.send_signal", lambda *_: True)
    with Program(["sleep", "60"]) as stuck:
        try:
            supervisor.end_tree()
            assert f"killed, and still there: {stuck.pid};" in capsys.readouterr().out
        finally:
            stuck.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="it gives up its rights: needs root")
@pytest.mark.parametrize("of", ["supervisor", "rank"])
def test_a_process_of_another_user_is_left_running(of: str, capfd: pytest.CaptureFixture[str]) -> None:
    """As sudo leaves them behind."""
    began = time.monotonic()
    read_end, write_end = os.pipe()
    if (ender := os.fork()) == 0:
        try:
            with open(write_end, "w") as file:  # noqa: PTH123 - a descriptor
                file.write(str(Program(["sleep", "60"]).pid))
            os.setuid(65534)
            if of == "supervisor":
                supervisor.end_tree()
            else:
                log_forwarder._kill_all(1 << 30)  # noqa: SLF001 - there is no such group
            os._exit(0)
        finally:
            os._exit(1)
    os.close(write_end)
    with open(read_end) as file:  # noqa: PTH123 - a descriptor
        left = int(file.read())
    try:
        assert os.waitpid(ender, 0)[1] == 0
        assert time.monotonic() - began < supervisor._UNKILLABLE_S / 2  # noqa: SLF001 - it waits for nothing
        assert (f"left running, as another user owns them: {left}" in capfd.readouterr().out) == (
            of == "supervisor"
        )
    finally:
        os.kill(left, signal.SIGKILL)  # it still runs
