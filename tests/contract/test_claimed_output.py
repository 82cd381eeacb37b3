"""Two runs, one output: one of them has it, the other is refused before it trains, and no model is lost."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from support.folder_contents import contents
from support.helper_process import pod
from support.killable_programs import Program
from support.waiting import until

from manycpu.pipeline.pod import client
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.transfer import Manifest

pytestmark = pytest.mark.usefixtures("home", "light_torch", "no_process_left")
Script = Callable[..., str]
ON_DISK, ON_STORAGE = "{}", "dir://out::file://{}/.."
URLS: Final = (ON_DISK, ON_STORAGE)
on_disk: Final = pytest.mark.parametrize(
    "url", [ON_DISK, pytest.param(ON_STORAGE, marks=pytest.mark.long)], indirect=True
)
on_storage: Final = pytest.mark.parametrize(
    "url", [pytest.param(ON_DISK, marks=pytest.mark.long), ON_STORAGE], indirect=True
)
"""The exports see that claims are alike on both; a whole run tries one."""
PUBLISHES: Final = """
import os, sys, time
from pathlib import Path
from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location

source, url, key, gate = sys.argv[1:]

def meanwhile(*_):
    Path(gate + "." + key).touch()
    while not os.path.exists(gate):
        time.sleep(0.01)

print("ready", flush=True)
sys.stdin.readline()
try:
    transfer.publish(Path(source), Location.of(url, "run.output"), key, meanwhile)
except transfer.TransferError as error:
    sys.exit(f"refused: {error}")
"""
WAITS: Final = """
import os, time
print("waiting", flush=True)
while not os.path.exists(os.environ["GATE"]):
    time.sleep(0.02)
open(os.environ["MANYCPU_OUTPUT"] + "/model.txt", "w").write("the model")
"""


@pytest.fixture(params=URLS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Name an output on disk, and the same folder as storage that knows no rename."""
    return str(request.param).format(tmp_path / "out")


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    """Make three models of three runs, whose files have the same names and sizes."""
    made = {key: tmp_path / "models" / key for key in ("aaa", "bbb", "ccc")}
    for key, folder in made.items():
        folder.mkdir(parents=True)
        for name in ("first.bin", "second.bin"):
            (folder / name).write_text(f"{name} of {key}")
    return made


def publisher(source: Path, url: str, key: str, gate: Path) -> Program[str]:
    words = [sys.executable, "-c", PUBLISHES, str(source), url, key, str(gate)]
    pipe = subprocess.PIPE
    started: Program[str] = Program(words, text=True, stdin=pipe, stdout=pipe, stderr=pipe)
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    return started


def begin(program: Program[str]) -> None:
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()


def left_by_claims(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if "claim" in path.name]


def test_of_exports_that_overlap_one_goes_on_and_its_model_is_whole(
    sources: dict[str, Path], url: str, tmp_path: Path
) -> None:
    gate, (first, second, *_) = tmp_path / "gate", sources
    held = publisher(sources[first], url, first, gate)
    begin(held)
    until(Path(f"{gate}.{first}").exists)
    late = publisher(sources[second], url, second, gate)
    begin(late)
    refused = late.communicate(timeout=300)[1]
    assert late.returncode == 1, refused
    assert f"another run has it: {first} (host " in refused
    gate.touch()
    said = held.communicate(timeout=300)[1]
    assert held.returncode == 0, said
    assert contents(tmp_path / "out").items() >= contents(sources[first]).items()
    assert left_by_claims(tmp_path) == []


@pytest.mark.parametrize("once", [0, *(pytest.param(time, marks=pytest.mark.long) for time in (1, 2))])
def test_of_exports_that_begin_at_once_one_goes_on(
    sources: dict[str, Path], url: str, tmp_path: Path, once: int
) -> None:
    gate = tmp_path / "gate"
    programs = {key: publisher(source, url, key, gate) for key, source in sources.items()}
    for program in programs.values():
        begin(program)
    until(lambda: sum(program.poll() is not None for program in programs.values()) >= 2)
    gate.touch()
    words = {key: program.communicate(timeout=300)[1] for key, program in programs.items()}
    done = [key for key, program in programs.items() if program.returncode == 0]
    assert len(done) == 1, f"{once}: {words}"
    assert all("refused: " in words[key] for key in words if key not in done)
    assert contents(tmp_path / "out").items() >= contents(sources[done[0]]).items()
    assert left_by_claims(tmp_path) == []


