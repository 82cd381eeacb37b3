"""A terminal that closes, a pipe without a reader, a full disk, a failing listener: training continues."""

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.killable_programs import Program
from support.local_runs import on_this_machine
from support.waiting import processes_of, until

from manycpu.pipeline import train
from manycpu.pipeline.listeners import Silent
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.verbs.cancel import cancel

pytestmark = pytest.mark.usefixtures("home", "light_torch", "no_process_left")
Script = Callable[..., str]

TALKS = """
import os, time
from pathlib import Path
Path(os.environ["MANYCPU_CHECKPOINTS"], "checkpoint").write_text("of hours")
gate, step = Path(os.environ["GATE"]), 0
while not gate.exists():
    print(f"step {step}", flush=True)
    step += 1
    time.sleep(0.05)
Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text("the model")
os.write(1, "end \u2192\\n".encode())
raise SystemExit(int(gate.read_text() or 0))
"""


class Training:
    """The command `manycpu run`, with a training that talks until its gate is opened."""

    def __init__(self, tmp_path: Path, script: Script) -> None:
        self.folder, self.gate, self.out = tmp_path, tmp_path / "gate", tmp_path / "out"
        self.program = Path(script(TALKS))
        run = {"program": str(self.program), "output": "out", "nproc_per_node": 1}
        run["env"] = {"GATE": str(self.gate)}
        self.file = tmp_path / "run.yaml"
        self.file.write_text(yaml.safe_dump({"run": run}))
        self.argv = [sys.executable, "-m", "manycpu.pipeline.cli", "run", str(self.file), "--run-id", "x"]

    def begin(self, **options: Any) -> Program[bytes]:
        return Program(self.argv, stdin=subprocess.DEVNULL, start_new_session=True, **options)

    def open_gate(self, code: int = 0) -> None:
        (self.folder / "code.txt").write_text(str(code))
        (self.folder / "code.txt").rename(self.gate)  # there with its text at once

    def trains(self) -> bool:
        return any((self.folder / "home" / "runs").glob("*/checkpoints/checkpoint"))

    def report(self) -> Report:
        return Report.model_validate_json((self.out / "report.json").read_text())


@pytest.fixture
def training(tmp_path: Path, script: Script) -> Iterator[Training]:
    """Describe a training; one that a failed test left ends."""
    described = Training(tmp_path, script)
    yield described
    described.open_gate()


def is_done(training: Training, program: Program[bytes], code: int = 0) -> None:
    """See that the run ended as its training did, and left nothing but its model and report."""
    assert program.wait(300) == code
    assert training.report().state == ("failed" if code else "succeeded")
    assert (training.out / "model.txt").exists() == (code == 0)
    assert code or list((training.folder / "home" / "runs").iterdir()) == []


