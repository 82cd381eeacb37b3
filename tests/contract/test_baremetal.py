"""Whole runs on the hosts of a hostfile, one of which shares no folder with this machine."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support import namespace_hosts as made_hosts
from support.rank_launches import LIGHT

from manycpu.pipeline import BareMetal, train
from manycpu.pipeline.adapters.commands import run as run_command
from manycpu.pipeline.spec.errors import BadInputError, ExportError

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
    with pytest.raises(ExportError, match=r"^run\.output: .* model\.pt"):
        train(given, both, run_id="x")
    (kept,) = (hidden / "runs").glob("train-*/attempts/1/output")
    assert hosts["node-b"].run("cat", f"{kept}/model.pt") == "shard 1"
    assert (kept / "model.pt").read_text() == "shard 0"
    hosts["node-b"].run("mv", f"{kept}/model.pt", f"{kept}/model-1.pt")
    assert train(given, both, run_id="x").state == "succeeded"
    assert (tmp_path / "out" / "model-1.pt").read_text() == "shard 1"


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
    done = run_command([sys.executable, "-m", "manycpu.pipeline.cli", "render", str(path)], timeout=60)
    rendered = yaml.safe_load(done.out)
    assert rendered["files"]["hostfile"] == "".join(f"{host.address}:1\n" for host in hosts.hosts)
    assert not any("not-in-argv" in word for word in rendered["argv"])
