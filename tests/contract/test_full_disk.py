"""A disk that is full for a moment ends no training and deletes nothing; its log says what it lacks."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml
from support import namespaces
from support.killable_programs import Program
from support.rank_launches import found
from support.waiting import until

from manycpu.pipeline.run_report import Report

pytestmark = [
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.usefixtures("home", "light_torch", "no_process_left"),
]
ONLY_PRINTS = """
import os, time, torch.distributed as dist
from pathlib import Path
told = Path(os.environ["TOLD"])
Path(os.environ["MANYCPU_CHECKPOINTS"], "checkpoint").write_text("of hours")
Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text("the model")
dist.init_process_group()
step = 0
while not (told / "end").exists():
    print("step", step, "." * 300, flush=True)
    step += 1
    with (told / os.environ["RANK"]).open("ab") as steps:
        steps.write(b".")
    time.sleep(0.002)
(told / ("ended " + os.environ["RANK"])).write_text(str(os.getpid()))
"""
BEGINS = {
    "processes": {},
    "intel": {"launch": "mpirun"},
    "openmpi": {"launch": "mpirun", "mpi": "mpirun.openmpi"},
    "mpich": {"launch": "mpirun", "mpi": "mpirun.mpich"},
}


@pytest.fixture
def disk(home: Path) -> Iterator[namespaces.SmallDisk]:
    """Have runs go to a disk that is soon full."""
    with namespaces.small_disk(home, "24m") as made:
        yield made


class Training:
    """The command `manycpu run` on a small disk, with a training that prints until its gate is opened."""

    def __init__(self, tmp_path: Path, disk: namespaces.SmallDisk, script: str, launcher: str) -> None:
        self.told, self.out, self.disk = tmp_path / "told", tmp_path / "out", disk
        self.told.mkdir()
        env = {"TOLD": str(self.told)}
        run = {"program": script, "output": str(self.out), "nproc_per_node": 2, "env": env}
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump({"run": run, "target": {"kind": "local", **BEGINS[launcher]}}))
        words = [*disk.inside, sys.executable, "-m", "manycpu.pipeline.cli", "run", str(file)]
        self.program: Program[bytes] = Program(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def goes_on(self) -> None:
        """Wait until both ranks have made steps since."""
        files = [self.told / str(rank) for rank in range(2)]
        until(lambda: all(file.exists() for file in files))
        before = [file.stat().st_size for file in files]
        until(lambda: all(file.stat().st_size > size + 30 for file, size in zip(files, before, strict=True)))

    def log(self) -> Path:
        (log,) = self.disk.seen.glob("runs/*/attempts/1/log")
        return log

    def end(self) -> None:
        (self.told / "end").touch()

    def has_passed(self) -> str:
        """See that all went well, and return what was printed."""
        printed = self.program.communicate(timeout=300)[0].decode()
        assert self.program.returncode == 0, printed[-3000:]
        assert (self.out / "model.txt").read_text() == "the model"
        report = Report.model_validate_json((self.out / "report.json").read_text())
        assert report.state == "succeeded"
        return printed


@pytest.fixture
def begin(
    tmp_path: Path, disk: namespaces.SmallDisk, script: Callable[..., str]
) -> Iterator[Callable[[str], Training]]:
    """Start a training; one that a failed test left ends."""
    begun: list[Training] = []

    def begin(launcher: str) -> Training:
        if BEGINS[launcher].get("launch") == "mpirun":
            found(launcher)
        begun.append(Training(tmp_path, disk, script(ONLY_PRINTS), launcher))
        return begun[-1]

    yield begin
    for training in begun:
        training.end()
        training.program.communicate()


@pytest.mark.parametrize(
    "launcher",
    ["processes", "intel", *(pytest.param(name, marks=pytest.mark.long) for name in ("openmpi", "mpich"))],
)
def test_a_training_that_only_prints_passes(launcher: str, begin: Callable[[str], Training]) -> None:
    training = begin(launcher)
    training.goes_on()
    training.disk.fill()
    training.goes_on()
    full = training.log().stat().st_size
    training.goes_on()
    assert training.log().stat().st_size == full, "nothing was written meanwhile"
    training.disk.free()
    until(lambda: training.log().stat().st_size > full)
    training.end()
    printed = training.has_passed()
    assert "missing in the log" in printed


def test_a_training_that_ends_while_the_disk_is_full_passes(begin: Callable[[str], Training]) -> None:
    training = begin("processes")
    training.goes_on()
    training.disk.fill()
    training.end()
    files = [training.told / f"ended {rank}" for rank in range(2)]
    until(lambda: all(file.exists() and file.read_text() for file in files))
    until(lambda: not any(psutil.pid_exists(int(file.read_text())) for file in files))
    training.disk.free()
    assert "2 ranks" in training.has_passed()


def typed(disk: namespaces.SmallDisk, *words: str) -> subprocess.CompletedProcess[str]:
    """Type a command that sees the disk."""
    argv = [*disk.inside, sys.executable, "-m", "manycpu.pipeline.cli", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)


def test_clean_makes_room_on_a_full_disk(
    disk: namespaces.SmallDisk, script: Callable[..., str], tmp_path: Path
) -> None:
    program = script("import os; open(os.environ['MANYCPU_CHECKPOINTS'] + '/c', 'w'); raise SystemExit(3)")
    typed(disk, "run", "--program", program, "--output", str(tmp_path / "out"), "--nproc-per-node", "1")
    (run,) = disk.seen.glob("runs/train-*")
    disk.fill()
    cleaned = typed(disk, "clean", run.name, "--delete-model", "--yes")
    assert cleaned.returncode == 0, cleaned.stderr
    assert not run.exists()


def test_a_cancel_on_a_full_disk_says_that_it_has_ended_the_training(
    begin: Callable[[str], Training],
) -> None:
    training = begin("processes")
    training.goes_on()
    training.disk.fill()
    name = training.log().parents[2].name
    cancelled = typed(training.disk, "cancel", name)
    assert (cancelled.returncode, f"The training of run {name} was ended" in cancelled.stderr) == (1, True)
    training.disk.free()  # its command waits for that, for as long as a minute
    training.program.communicate(timeout=300)


RECORDS = """
import sys
from pathlib import Path
from manycpu.pipeline.adapters.supervisor import ExitRecord
record = ExitRecord(Path(sys.argv[1]))
print("reserved", flush=True)
input()
record.write(0, "", 1.0, 2.0)
print("written", flush=True)
"""


@pytest.mark.parametrize("reserved", [True, False], ids=["reserved", "taken away"])
def test_how_a_training_ended_is_recorded_on_a_full_disk(
    disk: namespaces.SmallDisk, home: Path, *, reserved: bool
) -> None:
    """At once where its room is there, and else as soon as the disk has room again."""
    words = [*disk.inside, sys.executable, "-c", RECORDS, str(home)]
    with Program(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline() == "reserved\n"
        if not reserved:
            (disk.seen / ".exit.json.reserved").unlink()
        disk.fill()
        program.stdin.write("\n")
        program.stdin.flush()
        if not reserved:
            until((disk.seen / ".exit.json.reserved").exists)  # it has tried
            disk.free()
        assert program.stdout.readline() == "written\n"
        assert json.loads((disk.seen / "exit.json").read_text())["code"] == 0
