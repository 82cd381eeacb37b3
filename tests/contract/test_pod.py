"""What a helper pod does by itself, and how it ends; here as a process of this machine."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.folder_contents import contents, location
from support.helper_process import pod
from support.killable_programs import Program
from support.waiting import until

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.listing import Item, Rows
from manycpu.pipeline.pod import client
from manycpu.pipeline.pod.channel import Channel, LostError, RemoteError, send_rows


def test_a_url_is_fetched_beside_the_volume_and_published_from_there(source: Path, tmp_path: Path) -> None:
    request = {"url": f"file://{source}", "folder": str(tmp_path / "volume"), "field": "run.data"}
    told: list[tuple[int, int]] = []
    with pod("fetch", progress=lambda done, total: told.append((done, total))) as (channel, _):
        first = client.ask(channel, **request)
    with pod("fetch") as (channel, _):
        second = client.ask(channel, **request)
    assert (first["reused"], second["reused"]) == (False, True)
    assert contents(Path(first["path"])) == contents(source)
    assert told[-1][1] == transfer.scan(location(source)).size
    with pod("publish") as (channel, _):
        done = client.publish(channel, source=first["path"], url=f"file://{tmp_path}/out", key="key")
    assert done.digest == first["sha256"]
    assert contents(tmp_path / "out").items() >= contents(source).items()


def test_a_single_file_behind_a_url_keeps_its_name(source: Path, tmp_path: Path) -> None:
    with pod("fetch") as (channel, _):
        done = client.ask(channel, url=f"file://{source}/a.txt", folder=str(tmp_path / "v"), field="run.data")
    assert Path(done["path"]).name == "a.txt"
    assert Path(done["path"]).read_bytes() == b"alpha"


@pytest.mark.parametrize(
    ("url", "said"), [("nope://x", "Protocol not known: nope"), ("s3://bucket/set", "Install s3fs")]
)
def test_a_protocol_that_the_image_lacks_is_named(
    url: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s3fs.py").write_text("raise ImportError('it is not installed')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    cannot = rf"^{url!r} cannot be opened: {said}"
    with pod("fetch") as (channel, _), pytest.raises(RemoteError, match=cannot) as refused:
        client.ask(channel, url=url, folder=str(tmp_path), field="run.data")
    assert refused.value.reason == "input"


def test_small_files_are_read_and_written_at_the_output(tmp_path: Path) -> None:
    with pod("write_report") as (channel, _):
        client.ask(channel, url=str(tmp_path / "out"), key="key", text="{}")
    with pod("read") as (channel, _):
        found = client.ask(channel, url=str(tmp_path / "out"), name="report.json")
    assert (found["text"], found["names"]) == ("{}", ["report.json"])


def test_a_pod_whose_worker_is_gone_ends(tmp_path: Path) -> None:
    with pod("receive") as (channel, process):
        send_rows(channel, "request", Rows(Item, [Item("a", 1, "0")]), folder=str(tmp_path / "x"))
        channel.receive_message("have")
        assert process.stdin
        process.stdin.close()
        until(lambda: process.poll() is not None)
    assert list((tmp_path / "x").glob(".*.lock")) == []


def test_a_silent_pod_is_given_up() -> None:
    with pod("receive", silence=0.5) as (channel, process):
        os.kill(process.pid, 19)
        with pytest.raises(LostError, match="no sign of life"):
            channel.receive_message("done")


class Broken:
    """A connection that breaks at the first sign of life."""

    def __init__(self) -> None:
        self.broke = threading.Event()

    def read(self, _: int) -> bytes:
        self.broke.wait()
        return b""

    def writelines(self, _: object) -> None:
        self.broke.set()
        raise BrokenPipeError("away")

    def flush(self) -> None:
        raise AssertionError("nothing was written")


def test_who_waits_hears_of_a_break_that_a_sign_of_life_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manycpu.pipeline.pod.channel.BEAT_INTERVAL_S", 0.1)
    connection = Broken()
    with Channel(connection, connection, connection.broke.set) as channel:
        reading, beating, _ = channel._threads  # noqa: SLF001 - what is heard after both have ended
        until(lambda: not (reading.is_alive() or beating.is_alive()))
        with pytest.raises(LostError, match="the stream ended"):
            channel.receive_message("done")


def test_an_idle_pod_ends_when_asked_to() -> None:
    program = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); print(flush=True);"
    program += "from manycpu.pipeline.pod.__main__ import idle; raise SystemExit(idle(3600))"
    with Program([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.terminate()
        assert process.wait(300) == 0


def test_an_idle_pod_has_not_imported_what_its_commands_need() -> None:
    """Many pods idle beside the training: 12 MiB each, and not 37."""
    program = "import sys; from manycpu.pipeline.pod.__main__ import idle; idle(0); print(*sys.modules)"
    imported = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert "psutil" in imported
    assert {"fsspec", "pydantic"}.isdisjoint(imported)


HANG = """
import sys, time
from manycpu.pipeline.pod import __main__ as program, channel, commands
channel.STUCK_AFTER_S = 1.0
commands.COMMANDS["hang"] = lambda channel, **_: time.sleep(3600)
def work(channel, **_):
    for _ in range(30):
        time.sleep(0.1)
        channel.tick()
    channel.send_message("done")
commands.COMMANDS["work"] = work
sys.exit(program.main(sys.argv[1]))
"""


def test_a_pod_whose_volume_does_not_answer_says_so_and_ends() -> None:
    with pod("hang", code=HANG) as (channel, process):
        with pytest.raises(RemoteError, match="its work has stood still for 1 s") as raised:
            client.ask(channel)
        assert raised.value.reason == "stuck"
        assert process.wait(300) == os.EX_UNAVAILABLE


def test_a_pod_whose_work_goes_on_is_not_given_up_however_long_it_takes() -> None:
    with pod("work", code=HANG) as (channel, _):
        assert client.ask(channel)["kind"] == "done"


def test_who_waits_for_the_other_end_is_not_stuck() -> None:
    with pod("work", code=HANG.replace("range(30)", "range(3)")) as (channel, _):
        time.sleep(3)  # what the pod waits for, thrice as long as it may stand still itself
        assert client.ask(channel)["kind"] == "done"