@pytest.mark.parametrize("code", [0, 1])
def test_a_pipe_that_is_read_no_more_changes_no_run(training: Training, code: int) -> None:
    """As in `manycpu run ... 2>&1 | head -3`."""
    running = training.begin(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert running.stdout is not None
    for _ in range(3):
        running.stdout.readline()
    running.stdout.close()
    until(training.trains)
    training.open_gate(code)
    is_done(training, running, code)


@pytest.mark.parametrize("code", [0, 1])
def test_a_disk_that_is_full_where_the_output_goes_changes_no_run(training: Training, code: int) -> None:
    with Path("/dev/full").open("wb") as full:
        running = training.begin(stdout=full, stderr=full)
    training.open_gate(code)
    is_done(training, running, code)


def test_a_character_that_stdout_cannot_show_ends_no_output(training: Training) -> None:
    latin = os.environ | {"PYTHONIOENCODING": "latin-1"}
    running = training.begin(stdout=subprocess.PIPE, env=latin)
    training.open_gate()
    out, _ = running.communicate(timeout=300)
    is_done(training, running)
    assert b"end \\u2192\n" in out
    assert b"report.json" in out.partition(b"end")[2]
    command = [*training.argv[:3], "preflight", "--program", "\u2192.py", "--output", "null"]
    checked = subprocess.run(command, env=latin, capture_output=True, timeout=300, check=False)
    assert (checked.returncode, b"\\u2192.py" in checked.stdout) == (2, True)


def in_terminal(training: Training, hang_up: Any) -> tuple[Program[bytes], int]:
    """Type the command in a terminal of its own; returns the terminal's other side, too."""
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.login_tty(theirs)
        signal.signal(signal.SIGHUP, hang_up)

    running: Program[bytes] = Program(training.argv, preexec_fn=take_terminal, pass_fds=[theirs])
    os.close(theirs)
    return running, ours


def read_until(terminal: int, text: bytes) -> None:
    read = b""
    while text not in read:
        read += os.read(terminal, 1024)


def test_a_terminal_that_closes_changes_no_run_that_is_deaf_to_it(training: Training) -> None:
    """As after `disown`, or under `nohup` with its own redirection."""
    running, terminal = in_terminal(training, signal.SIG_IGN)
    read_until(terminal, b"step")
    os.close(terminal)
    training.open_gate()
    is_done(training, running)


def test_the_next_command_attaches_to_a_training_whose_program_was_deleted_meanwhile(
    training: Training,
) -> None:
    running = training.begin()
    until(training.trains)
    running.kill()
    running.wait()
    training.program.unlink()
    again = training.begin(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    training.open_gate()
    printed = again.communicate(timeout=300)[0].decode()
    is_done(training, again)
    verbs = re.findall(r"^(\w+) +done in", printed, re.MULTILINE)
    assert verbs == ["prepare", "launch", "wait", "export", "cleanup"]
    assert training.report().attempts == 1


def test_a_terminal_that_closes_leaves_the_training_which_the_next_command_goes_on_with(
    training: Training,
) -> None:
    running, terminal = in_terminal(training, signal.SIG_DFL)
    read_until(terminal, b"step")
    os.close(terminal)
    assert running.wait(300) == -signal.SIGHUP
    assert list(processes_of(training.folder)) != []
    assert training.trains()
    again = training.begin(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert again.stdout is not None
    printed = b""
    while b"step" not in printed:
        printed += again.stdout.readline()
    assert b"attached to attempt 1, whose training went on without the command that started it" in printed
    training.open_gate()
    again.communicate()
    is_done(training, again)


STARTS = """
def never_called():
    import torch.multiprocessing as mp
    mp.spawn(print, nprocs=4)
"""
"""A finding of preflight."""
HEARD = ["begin", "end", "progress", "finding", "line", "event", "flush", "report"]


@pytest.mark.parametrize("heard", HEARD)
def test_a_listener_that_fails_hears_no_more_and_changes_no_run(
    script: Script, tmp_path: Path, heard: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    class Fails(Silent):
        def __getattribute__(self, name: str) -> Any:
            def fail(*_: Any) -> None:
                calls.append(name)
                raise OSError("the terminal is gone")

            return fail if name == heard else super().__getattribute__(name)

    (tmp_path / "data").write_text("some data")
    (tmp_path / "gate").write_text("0")
    given = {"program": script(TALKS + STARTS), "output": str(tmp_path / "out"), "nproc_per_node": 1}
    env = {"GATE": str(tmp_path / "gate")}
    found = train(given | {"env": env, "data": str(tmp_path / "data")}, listener=Fails())
    assert found.state == "succeeded"
    assert (tmp_path / "out" / "model.txt").read_text() == "the model"
    assert calls == [heard]
    assert len([each for each in caplog.messages if "the terminal is gone" in each]) == 1


def started(training: Training) -> Program[bytes]:
    """Start a training, and kill the command: the training continues."""
    running = training.begin(stdout=subprocess.DEVNULL)
    until(training.trains)
    running.kill()
    running.wait()
    return running


def test_a_later_command_with_data_that_cannot_be_read_attaches_and_says_so(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # else the Hub is tried for 23 s
    started(training)
    fields = yaml.safe_load(training.file.read_text())["run"]
    fields |= {"data": "hf://datasets/nobody/nothing"}
    training.file.write_text(yaml.safe_dump({"run": fields}))
    again = training.begin(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    training.open_gate()
    printed = again.communicate(timeout=300)[0].decode()
    is_done(training, again)
    assert "run.data: it cannot be read: " in printed
    assert "run.data has changed since attempt 1 began. This attempt keeps the old value; " in printed
    assert training.report().attempts == 1


@pytest.mark.parametrize("output", ["memory://out", "home/runs/out"])
def test_a_later_command_with_an_output_that_keeps_nothing_leaves_the_training(
    training: Training, home: Path, output: str
) -> None:
    started(training)
    training.program.unlink()
    fields = yaml.safe_load(training.file.read_text())["run"] | {"output": output}
    training.file.write_text(yaml.safe_dump({"run": fields}))
    again = training.begin(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed = again.communicate(timeout=300)[0].decode()
    assert again.returncode == 2
    assert "run.output" in printed
    assert training.trains()
    (ctx,) = on_this_machine(home)
    cancel(ctx, by="the test")


def test_a_ledger_that_cannot_be_read_for_a_while_ends_the_command_and_no_training(
    training: Training, home: Path
) -> None:
    fields = yaml.safe_load(training.file.read_text())["run"]

    class Hides(Silent):
        def line(self, line: Any) -> None:
            (ledger,) = (home / "runs").glob("*/ledger.json")
            if line.text.startswith("step"):
                ledger.rename(ledger.with_suffix(".hidden"))
                ledger.mkdir()

    given = fields | {"output": str(training.out)}
    with pytest.raises(IsADirectoryError) as caught:
        train(given, run_id="x", listener=Hides())
    assert "The training of run train-" in "".join(caught.value.__notes__)
    (ledger,) = (home / "runs").glob("*/ledger.json")
    ledger.rmdir()
    ledger.with_suffix(".hidden").rename(ledger)
    assert training.trains()
    assert list(processes_of(training.folder)) != []
    training.open_gate()
    assert train(given, run_id="x").state == "succeeded"
