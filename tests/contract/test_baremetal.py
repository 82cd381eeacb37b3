"""Whole runs on the hosts of a hostfile, one of which shares no folder with this machine."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support import namespace_hosts as made_hosts
from support.killable_programs import Program
from support.rank_launches import LIGHT
from support.waiting import until

from manycpu.pipeline import BareMetal, train
from manycpu.pipeline.adapters.commands import run as run_command
from manycpu.pipeline.spec.errors import BadInputError, ExportError, TrainingFailedError

pytestmark = pytest.mark.skipif(bool(made_hosts.reason()), reason=made_hosts.reason() or "")

CHECKS_DATA = """
import os
assert open(os.environ["MANYCPU_DATA"] + "/deep/set.txt").read() == "some data"
"""


@pytest.fixture
def both(hosts: made_hosts.Hosts, hidden: Path) -> BareMetal:
    """Name the two hosts."""
    hostfile = str(hosts.hostfile("node-a", "node-b"))
    return BareMetal(hostfile=hostfile, ssh=hosts.ssh, directory=str(hidden))


def test_a_run_over_two_hosts_delivers_its_model(
    both: BareMetal, hosts: made_hosts.Hosts, hidden: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "set" / "deep").mkdir(parents=True)
    (tmp_path / "set" / "deep" / "set.txt").write_text("some data")
    program = script(CHECKS_DATA + Path(script()).read_text())
    given = {"program": program, "data": str(tmp_path / "set"), "output": str(tmp_path / "out")}
    report = train({**given, "nnodes": 2, "spread": "require", "env": LIGHT}, both)
    assert (report.state, report.world_size, report.hosts) == ("succeeded", 2, ["node-a", "node-b"])
    assert (tmp_path / "out" / "model.txt").read_text() == "sum 2"
    assert report.left_behind == []
    assert list((hidden / "runs").iterdir()) == []
    assert hosts["node-b"].run("find", str(hidden / "runs"), "-mindepth", "1") == ""
    assert "set.txt" in hosts["node-b"].run("find", str(hidden / "data"))


SHARDS = """
import os, torch.distributed as dist
dist.init_process_group()
output, rank = os.environ["MANYCPU_OUTPUT"], os.environ["RANK"]
open(f"{output}/{NAME}", "w").write(f"shard {rank}")
"""


def test_the_shards_of_all_hosts_reach_the_output(
    both: BareMetal, script: Callable[..., str], tmp_path: Path
) -> None:
    program = script(SHARDS.replace("{NAME}", "shard-{rank}.pt"))
    report = train({"program": program, "output": str(tmp_path / "out"), "nnodes": 2, "env": LIGHT}, both)
    assert report.state == "succeeded"
    assert [(tmp_path / "out" / f"shard-{rank}.pt").read_text() for rank in (0, 1)] == ["shard 0", "shard 1"]


def test_what_two_hosts_wrote_under_one_name_is_kept_on_both(
    both: BareMetal, hosts: made_hosts.Hosts, hidden: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    program = script(SHARDS.replace("{NAME}", "model.pt"))
    given = {"program": program, "output": str(tmp_path / "out"), "nnodes": 2, "env": LIGHT}
    with pytest.raises(ExportError, match=r"^run\.output: .*/model\.pt"):
        train(given, both, run_id="x")
    (kept,) = (hidden / "runs").glob("train-*/attempts/1/output")
    assert hosts["node-b"].run("cat", f"{kept}/model.pt") == "shard 1"
    assert (kept / "model.pt").read_text() == "shard 0"
    hosts["node-b"].run("mv", f"{kept}/model.pt", f"{kept}/model-1.pt")
    assert train(given, both, run_id="x").state == "succeeded"
    assert (tmp_path / "out" / "model-1.pt").read_text() == "shard 1"


LINKS = """
import os
checkpoints, output = os.environ["MANYCPU_CHECKPOINTS"], os.environ["MANYCPU_OUTPUT"]
open(f"{checkpoints}/weights", "w").write("the model")
open(f"{output}/config", "w").write("{}")
os.symlink(f"{checkpoints}/weights", f"{output}/weights")
"""
SAVES_AND_FAILS = """
import os, sys, torch.distributed as dist
dist.init_process_group()
if os.environ["RANK"] == os.environ["SAVES"]:
    open(os.environ["MANYCPU_CHECKPOINTS"] + "/checkpoint-1", "w").write("a day of work")
