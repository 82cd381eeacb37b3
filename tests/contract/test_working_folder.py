"""The working folder of a program: a copy of its code of the attempt's own."""

import json
import logging
import re
from pathlib import Path

import pytest
from support import namespace_hosts as made_hosts
from support.rank_launches import LIGHT

from manycpu.pipeline import BareMetal, train
from manycpu.pipeline.spec.errors import ExportError, TrainingFailedError

light = pytest.mark.usefixtures("home", "light_torch", "no_process_left")
on_hosts = pytest.mark.skipif(bool(made_hosts.reason()), reason=made_hosts.reason() or "")

WRITES = """
import json, os, pathlib, sys
import torch, torch.distributed as dist
dist.init_process_group()
seen = {"cwd": os.getcwd(), "there": sorted(os.listdir()), "path": sys.path[:2], "argv": sys.argv[0]}
seen["settings"] = pathlib.Path(__file__).with_name("settings.txt").read_text() + open("settings.txt").read()
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == os.environ.get("WRITER", "0"):
    os.makedirs("../data", exist_ok=True)
    for name in ("../data/above.txt", "./beside.txt", os.path.join(os.path.dirname(__file__), "own.txt")):
        open(name, "a").write("written")
    open("settings.txt", "a").write("changed")
    open(os.environ["MANYCPU_OUTPUT"] + "/seen.json", "w").write(json.dumps(seen))
"""


def project(tmp_path: Path, text: str = WRITES) -> str:
    """Write a program with a file that it reads."""
    folder = tmp_path / "code"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    (folder / "settings.txt").write_text("as it was")
    return str(folder / "train.py")


def contents(folder: Path) -> dict[str, str]:
    """Read all files of a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def codes(home: Path) -> dict[str, str]:
    """Read what is kept of code, without what keeps it."""
    found = contents(home / "code")
    return {path.partition("/")[2]: text for path, text in found.items() if "/" in path}


@light
def test_what_a_program_writes_reaches_neither_the_kept_code_nor_the_next_run(
    tmp_path: Path, home: Path
) -> None:
    program = project(tmp_path)
    for name in ("first", "second"):
        train({"program": program, "output": str(tmp_path / name), "nproc_per_node": 2})
        seen = json.loads((tmp_path / name / "seen.json").read_text())
        assert seen["there"] == ["settings.txt", "train.py"]
        assert seen["settings"] == "as it was" * 2
        assert Path(seen["cwd"]).is_relative_to(home / "runs")
        assert codes(home) == {"train.py": WRITES, "settings.txt": "as it was"}
    assert list((home / "runs").iterdir()) == []


@light
def test_two_attempts_have_a_folder_each(tmp_path: Path, home: Path) -> None:
    fails = "import os\nopen('model.pt', 'x').write(os.environ['MANYCPU_ATTEMPT'])\nraise SystemExit(3)\n"
    given = {"program": project(tmp_path, fails), "output": str(tmp_path / "out"), "keep": "on_failure"}
    for _ in (1, 2):
        with pytest.raises(TrainingFailedError, match="exit code 3"):
            train({**given, "nproc_per_node": 1}, run_id="x")
    written = {path.read_text() for path in (home / "runs").rglob("model.pt")}
    assert written == {"1", "2"}


@light
def test_a_model_that_was_written_beside_the_program_is_kept_and_named(tmp_path: Path, home: Path) -> None:
    """The training may have taken days; only its last line was wrong."""
    program = project(tmp_path, "open('model.pt', 'w').write('the model')")
    with pytest.raises(
        ExportError, match=r"wrote nothing to its output; it wrote \S+/model\.pt instead"
    ) as caught:
        train({"program": program, "output": str(tmp_path / "out"), "nproc_per_node": 1}, run_id="x")
    (model,) = (home / "runs").rglob("model.pt")
    assert str(model) in str(caught.value)
    assert model.read_text() == "the model"


@light
def test_what_was_written_beside_the_program_is_told_though_there_is_a_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    train({"program": project(tmp_path), "output": str(tmp_path / "out"), "nproc_per_node": 1})
    assert re.search(
        r"wrote outside its output \S+/beside\.txt \(and 2 more\), which is not kept", caplog.text
    )


@on_hosts
def test_on_every_host_the_program_works_in_a_copy(
    hosts: made_hosts.Hosts, hidden: Path, tmp_path: Path
) -> None:
    hostfile = str(hosts.hostfile("node-a", "node-b"))
    both = BareMetal(hostfile=hostfile, ssh=hosts.ssh, directory=str(hidden))
    program = project(tmp_path)
    for name, writer in (("first", "0"), ("second", "1"), ("third", "0")):
        given = {"program": program, "output": str(tmp_path / name), "nnodes": 2}
        train({**given, "env": {**LIGHT, "WRITER": writer}}, both)
        seen = json.loads((tmp_path / name / "seen.json").read_text())
        assert (seen["there"], seen["settings"]) == (["settings.txt", "train.py"], "as it was" * 2)
        assert codes(hidden) == {"train.py": WRITES, "settings.txt": "as it was"}
        files = ["-type", "f", "!", "-name", "*.lock", "-printf", "%f %s\n"]
        there = hosts["node-b"].run("find", str(hidden / "code"), *files)
        assert sorted(there.split()) == sorted(f"settings.txt 9 train.py {len(WRITES)}".split())
    assert hosts["node-b"].run("find", str(hidden / "runs"), "-mindepth", "1") == ""
