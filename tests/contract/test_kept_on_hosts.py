"""What a training wrote on hosts of a hostfile stays there, and a clean-up that was killed is finished."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import namespace_hosts as made_hosts
from support.local_runs import on_this_machine
from support.rank_launches import LIGHT

from manycpu.pipeline import BareMetal, Local, train
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import ExportError, ForeignRunError, TrainingFailedError
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.prepare import prepare

pytestmark = pytest.mark.skipif(bool(made_hosts.reason()), reason=made_hosts.reason() or "")
FAULT_AT = Path(__file__).parents[1] / "scripts" / "fault_at.py"
Manycpu = Callable[..., tuple[int, str]]

SAVES = """
import os, sys
import torch.distributed as dist
dist.init_process_group()
folder, output, rank = (os.environ[name] for name in ("MANYCPU_CHECKPOINTS", "MANYCPU_OUTPUT", "RANK"))
if os.environ["MANYCPU_ATTEMPT"] == "1":
    open(f"{folder}/checkpoint-{rank}", "w").write("a day of work")
    open(f"{output}/half", "w").write("half a model")
    open("scratch", "w").write("of no use")
    dist.barrier()  # a rank that fails ends the others, also before they have written
    sys.exit(3)
assert open(f"{folder}/checkpoint-{rank}").read() == "a day of work"
open(f"{output}/model-{rank}.txt", "w").write("done")
"""
FORGETS = """
import os
open("model.txt", "w").write("a model that went to the working folder")
"""
EDITS = """
import os, sys
open(os.environ["MANYCPU_OUTPUT"] + "/model.txt", "w").write("the model")
open(sys.argv[1], "w").write(sys.argv[2])
"""
TRAINS = """
import os, sys
open(sys.argv[1], "a").write("trained\\n")
open(os.environ["MANYCPU_OUTPUT"] + "/model.txt", "w").write("the model")
"""


@pytest.fixture
def home(hidden: Path, tmp_path: Path) -> Path:
    """Name a folder of runs for each test, which node-b has of its own."""
    return hidden / tmp_path.name


@pytest.fixture
def one(hosts: made_hosts.Hosts, home: Path) -> BareMetal:
    """Name node-b alone."""
    return BareMetal(hostfile=str(hosts.hostfile("node-b")), ssh=hosts.ssh, directory=str(home))


def fields(tmp_path: Path, program: str, **more: Any) -> dict[str, Any]:
    return {"program": program, "output": str(tmp_path / "out"), "env": LIGHT, **more}


def failed(tmp_path: Path, program: str, target: BareMetal, **more: Any) -> Report:
    with pytest.raises(TrainingFailedError):
        train(fields(tmp_path, program, **more), target, run_id=str(tmp_path))
    return Report.model_validate_json((tmp_path / "out" / "report.json").read_text())


def sleeps_as_a_rank(hosts: made_hosts.Hosts, run: Path) -> None:
    """Start a process on node-b that looks like a rank of the run's first attempt."""
    line = f"MANYCPU_OUTPUT={run}/attempts/1/output setsid sleep 600 >/dev/null 2>&1 </dev/null &"
    hosts["node-b"].run("sh", "-c", line)
    assert ranks(hosts, run) == 1


def ranks(hosts: made_hosts.Hosts, run: Path) -> int:
    """Count the processes on node-b that look like ranks of the run's first attempt."""
    found = f"grep -lzxF MANYCPU_OUTPUT={run}/attempts/1/output /proc/[0-9]*/environ 2>/dev/null | wc -l"
    return int(hosts["node-b"].run("sh", "-c", found))


def there(hosts: made_hosts.Hosts, folder: Path, *tests: str) -> set[str]:
    """List what node-b has below a folder."""
    found = hosts["node-b"].run("find", str(folder), *(tests or ("-type", "f")), "-printf", "%P\n")
    return set(found.split())