class Run:
    """`manycpu run` of an id, to one output."""

    def __init__(self, program: str, url: str, gate: Path) -> None:
        self.words = ["run", "--program", program, "--output", url, "--nproc-per-node", "1"]
        self.words += ["--env", json.dumps({"GATE": str(gate)})]

    def type(self, run_id: str, home: Path | None = None) -> Program[str]:
        words = [sys.executable, "-m", "manycpu.pipeline.cli", *self.words, "--run-id", run_id]
        env = os.environ | ({"MANYCPU_HOME": str(home)} if home else {})
        return Program(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


@pytest.fixture
def run(script: Script, url: str, tmp_path: Path) -> Iterator[Run]:
    """Describe a training that waits for a gate; one that a failed test left ends."""
    yield Run(script(WAITS), url, tmp_path / "gate")
    (tmp_path / "gate").touch()


def trains(home: Path) -> list[str]:
    logs = home.glob("runs/*/attempts/*/log")
    return [log.parts[-4] for log in logs if "waiting" in log.read_text()]


@on_disk
def test_a_second_run_with_the_same_output_is_refused_before_it_trains(
    run: Run, tmp_path: Path, home: Path
) -> None:
    first = run.type("first")
    until(lambda: trains(home))
    (name,) = trains(home)
    second = run.type("second")
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 2, said
    assert f"another run has it: {name} (host " in said
    assert f"manycpu cancel {name}" in said
    assert trains(home) == [name]
    assert [folder.name for folder in (home / "runs").iterdir() if folder.is_dir()] == [name]
    (tmp_path / "gate").touch()
    said, _ = first.communicate(timeout=300)
    assert first.returncode == 0, said
    assert (tmp_path / "out" / "model.txt").read_text() == "the model"
    report = Report.model_validate_json((tmp_path / "out" / "report.json").read_text())
    assert (report.name, report.state) == (name, "succeeded")
    assert left_by_claims(tmp_path) == []


@on_storage
def test_a_run_of_the_same_id_in_another_home_is_another_run(run: Run, tmp_path: Path, home: Path) -> None:
    first = run.type("nightly")
    until(lambda: trains(home))
    (name,) = trains(home)
    other_home = tmp_path / "another home"
    second = run.type("nightly", other_home)
    said, _ = second.communicate(timeout=300)
    assert second.returncode == 2, said
    place = f"host {socket.gethostname()}, {home / 'runs' / name}"
    assert f"another run with this run id has it: {name} ({place}), since " in said
    assert list((other_home / "runs").iterdir()) == []
    assert len(left_by_claims(tmp_path)) == 1
    (tmp_path / "gate").touch()
    said, _ = first.communicate(timeout=300)
    assert first.returncode == 0, said
    assert (tmp_path / "out" / "model.txt").read_text() == "the model"
    assert left_by_claims(tmp_path) == []


@on_storage
def test_a_run_that_ended_without_a_model_leaves_its_output_to_others(
    url: str, script: Script, tmp_path: Path
) -> None:
    failing = Run(script("raise SystemExit(3)"), url, tmp_path / "gate").type("first")
    said, _ = failing.communicate(timeout=300)
    assert failing.returncode == 1, said
    assert left_by_claims(tmp_path) == []
    (tmp_path / "gate").touch()
    other = Run(script(WAITS), url, tmp_path / "gate").type("second")
    said, _ = other.communicate(timeout=300)
    assert other.returncode == 0, said
    assert (tmp_path / "out" / "model.txt").read_text() == "the model"


@on_disk
def test_a_run_whose_command_was_killed_goes_on_with_its_output(run: Run, tmp_path: Path, home: Path) -> None:
    killed = run.type("first")
    until(lambda: trains(home))
    killed.kill()
    killed.communicate()
    assert len(left_by_claims(tmp_path)) == 1
    (tmp_path / "gate").touch()
    again = run.type("first")
    said, _ = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert left_by_claims(tmp_path) == []


@on_storage
def test_a_training_whose_command_was_killed_keeps_its_output_from_another(
    run: Run, tmp_path: Path, home: Path
) -> None:
    killed = run.type("first")
    until(lambda: trains(home))
    (name,) = trains(home)
    killed.kill()
    killed.communicate()
    second = run.type("second")
    said, _ = second.communicate(timeout=300)
    assert (second.returncode, f"another run has it: {name} (host " in said) == (2, True), said
    assert "its --run-id attaches to it" in said
    (tmp_path / "gate").touch()
    said, _ = run.type("first").communicate(timeout=300)
    assert (tmp_path / "out" / "model.txt").read_text() == "the model", said
    assert left_by_claims(tmp_path) == []


@on_storage
def test_pods_claim_an_output_and_see_no_claims_in_it(url: str, source: Path, tmp_path: Path) -> None:
    def ask(command: str, **request: object) -> dict[str, object]:
        with pod(command) as (channel, _):
            return client.ask(channel, url=url, **request)

    asked = {"place": "namespace training", "seconds": 60}
    assert ask("claim", key="aaa", run="qa-aaa", **asked)["other"] is None
    assert ask("claim", key="aaa", run="qa-aaa", **asked)["other"] is None
    other = ask("claim", key="bbb", run="qa-bbb", **asked)["other"]
    assert str(other).startswith("another run has it: qa-aaa (namespace training), since ")
    assert ask("read", name="report.json")["names"] == []
    ask("release", key="bbb")
    assert len(left_by_claims(tmp_path)) == 1
    with pod("publish") as (channel, _):
        client.publish(channel, source=str(source), url=url, key="aaa")
    assert left_by_claims(tmp_path) == []
    assert ask("read", name="a.txt")["text"] == "alpha"
    digest = Manifest.parse(str(ask("read", name="manifest.json")["text"]))[0].digest
    assert ask("compare", digest=digest, sizes=True)["reason"] is None
    (tmp_path / "out" / "a.txt").unlink()
    assert ask("compare", digest=digest, sizes=True)["reason"] == "a.txt is gone"