dist.barrier()
sys.exit(3)
"""


def test_what_links_lead_to_on_a_host_is_of_the_model(
    hosts: made_hosts.Hosts, hidden: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    target = BareMetal(hostfile=str(hosts.hostfile("node-b")), ssh=hosts.ssh, directory=str(hidden))
    train({"program": script(LINKS), "output": str(tmp_path / "out"), "env": LIGHT}, target)
    assert (tmp_path / "out" / "weights").read_text() == "the model"
    assert not (tmp_path / "out" / "weights").is_symlink()


def test_in_a_folder_of_any_name_the_checkpoints_of_a_host_stay(
    hosts: made_hosts.Hosts, hidden: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    folder = hidden / "team[1]"
    target = BareMetal(hostfile=str(hosts.hostfile("node-b")), ssh=hosts.ssh, directory=str(folder))
    env = {**LIGHT, "SAVES": "0"}
    with pytest.raises(TrainingFailedError):
        train({"program": script(SAVES_AND_FAILS), "output": str(tmp_path / "out"), "env": env}, target)
    assert "/checkpoints/checkpoint-1" in hosts["node-b"].run("find", str(folder / "runs"))


@pytest.mark.long
def test_a_host_that_a_run_has_no_more_keeps_its_checkpoints_and_is_named(
    both: BareMetal, hosts: made_hosts.Hosts, hidden: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    given = {"program": script(SAVES_AND_FAILS), "output": str(tmp_path / "out"), "env": LIGHT}
    with pytest.raises(TrainingFailedError):
        train({**given, "nnodes": 2, "env": {**LIGHT, "SAVES": "1"}}, both, run_id="fewer")
    with pytest.raises(TrainingFailedError) as caught:
        train({**given, "env": {**LIGHT, "SAVES": "none"}}, both, run_id="fewer")
    (kept,) = (hidden / "runs").glob("train-*")
    assert f"in {hosts['node-b'].address}:{kept}" in caught.value.__notes__[0]
    assert hosts["node-b"].run("cat", f"{kept}/checkpoints/checkpoint-1") == "a day of work"
    words = [sys.executable, "-m", "manycpu.pipeline.cli", "clean", kept.name, "--delete-model", "--yes"]
    assert run_command([*words, "--directory", str(hidden)], timeout=300).code == 0
    assert kept.name not in hosts["node-b"].run("ls", str(hidden / "runs"))


@pytest.mark.parametrize(
    ("names", "run", "message"),
    [
        (["node-a", "node-c"], {}, "host node-c cannot be reached by ssh"),
        (["node-a", "node-a"], {}, "target.hostfile: "),
        (["node-a", "node-b"], {"nnodes": 3}, "run.nnodes: 3 nodes were asked for"),
        (["node-a", "node-b"], {"nproc_per_node": 512}, "run.nproc_per_node: 512 processes were asked for"),
    ],
)
def test_bad_input_is_found_before_anything_starts(
    both: BareMetal,
    hosts: made_hosts.Hosts,
    script: Callable[..., str],
    tmp_path: Path,
    names: list[str],
    run: dict[str, object],
    message: str,
) -> None:
    known = {host.name: host.address for host in hosts.hosts}
    (tmp_path / "hosts").write_text("".join(f"{known.get(name, name)}\n" for name in names))
    given = {"program": script(), "output": str(tmp_path / "out"), "nnodes": 2, **run}
    with pytest.raises(BadInputError) as caught:
        train(given, both.model_copy(update={"hostfile": str(tmp_path / "hosts")}))
    assert message in str(caught.value)


def test_a_host_without_the_program_is_named(
    both: BareMetal, script: Callable[..., str], tmp_path: Path
) -> None:
    given = {"program": script(), "output": str(tmp_path / "out"), "nnodes": 2}
    with pytest.raises(BadInputError, match=r"target\.python: host \S+ cannot run /no/python"):
        train(given, both.model_copy(update={"python": "/no/python"}))


def test_the_rendered_command_is_what_a_person_could_type(
    both: BareMetal, hosts: made_hosts.Hosts, script: Callable[..., str], tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    run = {"program": script(), "output": "out", "nnodes": 2, "env": {"TOKEN_LIKE": "not-in-argv"}}
    path.write_text(yaml.safe_dump({"run": run, "target": both.model_dump(mode="json", exclude_none=True)}))
    done = run_command([sys.executable, "-m", "manycpu.pipeline.cli", "render", str(path)], timeout=300)
    rendered = yaml.safe_load(done.out)
    assert rendered["files"]["hostfile"] == "".join(f"{host.address}:1\n" for host in hosts.hosts)
    assert not any("not-in-argv" in word for word in rendered["argv"])


WRITES_BESIDE = """
import os, pathlib, time
data, folder = pathlib.Path(os.environ["MANYCPU_DATA"]), pathlib.Path({folder!r})
mine = data / "cache"
mine.write_text("mine")
(data / "set.txt").chmod(0o644)
(data / "set.txt").write_text("changed")
(folder / "trains").touch()
while not (folder / "go").exists():
    time.sleep(0.05)
