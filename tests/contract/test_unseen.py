"""A living run is not mistaken for one that is gone: after a clock step, in another container or host."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from support import namespaces
from support.killable_programs import Program
from support.training_scripts import ALL_REDUCE

from manycpu.pipeline.ledger.file import FileLedger

pytestmark = [
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or ""),
    pytest.mark.usefixtures("home", "light_torch", "no_process_left"),
]
MANYCPU = [sys.executable, "-m", "manycpu.pipeline.cli"]
ELSEWHERE = {"container": namespaces.CONTAINER, "host": namespaces.HOST}
ENDS_ON_REQUEST = f"""
import os, pathlib, time
print("waiting", flush=True)
for name in ("step", "end"):
    while not pathlib.Path(os.environ["TOLD"], name).exists():
        time.sleep(0.05)
    print("read", name, flush=True)
{ALL_REDUCE}
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the folder whose files tell the training to continue."""
    folder = tmp_path / "told"
    folder.mkdir()
    monkeypatch.setenv("TOLD", str(folder))
    return folder


@pytest.fixture
def begin(
    script: Callable[..., str], tmp_path: Path, told: Path
) -> Iterator[Callable[[list[str]], Program[str]]]:
    """Start a run that ends on a signal."""
    file = tmp_path / "run.yaml"
    fields = {"program": script(ENDS_ON_REQUEST), "output": str(tmp_path / "out"), "nproc_per_node": 1}
    file.write_text(yaml.safe_dump({"run": fields}))

    def begin(place: list[str]) -> Program[str]:
        words = [*place, *MANYCPU, "run", str(file), "--run-id", "x"]
        return Program(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    yield begin
    for name in ("step", "end"):
        (told / name).touch()


def read_until(program: Program[str], text: str) -> None:
    assert program.stdout is not None
    printed = ""
    while text not in printed:
        line = program.stdout.readline()
        assert line, printed
        printed += line


def typed(place: list[str], *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [*place, *MANYCPU, *words],
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"COLUMNS": "400"},
        timeout=300,
    )
    return done.returncode, " ".join(done.stdout.split())


def test_a_step_of_the_clock_ends_no_run(
    begin: Callable[[list[str]], Program[str]], told: Path, tmp_path: Path, home: Path
) -> None:
    clock = tmp_path / "stat"
    run = begin(namespaces.with_clock(clock))
    read_until(run, "waiting")
    namespaces.step_clock(clock, 100)
    (told / "step").touch()
    read_until(run, "read step")  # it has looked at the training since
    stepped = namespaces.with_clock(clock)
    namespaces.step_clock(clock, -100)
    assert "left alone: a process works on it" in typed(stepped, "clean", "--yes")[1]
    (told / "end").touch()
    printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0, printed
    assert (tmp_path / "out" / "model.txt").read_text() == "sum 1"
    assert list((home / "runs").iterdir()) == []


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_run_that_lives_elsewhere_is_neither_removed_nor_started_again(
    begin: Callable[[list[str]], Program[str]], told: Path, tmp_path: Path, home: Path, place: str
) -> None:
    run, there = begin([]), ELSEWHERE[place]
    read_until(run, "waiting")
    (ledger,) = map(FileLedger, (home / "runs").glob("train-*"))
    name = ledger.directory.name
    unknown = "in another container" if place == "container" else "this is elsewhere"
    code, printed = typed(there, "status")
    assert (code, "unknown" in printed, unknown in printed) == (0, True, True)
    for words in (["clean", "--yes"], ["clean", name, "--delete-model", "--yes"]):
        code, printed = typed(there, *words)
        assert (code, "nothing to remove" in printed, unknown in printed) == (0, True, True)
        assert f"manycpu cancel {name} --gone" in printed
    code, printed = typed(there, "cancel", name)
    assert (code, unknown in printed, "--gone" in printed) == (1, True, True)
    code, printed = typed(there, "run", str(tmp_path / "run.yaml"), "--run-id", "x")
    assert (code, "cannot be seen from here" in printed) == (2, True)
    ledger.change_lease(ended=True, holder=None)  # as if no process worked on it, and its time were over
    assert "nothing to remove" in typed(there, "clean", "--yes")[1]
    assert ledger.read().verbs.keys() == {"prepare", "stage", "build", "launch"}
    for word in ("step", "end"):
        (told / word).touch()
    printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0, printed
    assert (tmp_path / "out" / "model.txt").read_text() == "sum 1"


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_run_whose_place_is_gone_continues_once_a_person_says_so(
    begin: Callable[[list[str]], Program[str]], told: Path, tmp_path: Path, home: Path, place: str
) -> None:
    gone = begin([*namespaces.CONTAINER, *ELSEWHERE[place]])
    read_until(gone, "waiting")
    gone.kill()  # and with the first process of its container all others
    gone.communicate()
    (folder,) = (home / "runs").glob("train-*")
    for word in ("step", "end"):
        (told / word).touch()
    again = ("run", str(tmp_path / "run.yaml"), "--run-id", "x")
    assert typed([], *again)[0] == 2
    code, printed = typed([], "cancel", folder.name, "--gone")
    assert (code, "recorded as gone" in printed) == (0, True)
    assert "cancelled" in typed([], "status")[1]
    code, printed = typed([], *again)
    assert code == 0, printed
    assert (tmp_path / "out" / "model.txt").read_text() == "sum 1"


def test_whether_a_living_run_is_gone_is_no_matter_of_opinion(
    begin: Callable[[list[str]], Program[str]], told: Path, home: Path
) -> None:
    run = begin([])
    read_until(run, "waiting")
    (folder,) = (home / "runs").glob("train-*")
    code, printed = typed([], "cancel", folder.name, "--gone")
    assert (code, "lives on this host" in printed) == (1, True)
    for word in ("step", "end"):
        (told / word).touch()
    printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0, printed
