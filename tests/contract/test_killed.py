"""A command that is killed at a write: the same run resumes, trains no second time and leaves nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from manycpu.pipeline.run_report import Report

pytestmark = pytest.mark.usefixtures("home", "light_torch", "no_process_left")
Script = Callable[..., str]
FAULT_AT = Path(__file__).parents[1] / "scripts" / "fault_at.py"
TRAINS = """
import os, sys
open(sys.argv[1], "a").write("trained\\n")
open(os.environ["MANYCPU_OUTPUT"] + "/model.txt", "w").write("the model")
"""


class Command:
    """`manycpu run` of one run id, as often as it is typed."""

    def __init__(self, tmp_path: Path, script: Script) -> None:
        self.folder, self.out, self.history = tmp_path, tmp_path / "out", tmp_path / "history"
        self.words = ["run", "--program", script(TRAINS), "--args", json.dumps([str(self.history)])]
        self.words += ["--output", str(self.out), "--nproc-per-node", "1", "--run-id", "x"]

    def type(self, *before: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, *(before or ("-m", "manycpu.pipeline.cli")), *self.words]
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)

    def killed(self, pattern: str, count: int) -> None:
        done = self.type(str(FAULT_AT), "kill-begun", pattern, str(count))
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr

    def finishes_after(self, home: Path, pattern: str, count: int) -> None:
        """Kill it at a write, type it again, and see that all is done."""
        self.killed(pattern, count)
        again = self.type()
        assert again.returncode == 0, again.stdout + again.stderr
        self.is_done(home)

    def is_done(self, home: Path) -> None:
        """See that the model of one training is there, its report is green, and nothing is left."""
        assert self.history.read_text() == "trained\n"
        assert (self.out / "model.txt").read_text() == "the model"
        report = Report.model_validate_json((self.out / "report.json").read_text())
        assert (report.state, report.verbs["cleanup"].result) == ("succeeded", "done")
        assert list((home / "runs").iterdir()) == []
        assert sorted(path.name for path in self.out.iterdir()) == OUTPUT


OUTPUT = ["manifest.json", "model.txt", "report.html", "report.json", "run.log"]


@pytest.fixture
def command(tmp_path: Path, script: Script) -> Command:
    return Command(tmp_path, script)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (r"os.rename \S*/train-\w+ \S*\.removed", 1),
        # As trackers are told of one, below.
        pytest.param(r"os.remove (ledger|lease)\.json", 1, marks=pytest.mark.long),
        pytest.param(r"os.rmdir \S*/\.train-\w+\.removed", 1, marks=pytest.mark.long),
        pytest.param(r"os.remove \S*\.lock", 1, marks=pytest.mark.long),
    ],
    ids=["renames the run", "deletes files", "deletes the folder", "deletes the lock"],
)
def test_killed_while_it_cleans_up_the_same_run_trains_no_second_time(
    command: Command, home: Path, pattern: str, count: int
) -> None:
    command.finishes_after(home, pattern, count)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (r"open \S*/out/\.?report\.json", 1),
        pytest.param(r"open \S*/out/\.?report\.json", 2, marks=pytest.mark.long),
        pytest.param(r"open \S*/out/\.?report\.json", 3, marks=pytest.mark.long),
        pytest.param(r"open \S*/out/\.?report\.html", 1, marks=pytest.mark.long),
        (r"open \S*/out/\.?report\.html", 2),
    ],
    ids=["export", "before the removal", "after it", "its page", "its last page"],
)
def test_killed_while_it_writes_a_report_the_same_run_is_not_refused(
    command: Command, home: Path, pattern: str, count: int
) -> None:
    command.finishes_after(home, pattern, count)


def test_a_model_whose_export_was_cut_short_before_the_clean_up_is_kept(command: Command, home: Path) -> None:
    command.killed(r"open \S*/out/\.?report\.json", 2)
    (command.out / "model.txt").write_text("")
    again = command.type()
    assert again.returncode != 0
    assert "model.txt" in again.stdout + again.stderr
    assert [path.read_text() for path in home.glob("runs/*/attempts/1/output/model.txt")] == ["the model"]


@pytest.mark.parametrize(
    "pattern",
    [
        pytest.param(r"os.rmdir \S*/\.manycpu-trial\.\w+", marks=pytest.mark.long),
        r"os.rename \S*/\.\.out\.[\w-]+\.claim\.",
        r"os.rename \S*\.manifest\.\w+\.partial",
        pytest.param(r"os.rename \S*/reports/", marks=pytest.mark.long),
    ],
    ids=["tries the disk", "claims the output", "marks a copy", "names the newest report"],
)
def test_killed_at_a_record_the_same_run_leaves_no_part_of_it(
    command: Command, home: Path, tmp_path: Path, pattern: str
) -> None:
    command.finishes_after(home, pattern, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code", "history", "home", "out"]
    assert not list(home.rglob("*.partial"))


@pytest.mark.parametrize(
    ("fault", "pattern"),
    [
        pytest.param("EIO", r"os.rename \S*/attempts/1/\.command", marks=pytest.mark.long),
        pytest.param("EACCES", r"os.rename \S*/attempts/1/\.command", marks=pytest.mark.long),
        ("EACCES", r"open \S*/runs/\.train-\w+\.lock"),
        ("EAGAIN", "subprocess.Popen"),
        ("ENOSPC", r"open \S*/code.partial/"),
    ],
)
def test_an_error_of_the_system_is_a_message_and_the_same_run_continues(
    command: Command, home: Path, fault: str, pattern: str
) -> None:
    failed = command.type(str(FAULT_AT), fault, pattern, "1")
    said = failed.stdout + failed.stderr
    assert failed.returncode == 1, said
    assert os.strerror(getattr(errno, fault)) in said.splitlines()[-1]
    assert "Traceback" not in said
    assert command.type().returncode == 0
    command.is_done(home)


@pytest.mark.parametrize(
    ("pattern", "count", "word"),
    [
        (r"open \S*/out/\.report\.json", 1, "report.json cannot be written"),
        (r"os.rename .*/ledger\.json", 12, "has succeeded in spite of this error"),
        pytest.param(r"os.rename \S*/reports/", 1, "", marks=pytest.mark.long),
        pytest.param(r"open \S*/out/\.run\.log", 1, "", marks=pytest.mark.long),
    ],
    ids=["its first report", "its record", "the path of the report", "its log"],
)
def test_an_error_after_the_model_is_exported_changes_no_run(
    command: Command, home: Path, tmp_path: Path, pattern: str, count: int, word: str
) -> None:
    done = command.type(str(FAULT_AT), "EIO", pattern, str(count))
    assert (done.returncode, word in done.stdout) == (0, True), done.stdout + done.stderr
    command.is_done(home)
    assert not list(tmp_path.rglob("*.partial"))


FAILS = """
import os
open(os.environ["MANYCPU_CHECKPOINTS"] + "/checkpoint", "w").write("of hours")
raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (r"os.remove checkpoint", True),
        pytest.param(r"os.remove checkpoint", False, marks=pytest.mark.long),
        pytest.param(r"os.remove \S*\.lock", True, marks=pytest.mark.long),
        (r"os.remove \S*\.lock", False),
    ],
    ids=["files-by its name", "files-with all others", "lock-by its name", "lock-with all others"],
)
def test_a_clean_that_is_killed_is_finished_by_the_next(
    command: Command, script: Script, home: Path, pattern: str, *, named: bool
) -> None:
    script(FAILS)
    assert command.type().returncode == 1
    (run,) = (home / "runs").glob("train-*")
    command.words = ["clean", run.name, "--delete-model", "--yes"]
    command.killed(pattern, 1)
    command.words = ["clean", *([run.name] if named else []), "--yes"]
    again = command.type()
    assert again.returncode == 0, again.stdout + again.stderr
    assert list((home / "runs").iterdir()) == []
    assert (command.out / "report.json").exists()


def test_a_clean_that_cannot_delete_is_no_success(command: Command, script: Script, home: Path) -> None:
    script(FAILS)
    command.type()
    (run,) = (home / "runs").glob("train-*")
    command.words = ["clean", run.name, "--delete-model", "--yes"]
    failed = command.type(str(FAULT_AT), "EIO", "os.remove checkpoint", "1")
    assert failed.returncode == 1, failed.stdout
    assert f"the run left behind: {run}: " in failed.stderr
    again = command.type()
    assert again.returncode == 0, again.stderr
    assert list((home / "runs").iterdir()) == []


def test_trackers_are_told_of_a_run_whose_clean_up_was_killed(command: Command, home: Path) -> None:
    command.words += ["--tracking", '["tensorboard"]']
    command.finishes_after(home, r"os.remove (ledger|lease)\.json", 1)
    report = Report.model_validate_json((command.out / "report.json").read_text())
    (attempt,) = (home / "tensorboard").glob("*/*")
    assert report.trackers["tensorboard"]["folder"] == str(attempt)
    read = EventAccumulator(str(attempt))
    read.Reload()
    (about,) = read.Tensors("run/text_summary")
    assert str(command.out / "report.json") in str(about.tensor_proto.string_val)