def test_output_and_checkpoints_of_a_training_that_failed_stay_alone_and_the_same_run_continues(
    hosts: made_hosts.Hosts, home: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    hostfile = str(hosts.hostfile("node-a", "node-b"))
    both = BareMetal(hostfile=hostfile, ssh=hosts.ssh, directory=str(home))
    written = failed(tmp_path, script(SAVES), both, nnodes=2)
    (kept,) = (home / "runs").glob("train-*")
    assert there(hosts, kept) == {"owner", "checkpoints/checkpoint-1", "attempts/1/output/half"}
    here = {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()}
    assert here >= {"ledger.json", "checkpoints/checkpoint-0", "attempts/1/output/half"}
    assert not any("work" in path for path in here)
    assert f"{hosts['node-b'].address}:{kept}" in written.kept
    assert str(kept / "checkpoints") in written.kept
    assert f"manycpu clean {kept.name} --delete-model" in (written.advice or "")
    again = train(fields(tmp_path, script(SAVES), nnodes=2), both, run_id=str(tmp_path))
    assert (again.state, again.attempts, again.left_behind) == ("succeeded", 2, [])
    assert sorted(path.name for path in (tmp_path / "out").glob("model-*")) == ["model-0.txt", "model-1.txt"]
    assert list((home / "runs").iterdir()) == []
    assert there(hosts, home / "runs") == set()


def test_what_is_kept_on_a_host_goes_by_a_persons_word_or_when_its_time_is_over(
    one: BareMetal,
    hosts: made_hosts.Hosts,
    home: Path,
    script: Callable[..., str],
    tmp_path: Path,
    manycpu: Manycpu,
) -> None:
    failed(tmp_path, script(SAVES), one)
    (kept,) = on_this_machine(home)
    place = ("--yes", "--directory", str(home))
    assert "its output and checkpoints are kept" in manycpu("clean", kept.name, *place)[1]
    other = open_context(fields(tmp_path, script(), output=str(tmp_path / "b")), one, "b", base=tmp_path)
    prepare(other)
    assert there(hosts, home / "runs" / kept.name)
    kept.ledger.change_lease(until=time.time() - 1)
    assert prepare(other) == []
    assert there(hosts, home / "runs") == set()
    cleanup(other)
    failed(tmp_path, script(SAVES), one)
    assert manycpu("clean", kept.name, "--delete-model", *place)[0] == 0
    assert there(hosts, home / "runs", "-mindepth", "1") == set()
    assert list((home / "runs").iterdir()) == []


def test_a_model_that_a_program_wrote_beside_its_output_stays_on_its_host(
    one: BareMetal,
    hosts: made_hosts.Hosts,
    home: Path,
    script: Callable[..., str],
    tmp_path: Path,
    manycpu: Manycpu,
) -> None:
    with pytest.raises(ExportError, match=r"it wrote \S+model\.txt instead"):
        train(fields(tmp_path, script(FORGETS)), one, run_id="x")
    (kept,) = on_this_machine(home)
    assert "attempts/1/work/code/model.txt" in there(hosts, home / "runs" / kept.name)
    assert "a model that was not exported" in manycpu("clean", kept.name, "--directory", str(home))[1]
    assert manycpu("clean", kept.name, "--delete-model", "--yes", "--directory", str(home))[0] == 0


def test_without_an_output_what_a_program_wrote_beside_it_stays_on_its_host_for_a_time(
    one: BareMetal,
    hosts: made_hosts.Hosts,
    home: Path,
    script: Callable[..., str],
    tmp_path: Path,
    manycpu: Manycpu,
) -> None:
    report = train(fields(tmp_path, script(FORGETS), output=None), one, run_id="x")
    (kept,) = on_this_machine(home)
    assert "attempts/1/work/code/model.txt" in there(hosts, home / "runs" / kept.name)
    assert [name for name in report.kept if name.endswith("work/code/model.txt")]
    assert manycpu("clean", kept.name, "--delete-model", "--yes", "--directory", str(home))[0] == 0
    assert there(hosts, home / "runs", "-mindepth", "1") == set()


def test_a_run_is_not_wholly_removed_until_every_host_is_emptied(
    one: BareMetal,
    hosts: made_hosts.Hosts,
    home: Path,
    script: Callable[..., str],
    tmp_path: Path,
    manycpu: Manycpu,
) -> None:
    ssh, is_cut = tmp_path / "ssh", tmp_path / "is-cut"
    ssh.write_text(f'#!/bin/sh\n[ ! -e {is_cut} ] || exit 255\nexec ssh "$@"\n')
    ssh.chmod(0o755)
    cuttable = one.model_copy(update={"ssh": (str(ssh), *one.ssh[1:])})
    failed(tmp_path, script(SAVES), cuttable)
    (kept,) = on_this_machine(home)
    place = ("--yes", "--directory", str(home))
    is_cut.touch()
    code, printed = manycpu("clean", kept.name, "--delete-model", *place)
    assert (code, "cannot be reached by ssh" in printed) == (1, True)
    assert there(hosts, home / "runs" / kept.name)
    code, printed = manycpu("clean", *place)
    assert (code, f"run {kept.name}: the rest of it" in printed) == (1, True)
    is_cut.unlink()
    assert manycpu("clean", *place)[0] == 0
    assert list((home / "runs").iterdir()) == []
    assert there(hosts, home / "runs") == set()


def test_a_run_of_the_same_name_from_another_machine_is_neither_continued_nor_deleted(
    one: BareMetal, hosts: made_hosts.Hosts, home: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    failed(tmp_path, script(SAVES), one)
    (kept,) = on_this_machine(home)
    Path(kept.where).rename(tmp_path / "of another machine")
    files = there(hosts, home / "runs")
    sleeps_as_a_rank(hosts, Path(kept.where))
    with pytest.raises(ForeignRunError, match=r"has a folder .* of another run"):
        train(fields(tmp_path, script(SAVES)), one, run_id=str(tmp_path))
    assert there(hosts, home / "runs") == files
    assert ranks(hosts, Path(kept.where)) == 1
    assert list((home / "runs").iterdir()) == []


def test_ranks_that_outlived_the_machine_that_launched_them_are_ended(
    one: BareMetal,
    hosts: made_hosts.Hosts,
    home: Path,
    script: Callable[..., str],
    tmp_path: Path,
    manycpu: Manycpu,
) -> None:
    failed(tmp_path, script(SAVES), one)
    (kept,) = on_this_machine(home)
    sleeps_as_a_rank(hosts, Path(kept.where))
    assert train(fields(tmp_path, script(SAVES)), one, run_id=str(tmp_path)).attempts == 2
    assert ranks(hosts, Path(kept.where)) == 0
    failed(tmp_path, script(SAVES), one, output=str(tmp_path / "b"))
    (kept,) = on_this_machine(home)
    sleeps_as_a_rank(hosts, Path(kept.where))
    place = ("--yes", "--directory", str(home))
    assert manycpu("clean", kept.name, "--delete-model", *place)[0] == 0
    assert ranks(hosts, Path(kept.where)) == 0


def test_the_model_comes_from_the_hosts_that_trained_whatever_the_hostfile_says_now(
    hosts: made_hosts.Hosts, home: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    hostfile = hosts.hostfile("node-b")
    one = BareMetal(hostfile=str(hostfile), ssh=hosts.ssh, directory=str(home))
    given = fields(tmp_path, script(EDITS), args=[str(hostfile), hosts["node-a"].address])
    assert train(given, one, run_id="x").left_behind == []
    assert (tmp_path / "out" / "model.txt").read_text() == "the model"
    assert there(hosts, home / "runs") == set()


def test_a_run_that_goes_on_without_its_hosts_is_exported_from_here(
    one: BareMetal, hosts: made_hosts.Hosts, home: Path, script: Callable[..., str], tmp_path: Path
) -> None:
    failed(tmp_path, script(SAVES), one)
    again = Local(directory=str(home))
    text = TRAINS.replace("sys.argv[1]", repr(str(tmp_path / "history")))
    assert train(fields(tmp_path, script(text)), again, run_id=str(tmp_path)).left_behind == []
    assert (tmp_path / "out" / "model.txt").read_text() == "the model"
    assert there(hosts, home / "runs") == set()


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (r"subprocess.Popen .*rm -rf -- ", 1),
        # As test_killed.py, on this machine.
        pytest.param(r"os.rename \S*/train-\w+ \S*\.removed", 1, marks=pytest.mark.long),
        pytest.param(r"os.remove (ledger|lease)\.json", 1, marks=pytest.mark.long),
    ],
    ids=["deletes on the host", "renames the run", "deletes files"],
)
def test_killed_while_it_cleans_up_the_same_run_trains_no_second_time(
    one: BareMetal,
    hosts: made_hosts.Hosts,
    home: Path,
    script: Callable[..., str],
    tmp_path: Path,
    pattern: str,
    count: int,
) -> None:
    path, history = tmp_path / "run.yaml", tmp_path / "history"
    run = fields(tmp_path, script(TRAINS), args=[str(history)])
    target = one.model_dump(mode="json", exclude_none=True)
    path.write_text(yaml.safe_dump({"run": run, "target": target}))
    words = ["run", str(path), "--run-id", str(tmp_path)]
    killed = [sys.executable, str(FAULT_AT), "kill", pattern, str(count), *words]
    done = subprocess.run(killed, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    again = [sys.executable, "-m", "manycpu.pipeline.cli", *words]
    done = subprocess.run(again, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert history.read_text() == "trained\n"
    assert (tmp_path / "out" / "model.txt").read_text() == "the model"
    report = Report.model_validate_json((tmp_path / "out" / "report.json").read_text())
    assert (report.state, report.verbs["cleanup"].result) == ("succeeded", "done")
    assert list((home / "runs").iterdir()) == []
    assert there(hosts, home / "runs") == set()