assert mine.read_text() == "mine" and (data / "set.txt").read_text() == "changed"
pathlib.Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text("done")
"""
READS = """
import os, pathlib
data = pathlib.Path(os.environ["MANYCPU_DATA"])
assert (data / "set.txt").read_text() == "some data"
pathlib.Path(os.environ["MANYCPU_OUTPUT"], "model.txt").write_text(str(data))
"""


class Commands:
    """`manycpu run` on node-b alone, which shares no folder of runs with this machine."""

    def __init__(self, hosts: made_hosts.Hosts, hidden: Path, tmp_path: Path) -> None:
        self.folder = tmp_path
        hostfile = str(hosts.hostfile("node-b"))
        self.target = {"kind": "baremetal", "hostfile": hostfile, "ssh": list(hosts.ssh)}
        self.target["directory"] = str(hidden)

    def start(self, name: str, program: str) -> subprocess.Popen[bytes]:
        script, path = self.folder / name / "train.py", self.folder / f"{name}.yaml"
        script.parent.mkdir()
        script.write_text(program)
        run = {"program": str(script), "data": str(self.folder / "set"), "output": str(self.out(name))}
        path.write_text(yaml.safe_dump({"run": {**run, "env": LIGHT}, "target": self.target}))
        argv = [sys.executable, "-m", "manycpu.pipeline.cli", "run", str(path)]
        with (self.folder / f"{name}.log").open("wb") as log:
            return Program(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def out(self, name: str) -> Path:
        return self.folder / "out" / name

    def succeeded(self, name: str, process: subprocess.Popen[bytes]) -> str:
        """See that a run succeeds; returns what its model says."""
        code = process.wait(300)
        assert code == 0, (self.folder / f"{name}.log").read_text()
        return (self.out(name) / "model.txt").read_text()


@pytest.fixture
def commands(hosts: made_hosts.Hosts, hidden: Path, tmp_path: Path) -> Commands:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "unique").write_text(str(tmp_path))
    return Commands(hosts, hidden, tmp_path)


def test_a_run_leaves_alone_what_another_trains_on_and_has_changed_on_a_host(
    commands: Commands, tmp_path: Path
) -> None:
    (tmp_path / "set" / "set.txt").write_text("some data")
    first = commands.start("first", WRITES_BESIDE.format(folder=str(tmp_path)))
    until((tmp_path / "trains").exists)
    second = commands.succeeded("second", commands.start("second", READS))
    third = commands.succeeded("third", commands.start("third", READS))
    (tmp_path / "go").touch()
    assert commands.succeeded("first", first) == "done"
    assert second == third
    assert second.endswith("-2")


def test_runs_that_begin_at_once_share_their_data(
    commands: Commands, hosts: made_hosts.Hosts, tmp_path: Path
) -> None:
    (tmp_path / "set" / "set.txt").write_text("some data")
    (tmp_path / "set" / "large").write_bytes(os.urandom(64 << 20))
    names = ("first", "second", "third")
    started = {name: commands.start(name, READS) for name in names}
    (data,) = {commands.succeeded(name, process) for name, process in started.items()}
    others = set(hosts["node-b"].run("ls", str(Path(data).parent)).split())
    assert not any(name != Path(data).name and name.startswith(Path(data).name) for name in others)


@pytest.mark.long
def test_what_python_writes_beside_its_sources_on_a_host_is_no_difference(
    commands: Commands, hosts: made_hosts.Hosts, tmp_path: Path
) -> None:
    (tmp_path / "set" / "set.txt").write_text("some data")
    (tmp_path / "set" / "reader.py").write_text("")
    data = commands.succeeded("first", commands.start("first", READS))
    hosts["node-b"].run("mkdir", f"{data}/__pycache__")
    hosts["node-b"].run("touch", f"{data}/__pycache__/reader.cpython-311.pyc")
    assert commands.succeeded("second", commands.start("second", READS)) == data
    assert hosts["node-b"].run("ls", f"{data}/__pycache__") == "reader.cpython-311.pyc\n"
