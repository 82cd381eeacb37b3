"""The ranks that one machine starts by itself: their world, their end, and their meeting point."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.killable_programs import Program
from support.rank_launches import LIGHT, LIMIT, PLAIN, execute
from support.waiting import until

from manycpu.pipeline.node import local_world

pytestmark = pytest.mark.usefixtures("nothing_runs_afterwards")

TELLS = """
import json, os, sys
with open(f"rank{os.environ['RANK']}.json", "w") as file:
    json.dump(dict(os.environ), file)
"""
READY = """
import os, signal, sys, time
rank = os.environ["RANK"]
def ready():
    open("ready" + rank, "w").close()
    time.sleep(600)
"""
FIRST_WAITS = """
if rank == "0":
    ready()
while not os.path.exists("ready0"):
    time.sleep(0.02)
"""
SAVES = """
def save(number, _):
    open("saved" + rank, "a").write(signal.Signals(number).name + " ")
    sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(number, save)
ready()
"""


def begin(folder: Path, script: str, grace: float = 600, **env: str) -> Program[bytes]:
    """Start two ranks of a script that needs no torch."""
    code = f"from manycpu.pipeline.node import local_world as here\nhere.GRACE_S = {grace}\n"
    code += "listener = here.fork_ranks(2)\n"
    command = [sys.executable, "-c", code + script]
    return Program(command, env=PLAIN | env, cwd=folder, start_new_session=True)


def world(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_the_world_is_as_torchrun_makes_it(tmp_path: Path) -> None:
    """What it tells ranks, but for its agent: here rank 0 serves the store, and errors are in no file."""
    (tmp_path / "tells.py").write_text(TELLS)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "tells.py"]
    subprocess.run(
        [sys.executable, "-m", *torchrun],
        check=True,
        env=PLAIN,
        cwd=tmp_path,
        timeout=LIMIT,
        capture_output=True,
    )
    known = world(tmp_path)
    assert begin(tmp_path, TELLS).wait(LIMIT) == 0
    own = {
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    }
    for seen, told in zip(world(tmp_path), known, strict=True):
        assert {name: seen.get(name) for name in told if name not in own} == {
            name: value for name, value in told.items() if name not in own
        }
        assert (seen["MASTER_ADDR"], seen["TORCHELASTIC_USE_AGENT_STORE"]) == ("127.0.0.1", "False")
    assert len({(seen["MASTER_PORT"], seen["TORCHELASTIC_RUN_ID"]) for seen in world(tmp_path)}) == 1


@pytest.mark.parametrize(
    ("end", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL)]
)
def test_the_first_that_fails_ends_the_others(end: str, code: int, tmp_path: Path) -> None:
    assert begin(tmp_path, READY + FIRST_WAITS + end).wait(LIMIT) == code


def test_a_rank_that_does_not_end_is_killed(tmp_path: Path) -> None:
    script = READY + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FIRST_WAITS + "sys.exit(3)"
    assert begin(tmp_path, script, grace=0.2).wait(LIMIT) == 3


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1]
)
def test_a_signal_reaches_every_rank_once(number: signal.Signals, tmp_path: Path) -> None:
    """Also one from a terminal, which is sent to the whole group of processes."""
    process = begin(tmp_path, READY + SAVES)
    until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)))
    os.killpg(process.pid, number)
    # Who was told to end has not succeeded, however well its ranks took it.
    assert process.wait(LIMIT) == (0 if number == signal.SIGUSR1 else 128 + number)
    for rank in (0, 1):
        assert (tmp_path / f"saved{rank}").read_text() == f"{number.name} "


def test_the_error_of_the_first_that_failed_is_the_runs(tmp_path: Path) -> None:
    record = tmp_path / "error.json"
    writes = "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('of rank ' + rank)\n"
    script = READY + writes + FIRST_WAITS + "sys.exit(3)"
    assert begin(tmp_path, script, TORCHELASTIC_ERROR_FILE=str(record)).wait(LIMIT) == 3
    assert record.read_text() == "of rank 1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["error.json", "ready0"]


def test_the_meeting_point_is_open_in_rank_0_alone(tmp_path: Path) -> None:
    """Where another rank had it too, ranks that come late would wait in vain for one that is gone."""
    script = "import os, psutil\nopen('open' + os.environ['RANK'], 'w').write(str([\n"
    script += "    one.laddr.port for one in psutil.Process().net_connections('tcp')\n]))"
    assert begin(tmp_path, script).wait(LIMIT) == 0
    sockets = [json.loads((tmp_path / f"open{rank}").read_text()) for rank in (0, 1)]
    assert (len(sockets[0]), sockets[1]) == (1, [])


def test_a_port_is_taken_before_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with local_world.open_meeting_point() as first, local_world.open_meeting_point() as second:
        named = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        assert first.getsockname() != second.getsockname() == named
        socket.create_connection(named).close()
        with socket.socket() as late:
            late.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                late.bind(named)


def test_a_starter_that_ignores_the_ends_of_its_children_changes_nothing(tmp_path: Path) -> None:
    """As some init programs and shells leave it to what they start."""
    code = "from manycpu.pipeline.node import local_world as here\nhere.fork_ranks(2)\n"
    ignores = (
        f"import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nos.execv({sys.executable!r}, "
    )
    script = f"{code}import os, sys\nsys.exit(7 if os.environ['RANK'] == '1' else 0)"
    command = [sys.executable, "-c", f"{ignores}{[sys.executable, '-c', script]!r})"]
    assert Program(command, env=PLAIN, cwd=tmp_path, start_new_session=True).wait(LIMIT) == 7


def test_a_rank_ends_whose_starter_is_gone_before_it_begins(tmp_path: Path) -> None:
    code = """
import os, runpy, signal
starter = os.getpid()
def lose_it():
    while os.getppid() == starter:
        os.kill(starter, signal.SIGKILL)
os.register_at_fork(after_in_child=lose_it)
runpy.run_module("manycpu.pipeline.node", run_name="__main__")
"""
    (tmp_path / "train.py").write_text("import time; time.sleep(20)")
    command = [sys.executable, "-c", code, "--nproc-per-node=1", "train.py"]
    ended = execute(command, LIGHT, tmp_path)
    assert [event["code"] for event in ended.events("exit")] == [-signal.SIGTERM]


def test_children_that_are_no_ranks_are_let_be(tmp_path: Path) -> None:
    """What a shell had started before it became the parent of ranks, as the first process of a container."""
    code = "from manycpu.pipeline.node import local_world as here\nhere.fork_ranks(2)\n"
    script = f"import os, subprocess\nsubprocess.Popen(['true'])\n{code}import time; time.sleep(0.5)"
    assert Program([sys.executable, "-c", script], env=PLAIN, cwd=tmp_path).wait(LIMIT) == 0


@pytest.mark.parametrize("count", ["0", "", "two", "-1"])
def test_a_number_of_ranks_that_is_none_is_refused(count: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "manycpu.pipeline.node", f"--nproc-per-node={count}", "train.py"]
    done = subprocess.run(command, check=False, env=PLAIN, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.split(":")[0]) == (2, "usage")
