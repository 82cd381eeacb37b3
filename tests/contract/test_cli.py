"""The command as it is typed: what it prints, and how it exits."""

import errno
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import yaml
from support.killable_programs import Program
from support.local_runs import on_this_machine
from support.waiting import processes_of, until

from manycpu.pipeline import train, transfer
from manycpu.pipeline.adapters import process
from manycpu.pipeline.adapters.lock import locked
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.ledger import VerbRecord
from manycpu.pipeline.ledger.file import FileLedger
from manycpu.pipeline.recipes.question_answering.demo import DATA as DEMO_DATA
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.cleanup import Remains, cleanup
from manycpu.pipeline.verbs.prepare import prepare

pytestmark = pytest.mark.usefixtures("home", "light_torch")
Script = Callable[..., str]
Type = Callable[..., tuple[int, str]]

WAITS = """
import time
print("waiting", flush=True)
time.sleep(600)
"""


def run_file(tmp_path: Path, **run: object) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"run": run}))
    return str(path)


BAD: list[tuple[dict[str, object], str]] = [
    ({"program": "nothing.py"}, "run.program: there is no script"),
    ({"program": "code"}, "code is a folder. Give the script in it that trains."),
    ({"program": "code/broken.py"}, "code/broken.py is no Python: invalid syntax in line 2. Mend it"),
    (
        {"program": "code/zeros.py"},
        "code/zeros.py is no Python: source code string cannot contain null bytes",
    ),
    ({"program": "-m nothing"}, "run.program: there is no module 'nothing'"),
    ({"data": "nothing"}, "run.data: there is nothing at"),
    ({"data": "empty"}, "run.data: "),
    ({"model": "nothing"}, "run.model: there is nothing at"),
    ({"nproc_per_node": 1000}, "run.nproc_per_node: 1000 processes were asked for, and this machine grants"),
    ({"nnodes": 2}, "run.nnodes: 2 nodes were asked for, and the target local is one machine"),
    ({"nproc": 2}, "run.nproc: there is no such field. Did you mean 'nproc_per_node'?"),
    ({"output": "code"}, "run.output: "),
    ({"output": "code/train.py"}, "run.output: "),
    (
        {"env_from": ["hub"]},
        "run.env_from: 'processes' cannot do this: secrets by name exist on Kubernetes only",
    ),
    ({"resources": {"memory": "1Gi"}}, "run.resources.memory: 'processes' cannot do this"),
    ({"resources": {"cpu": 4096}}, "run.resources.cpu: 4096 cores were asked for, and this machine grants"),
    ({"resume_from": "nothing"}, "run.resume_from: there is no folder"),
    (
        {"program": "image_classification", "data": "code"},
        "run.data: there is no image in",
    ),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[next(iter(fields)) for fields, _ in BAD])
@pytest.mark.parametrize("command", ["run", "preflight"])
def test_bad_input_is_named_with_its_field_and_nothing_starts(
    manycpu: Type,
    script: Script,
    tmp_path: Path,
    home: Path,
    command: str,
    fields: dict[str, object],
    message: str,
) -> None:
    script()
    (tmp_path / "empty").mkdir()
    (tmp_path / "code" / "broken.py").write_text("import os\ndef f(:\n")
    (tmp_path / "code" / "zeros.py").write_bytes(b"\0")
    given = {"program": "code/train.py", "output": "out", **fields}
    code, printed = manycpu(command, run_file(tmp_path, **given))
    assert code == 2
    assert message in printed
    assert not home.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        ("hf://rajpurkar/squad", "Write a data set as hf://datasets/rajpurkar/squad."),
        ("hf://datasets/rajpurkar/squad", ""),
    ],
)
def test_a_data_set_that_is_written_as_a_model_is_pointed_out(
    manycpu: Type, script: Script, tmp_path: Path, data: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    file = run_file(tmp_path, program=script(), output="out", nproc_per_node=1, data=data)
    code, printed = manycpu("preflight", file)
    findings = [line for line in printed.splitlines() if "run.data" in line and "cannot be read" not in line]
    # 2: the Hub is not asked here, which is a finding of its own.
    assert (code, bool(findings), fix in printed) == (2, bool(fix), True), printed


def test_help_shows_the_choices(manycpu: Type) -> None:
    code, printed = manycpu("run", "--help")
    assert code == 0
    for option in (
        "--backend ccl|gloo|mpi",
        "--target-launch processes|torchrun|mpirun|pytorchjob|mpijob",
        "--target-mpi VALUE",
    ):
        assert option in printed


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("code/train.py/out", "cannot be written: Not a directory"),
        ("/proc/x/out", "cannot be written: No such file or directory"),
        ("n" * 230, "cannot be written: File name too long"),
        ("http://127.0.0.1:1/x", "nothing can be written by http"),
        ("memory://models/qa", "what is written to memory ends with its process"),
        ("dir://qa::memory://models", "what is written to memory ends with its process"),
        ("dir::file:///x", "dir:: names no folder in file:///x"),
        ("dir://::file:///x", "dir:// names no folder in file:///x"),
        ("dir://qa::dir::file:///x", "dir:: names no folder in file:///x"),
        ("memory::file:///x", "what is written to memory ends with its process"),
        ("simplecache::s3://models/qa", "simplecache reads back a copy of its own"),
        ("filecache::dir://qa::file:///x", "filecache reads back a copy of its own"),
        ("zip://x::dir://qa::file:///x.zip", "nothing can be written by zip"),
        ("reference://x", "nothing can be written by reference"),
        (f"new/{'n' * 200}", ""),
    ],
)
def test_an_output_that_can_never_be_written_is_found_before_the_training(
    manycpu: Type, script: Script, tmp_path: Path, output: str, why: str
) -> None:
    file = run_file(tmp_path, program=script(), output=output, nproc_per_node=1)
    before = sorted(tmp_path.rglob("*"))
    code, printed = manycpu("preflight", file)
    assert (code, why in printed, "run.output" in printed) == (2 if why else 0, True, bool(why))
    assert sorted(tmp_path.rglob("*")) == before


def test_an_output_with_a_fifo_in_the_place_of_a_report_is_refused_and_not_waited_for(
    manycpu: Type, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "report.json")
    file = run_file(tmp_path, program=script(), output="out", nproc_per_node=1)
    code, printed = manycpu("preflight", file)
    assert (code, "is no regular file" in printed) == (2, True)


@pytest.mark.parametrize("url", ["memory://checkpoints", "s3://checkpoints/qa", "simplecache::s3://x"])
def test_checkpoints_are_written_to_a_folder(manycpu: Type, script: Script, tmp_path: Path, url: str) -> None:
    file = run_file(tmp_path, program=script(), output=None, checkpoints=url, nproc_per_node=1)
    code, printed = manycpu("preflight", file)
    assert (code, f"run.checkpoints: {url} is a URL" in printed) == (2, True)


def test_the_output_of_another_run_is_named_with_that_run(
    manycpu: Type, script: Script, tmp_path: Path
) -> None:
    writes = script("import os; open(os.environ['MANYCPU_OUTPUT'] + '/model.txt', 'w').write('the model')\n")
    file, out = run_file(tmp_path, program=writes, output="out", nproc_per_node=1), tmp_path / "out"
    code, printed = manycpu("run", file, "--run-id", "first")
    name = re.findall(r"run (train-\w+) ", printed)[0]
    assert code == 0
    code, printed = manycpu("run", file)
    assert code == 2
    assert f"{out} is not empty: another run, {name}, wrote its model and report there. " in printed
    assert "--run-id" in printed.split("there. ")[1]
    assert manycpu("run", file, "--run-id", "first")[0] == 0  # as it says
    (out / "report.json").write_text('{"loss": 0.5}')
    assert f"{out} is not empty: " in manycpu("run", file)[1]
    assert name not in manycpu("run", file)[1]


@pytest.mark.parametrize(
    ("directory", "why"),
    [
        ("/proc/x", "/proc/x cannot be written: No such file or directory. Set target.directory, or"),
        ("FOLDER/code/train.py/x", "cannot be written: Not a directory."),
        ("FOLDER/code/train.py", "cannot be written: Not a directory."),
        ("FOLDER/link", "cannot be written: No such file or directory."),
        ("FOLDER/new/folder", ""),
        ("FOLDER/code", ""),
    ],
)
def test_a_directory_that_cannot_be_written_is_named_with_the_reason(
    manycpu: Type, script: Script, tmp_path: Path, directory: str, why: str
) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "data.txt").write_text("data")
    file = run_file(tmp_path, program=script(), data="data.txt", output="out", nproc_per_node=1)
    before = sorted(tmp_path.rglob("*"))
    words = ["--target-directory", directory.replace("FOLDER", str(tmp_path))]
    code, printed = manycpu("preflight", file, *words)
    assert (code, why in printed, "target.directory" in printed) == (2 if why else 0, True, bool(why))
    assert "MiB" not in printed
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("command", ["preflight", "run"])
def test_a_directory_whose_disk_has_no_file_locks_is_refused(
    manycpu: Type, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, number: int
) -> None:
    def flock(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    file = run_file(tmp_path, program=script(), output="out", nproc_per_node=1)
    before = sorted(tmp_path.rglob("*"))
    code, printed = manycpu(command, file)
    assert (code, "target.directory: the disk of " in printed) == (2, True)
    assert f"has no file locks: {os.strerror(number)}. Set target.directory, or" in printed
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="oneCCL is not for it")
def test_ccl_without_its_extra_is_refused(
    manycpu: Type, script: Script, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script()
    monkeypatch.setattr("importlib.metadata.distributions", lambda **_: iter(()))
    code, printed = manycpu("run", run_file(tmp_path, program="code/train.py", output="out", backend="ccl"))
    assert code == 2
    assert "run.backend: 'ccl' was asked for, and this environment has no oneCCL" in printed
    assert "pip install 'manycpu[ccl]'" in printed
    assert not home.exists()


@pytest.mark.parametrize("output", ["data", "data/models"])
def test_an_output_in_the_data_is_refused(manycpu: Type, script: Script, tmp_path: Path, output: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("x")
    code, printed = manycpu(
        "preflight", run_file(tmp_path, program=script(), data="data", output=output, args=["{data}"])
    )
    assert code == 2
    assert "the next run would stage its files" in " ".join(printed.split())


def test_a_home_of_no_user_is_bad_input(manycpu: Type, script: Script, tmp_path: Path) -> None:
    code, printed = manycpu("preflight", run_file(tmp_path, program=script(), output="~no-such-user/out"))
    assert code == 2
    assert "~no-such-user/out: " in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "run.yaml cannot be read: No such file"),
        ("run: [", "run.yaml is not YAML"),
        ("run: {job_name: 2026-02-30}", "run.yaml is not YAML"),
        ("[" * 2000, "run.yaml is not YAML"),
        ("run: [", "^\nMend it at the line above.\n"),
        ("- a", "run.yaml holds no fields"),
        ("runs: {}", "runs: "),
        ("run: 3", "'run' is 3, not fields"),
        ("run: {}\ntarget: local", "as in `target: {kind: local}`"),
        ("program: train.py", "Indent `program` below `run:`"),
    ],
)
def test_a_run_file_that_is_none_is_refused(
    manycpu: Type, tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    code, printed = manycpu("run", str(path))
    assert code == 2
    assert message in printed


def test_processes_beyond_the_cores_can_be_asked_for(manycpu: Type, script: Script, tmp_path: Path) -> None:
    given = {"program": script(), "output": "out", "nproc_per_node": 64, "oversubscribe": True}
    code, printed = manycpu("preflight", run_file(tmp_path, **given))
    assert (code, printed) == (0, "ready: nothing stands in the way of this run\n")


@pytest.mark.parametrize(
    ("typed_name", "meant"), [("list", "status"), ("train", "run"), ("cancle", "cancel")]
)
def test_a_command_that_is_called_otherwise_is_named(manycpu: Type, typed_name: str, meant: str) -> None:
    code, printed = manycpu(typed_name)
    assert (code, f"Did you mean '{meant}'?" in printed) == (2, True), printed
    assert "Did you mean" not in manycpu("xyzzy")[1]


@pytest.mark.parametrize("words", [("status",), ("logs",), ("cancel",), ("clean", "--delete-model", "--yes")])
def test_an_empty_name_is_nobody_s(manycpu: Type, staging: RunContext, words: tuple[str, ...]) -> None:
    code, printed = manycpu(words[0], "", *words[1:])
    assert (code, printed.startswith("manycpu: NAME is empty.")) == (2, True), printed
    assert staging.ledger.exists()


def test_where_nothing_runs_it_is_said_where_that_was_looked_for(manycpu: Type, home: Path) -> None:
    code, printed = manycpu("status")
    assert (code, printed.startswith(f"no run in {home}; ")) == (0, True), printed


def test_the_recipe_asks_for_a_model_before_anything_starts(manycpu: Type, tmp_path: Path) -> None:
    code, printed = manycpu("preflight", run_file(tmp_path, program="question_answering", output="out"))
    assert (code, "run.model: there is no base checkpoint" in printed) == (2, True), printed


@pytest.mark.parametrize(
    "fields",
    [{"args": "--model_name_or_path x"}, {"args": "options.json"}, {"env": {"MANYCPU_MODEL": "x"}}],
    ids=str,
)
def test_a_model_that_is_named_elsewhere_is_not_asked_for(
    manycpu: Type, tmp_path: Path, fields: dict[str, object]
) -> None:
    squad = str(DEMO_DATA)
    file = run_file(tmp_path, program="question_answering", output="out", data=squad, **fields)
    assert manycpu("preflight", file) == (0, "ready: nothing stands in the way of this run\n")


def test_options_win_over_the_file_and_stand_alone(manycpu: Type, script: Script, tmp_path: Path) -> None:
    words = ["--program", script(), "--output", f"{tmp_path}/out", "--args", "--a '1 2'", "--env", "{A: 1}"]
    code, printed = manycpu("render", *words, "--nproc-per-node", "2", "--resources", "{cpu: 1}")
    rendered = yaml.safe_load(printed)
    assert code == 0
    assert "--nproc-per-node=2" in rendered["argv"]
    assert rendered["argv"][-3:] == ["train.py", "--a", "1 2"]
    assert (rendered["env"]["A"], rendered["env"]["MANYCPU_CPUS"]) == ("1", "1.0")


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Write a config of Accelerate for two processes."""
    path = tmp_path / "default_config.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\nmachine_rank: 0\nmixed_precision: bf16\n")
    return str(path)


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["SCRIPT", "--output", "its own", "-m"], ["train.py", "--output", "its own", "-m"]),
        (["-m", "code.train", "-x"], ["-m", "code.train", "-x"]),
        (["--program", "SCRIPT", "--args", "-x"], ["train.py", "-x"]),
        (
            ["--program", "SCRIPT", "--args", "-x", "--args", '{"a": "b c"}'],
            ["train.py", "-x", '{"a": "b c"}'],
        ),
    ],
)
def test_a_config_of_accelerate_is_a_run_of_the_script_that_follows_it(
    manycpu: Type,
    script: Script,
    tmp_path: Path,
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    program: list[str],
) -> None:
    """What follows the script is the script's own; paths start here, not at the config."""
    monkeypatch.chdir(Path(script()).parents[1])
    (tmp_path / "elsewhere").mkdir()
    shutil.move(config, tmp_path / "elsewhere")
    given = ["--accelerate-config", f"elsewhere/{Path(config).name}", "--env", "A=1"]
    named = [word.replace("SCRIPT", "code/train.py") for word in words]
    code, printed = manycpu("render", *given, *named)
    rendered = yaml.safe_load(printed)
    assert code == 0
    assert rendered["argv"][-len(program) :] == program
    assert "--nproc-per-node=2" in rendered["argv"]
    env = rendered["env"]
    assert (env["A"], env["ACCELERATE_MIXED_PRECISION"], env["MANYCPU_DTYPE"]) == ("1", "bf16", "bf16")
    code, printed = manycpu("preflight", *given, *named)
    assert (code, printed.endswith("ready: nothing stands in the way of this run\n")) == (0, True), printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["CONFIG"], "Give a config of Accelerate as --accelerate-config CONFIG, before the script"),
        (
            ["train.py", "--accelerate-config", "CONFIG"],
            "A script's own words come after --accelerate-config",
        ),
        (["train.py", "-m"], "'-m' cannot be used. A script's own words come after --accelerate-config"),
        (["--accelerate-config", "train.py", "CONFIG"], "Write --accelerate-config FILE train.py"),
        (["--accelerate-config", "none.yaml", "train.py"], "none.yaml cannot be read: No such file"),
        (["--accelerate-config", "CONFIG"], "run.program: this field is needed"),
        (["--accelerate-config", "CONFIG", "--program", "x", "train.py"], "run.program: it is given twice"),
        (["--accelerate-config", "CONFIG", "--args", "-x", "train.py", "-y"], "Leave out --args"),
    ],
)
def test_a_config_of_accelerate_that_is_given_otherwise_is_pointed_out(
    manycpu: Type,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('trains')")
    code, printed = manycpu("preflight", *(word.replace("CONFIG", config) for word in words))
    assert (code, message.replace("config CONFIG,", f"config {config},") in printed) == (2, True), printed


def test_the_plan_says_why(manycpu: Type) -> None:
    code, printed = manycpu("plan", "--nproc-per-node", "2")
    assert code == 0
    assert "OMP_NUM_THREADS" in printed
    assert "floor(" in printed


def test_a_terminal_without_a_size_shows_the_plan(manycpu: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert "processes" in manycpu("plan")[1]


def test_the_plan_of_a_run_on_another_node(
    manycpu: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own fields count, an option wins over them, and what is wrong is said below the table."""
    monkeypatch.setenv("COLUMNS", "200")
    file = run_file(tmp_path, program="train.py", output="out", dtype="bf16", resources={"cpu": 300})
    node = ["--node", "sockets=2,cores=56,threads=2,memory=512Gi,bf16=no"]
    code, printed = manycpu("plan", file, *node)
    assert code == 0
    assert "rank 0: 0-55,112-167; rank 1: 56-111,168-223" in printed
    assert "warning: run.resources.cpu asks for 300 cores; this node grants 224" in printed
    assert "warning: bf16 without hardware for it" in printed
    assert "floor(112 cores / 4 processes)" in manycpu("plan", file, *node, "--nproc-per-node", "4")[1]
    said = "--node: cores=some cannot be read: 'some' is no count. cores is: physical cores of each socket.\n"
    assert manycpu("plan", "--node", "cores=some") == (2, f"manycpu: {said}")


@pytest.mark.parametrize(
    "words",
    [
        ("--parameters", "9" * 400 + "B"),
        ("--node", "cores=1,cpus=0-99999999999"),
        ("--node", "sockets=9999,cores=9999,threads=9999"),
    ],
)
def test_a_plan_of_what_no_machine_has_is_refused(manycpu: Type, words: tuple[str, ...]) -> None:
    code, printed = manycpu("plan", *words)
    assert (code, printed.startswith(f"manycpu: {words[0]}: ")) == (2, True), printed


def test_the_plan_of_a_recipe_shows_the_memory_of_its_ranks(
    manycpu: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 30_522}
    config = {"model_type": "bert", "intermediate_size": 4096, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fields = {"program": "question_answering", "output": "out", "model": ".", "nproc_per_node": 2}
    file = run_file(tmp_path, **fields)
    code, printed = manycpu("plan", file, "--node", "cores=8,memory=8Gi")
    assert code == 0
    assert "334.1M in fp32" in printed
    assert "no, on no number of nodes" in printed
    elsewhere = run_file(tmp_path, program="train.py", output="out")
    printed = manycpu("plan", elsewhere, "--node", "cores=8,memory=64Gi", "--parameters", "7b")[1]
    assert "7,000.0M in fp32" in printed
    assert "not known, not counted" in printed
    assert "a replica each" not in manycpu("plan", elsewhere, "--node", "cores=8")[1]
    said = "manycpu: --parameters: 'many' is no number of parameters. Write it as 350M or 7B.\n"
    assert manycpu("plan", "--parameters", "many") == (2, said)


def test_a_model_that_this_machine_cannot_hold_is_refused(manycpu: Type, tmp_path: Path) -> None:
    sizes = {"hidden_size": 65_536, "num_hidden_layers": 96, "num_attention_heads": 64, "vocab_size": 30_522}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "intermediate_size": 262_144, **sizes})
    )
    fields = {"program": "question_answering", "output": "out", "model": "."}
    code, printed = manycpu("preflight", run_file(tmp_path, **fields))
    assert code == 2
    assert re.search(
        r"error: .*the training takes about \d+.* TiB of a node .*, and this machine has ", printed
    )


def test_processes_that_a_program_starts_are_planned_for_and_judged_by_its_source(
    manycpu: Type, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    source = "import torch.multiprocessing as mp\ndef main():\n    mp.spawn(print, nprocs=4)\n\nmain()\n"
    fields = {"program": script(source), "output": "out", "nproc_per_node": 1}
    unguarded = "warning: run.program: train.py:5: processes are started at module level (main(), in line 3)"
    uncounted = "train.py:3: processes are started, and run.subprocesses is 1: each takes the 8 threads"

    code, printed = manycpu("plan", run_file(tmp_path, **fields), "--node", "cores=8")
    assert (code, unguarded in printed, uncounted in printed) == (0, True, True)
    planned = ["plan", run_file(tmp_path, **fields), "--node", "cores=8", "--subprocesses", "4"]
    printed = manycpu(*planned)[1]
    assert "floor(8 cores / (1 process x 4 subprocesses))" in printed
    assert (unguarded in printed, uncounted in printed) == (True, False)
    code, printed = manycpu("preflight", run_file(tmp_path, **fields, subprocesses=4))
    assert (code, unguarded in printed) == (0, True)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"nproc_per_node": 1}, 0),
        ({"nproc_per_node": 2}, 2),
        ({"nproc_per_node": 2, "args": ["--mode=averaged"]}, 0),
    ],
)
def test_one_model_in_memory_for_several_ranks_is_refused(
    manycpu: Type, tmp_path: Path, fields: dict[str, object], code: int
) -> None:
    fields = {"program": "hogwild", "output": "out", "oversubscribe": True, **fields}
    found, printed = manycpu("preflight", run_file(tmp_path, **fields))
    assert (found, "--mode shared has one model in one rank's memory" in printed) == (code, bool(code))


def test_an_unknown_command_or_option_is_an_error_of_the_users(manycpu: Type) -> None:
    assert manycpu("fly")[0] == 2
    code, printed = manycpu("run", "--nprocs", "2")
    assert code == 2
    assert "No such option" in printed


def test_a_command_that_is_interrupted_says_so(manycpu: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("manycpu.pipeline.cli.report_command.newest_report", interrupt)
    code, printed = manycpu("report")
    assert (code, printed.strip()) == (130, "manycpu: aborted")


def test_ctrl_c_while_the_command_is_imported_is_no_traceback() -> None:
    interrupted = """
import runpy, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "manycpu.pipeline.verbs.wait":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
runpy.run_module("manycpu.pipeline.cli", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", interrupted], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "manycpu: aborted\n")


def test_a_run_that_is_not_there_is_named_with_those_that_are(manycpu: Type) -> None:
    code, printed = manycpu("logs", "nothing")
    assert code == 2
    assert "there is no run 'nothing'" in printed
    assert "No run is there. A run that has ended leaves" in printed


def typed(*words: str) -> Program[str]:
    """Type a command in a terminal of its own."""
    argv = [sys.executable, "-m", "manycpu.pipeline.cli", *words]
    return Program(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


@pytest.fixture
def waiting(script: Script, tmp_path: Path) -> Program[str]:
    """Start a run that trains until it is ended."""
    return typed("run", run_file(tmp_path, program=script(WAITS), output="out"), "--run-id", "x")


def read_until(process: Program[str], text: str) -> str:
    assert process.stdout is not None
    printed = ""
    while text not in printed:
        line = process.stdout.readline()
        assert line, printed
        printed += line
    return printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("no_process_left")
def test_ctrl_c_leaves_no_process_behind(
    waiting: Program[str], tmp_path: Path, home: Path, number: int
) -> None:
    read_until(waiting, "waiting")
    os.kill(waiting.pid, number)
    printed, _ = waiting.communicate(timeout=300)
    assert waiting.returncode == 130
    assert "interrupted" in printed
    assert list((home / "runs").iterdir()) == []
    assert "cancelled" in (tmp_path / "out" / "report.json").read_text()


def test_ctrl_c_again_and_again_says_what_stays_and_how_it_is_removed(
    waiting: Program[str], manycpu: Type, home: Path
) -> None:
    """The ledger's lock is held: cleaning up cannot end before the last of them."""
    read_until(waiting, "waiting")
    (run,) = (home / "runs").glob("train-*")
    with locked(run.with_name(f".{run.name}.lock")):
        waiting.send_signal(signal.SIGINT)
        read_until(waiting, "interrupted: ending the training, and cleaning up")
        waiting.send_signal(signal.SIGINT)
        read_until(waiting, "interrupted again: once more leaves everything as it is")
        waiting.send_signal(signal.SIGINT)
        printed, _ = waiting.communicate(timeout=300)
    assert waiting.returncode == 130
    last = printed.strip().splitlines()[-1]
    assert f"its training may still run, and all it has in {run} stays" in last
    assert f"`manycpu cancel {run.name}` ends it" in last
    assert f"`manycpu clean {run.name} --delete-model` removes it" in last
    assert manycpu("cancel", run.name) == (0, f"{run.name}: ended\n")
    assert manycpu("clean", run.name, "--delete-model", "--yes")[0] == 0
    assert not run.exists()


@pytest.mark.usefixtures("light_torch", "no_process_left")
def test_clean_leaves_what_a_program_wrote_without_an_output_for_its_time(
    manycpu: Type, script: Script, home: Path
) -> None:
    program = script("open('model.pt', 'w').write('x')")
    train({"program": program, "output": None, "nproc_per_node": 1}, run_id="x")
    (run,) = (home / "runs").glob("train-*")
    assert "is left alone: what its program wrote is kept" in manycpu("clean", run.name, "--yes")[1]
    assert run.exists()
    assert manycpu("clean", run.name, "--delete-model", "--yes")[0] == 0
    assert not run.exists()


@pytest.mark.usefixtures("no_process_left")
def test_a_run_is_cancelled_beside_its_command_which_cleans_up(
    waiting: Program[str], manycpu: Type, home: Path
) -> None:
    printed = read_until(waiting, "waiting")
    (ledger,) = (home / "runs").glob("train-*")
    assert manycpu("cancel", ledger.name) == (0, f"{ledger.name}: ended\n")
    printed, _ = waiting.communicate(timeout=300)
    assert (waiting.returncode, "ended by manycpu cancel" in printed) == (1, True)
    assert list((home / "runs").iterdir()) == []


@pytest.mark.usefixtures("no_process_left")
def test_a_killed_command_leaves_its_training_to_be_found_again(
    waiting: Program[str], manycpu: Type, tmp_path: Path, home: Path
) -> None:
    read_until(waiting, "waiting")
    waiting.kill()
    waiting.communicate()
    (ledger,) = (home / "runs").glob("train-*")
    assert list(processes_of(tmp_path)) != []
    assert "running" in manycpu("status")[1]
    assert re.search(r"\[rank 0 \S+\] waiting", manycpu("logs", "train")[1])
    assert "nothing to remove" in manycpu("clean", "--yes")[1]
    again = typed("run", str(tmp_path / "run.yaml"), "--run-id", "x")
    read_until(again, "waiting")
    again.kill()
    again.communicate()
    assert manycpu("cancel", ledger.name) == (0, f"{ledger.name}: ended\n")
    assert manycpu("cancel", ledger.name) == (0, f"{ledger.name}: nothing was running\n")
    assert "cancelled" in manycpu("status", ledger.name)[1]
    assert not (ledger / "attempts" / "2").exists()
    code, printed = manycpu("clean", "--yes", "--data")
    assert code == 0
    assert str(ledger) in printed
    assert not ledger.exists()
    until(lambda: not list(processes_of(tmp_path)))


@pytest.fixture
def staging(script: Script, tmp_path: Path) -> RunContext:
    """Begin a run, of which somebody is staging the data."""
    ctx = open_context({"program": script(), "output": "out"}, None, "begun", base=tmp_path)
    prepare(ctx)
    return ctx


def another(ctx: RunContext, key: str, name: str) -> RunContext:
    """Make a run like one, with an output of its own."""
    return replace(ctx, key=key, name=name, run=ctx.run.model_copy(update={"output": f"{ctx.base}/{name}"}))


def test_clean_leaves_alone_what_somebody_works_on_whatever_its_step(
    manycpu: Type, staging: RunContext
) -> None:
    with staging.ledger.timed("stage"):
        for name in ([], [staging.name]):
            code, printed = manycpu("clean", *name, "--yes")
            assert code == 0
            assert f"run {staging.name} is left alone: a process works on it" in printed
            assert "nothing to remove" in printed
    assert "left alone" in manycpu("clean", "--yes")[1]  # its next step is to come
    assert staging.ledger.exists()
    assert manycpu("cancel", staging.name)[0] == 0
    assert "left alone" not in manycpu("clean", "--yes")[1]
    assert not staging.ledger.exists()


def test_clean_leaves_alone_what_is_staged_while_a_run_may_use_it(
    manycpu: Type, staging: RunContext, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, other = home / "data" / "0123456789abcdef", home / "runs" / "other"
    staged.mkdir(parents=True)
    (home / "data" / ".0123456789abcdef.lock").touch()
    old = another(staging, "0" * 10, "old-0000000000")
    for words in ([old.name], []):  # a run that is named, or all
        prepare(old)
        old.ledger.keep(None)
        assert f"left alone: {staging.name} may use them" in manycpu("clean", *words, "--data", "--yes")[1]
        assert (staged.exists(), old.ledger.exists()) == (True, False)
    cleanup(staging)
    other.mkdir()
    (other / "ledger.json").write_text('{"schema": 99}')
    assert "left alone: other may use them" in manycpu("clean", "--data", "--yes")[1]
    shutil.rmtree(other)
    monkeypatch.setattr("click.confirm", lambda *_: prepare(staging) is not None)  # a run begins
    assert f"left alone: {staging.name} may use them" in manycpu("clean", "--data")[1]
    assert staged.exists()
    cleanup(staging)
    assert manycpu("clean", "--data", "--yes")[0] == 0
    assert not staged.exists()


def test_clean_removes_copies_and_no_folder_of_another_program(
    manycpu: Type, script: Script, tmp_path: Path, home: Path
) -> None:
    digest, data = "0123456789abcdef", home / "data"
    others = {data / "squad", home / "model" / "bert", home / "code" / "lib", home / "functions" / "mine"}
    others |= {data / "fedcba9876543210", data / "squad.partial", home / "runs" / "mine"}
    broken = [data / name for name in (f"{digest}.{digest}.0a1b2c3d.partial", f"{digest}.partial")]
    (tmp_path / "set").mkdir()
    for file in (tmp_path / "set", *others, *broken):
        file.mkdir(parents=True, exist_ok=True)
        (file / "a.txt").write_text("mine")
    (data / f".{digest}.lock").touch()
    fields = {"program": script(), "data": str(tmp_path / "set"), "output": str(tmp_path / "out")}
    train({**fields, "nproc_per_node": 1})
    copies = [path for path in (*data.iterdir(), *(home / "code").iterdir()) if path.is_dir()]
    staged = set(copies) - others
    assert len(staged) == len(broken) + 2
    # As on a host: a run of another machine has no ledger here.
    (used,) = (path for path in staged if path.parent == home / "code")
    use = home / "runs" / "train-0123456789" / "uses" / "code" / used.name
    use.mkdir(parents=True)
    for removed in (staged - {used}, {used}):
        code, printed = manycpu("clean", "--data", "--yes")
        assert code == 0
        assert {Path(line) for line in printed.split() if line.startswith(str(home))} == removed
        assert used.exists() == (used not in removed)
        shutil.rmtree(use.parents[2], ignore_errors=True)
    assert [path for path in staged if path.exists()] == []
    assert [path for path in others if not (path / "a.txt").exists()] == []
    assert manycpu("clean", "--data", "--yes") == (0, "nothing to remove\n")


def test_clean_leaves_alone_what_a_run_that_begins_has_staged_while_clean_waited_for_its_lock(
    staging: RunContext, home: Path
) -> None:
    cleanup(staging)
    staged, lock = home / "data" / "0123456789abcdef", home / "data" / ".0123456789abcdef.lock"
    staged.mkdir(parents=True)
    with locked(lock):
        cleaning = typed("clean", "--data", "--yes")
        until(lambda: str(lock) in [file.path for file in psutil.Process(cleaning.pid).open_files()])
        prepare(staging)
    printed, _ = cleaning.communicate(timeout=300)
    assert (cleaning.returncode, f"left alone: {staging.name} may use them" in printed) == (0, True)
    assert staged.exists()


def test_a_run_that_is_cancelled_while_it_stages_is_not_launched(
    manycpu: Type, script: Script, tmp_path: Path, home: Path
) -> None:
    source, written = Path(script()).with_name("data"), tmp_path / "out" / "report.json"
    source.mkdir()
    (source / "x").write_text("x")
    file = run_file(tmp_path, program=script(), data=str(source), output="out")
    digest = transfer.identity(Location.of(str(source), "run.data"))[: transfer.DIGITS]
    with locked(home / "data" / f".{digest}.lock"):
        running = typed("run", file, "--run-id", "x")
        until(lambda: [run for run in on_this_machine(home) if run.ledger.lease().holder])
        (ledger,) = (home / "runs").glob("train-*")
        code, printed = manycpu("cancel", ledger.name)
        assert (code, "nothing more of it will be launched" in printed) == (0, True)
        assert "left alone" in manycpu("clean", "--yes")[1]
    printed, _ = running.communicate(timeout=300)
    assert (running.returncode, "ended by manycpu cancel, before" in printed) == (1, True)
    assert "ended by manycpu cancel" in written.read_text()
    assert json.loads(written.read_text())["state"] == "cancelled"
    assert list((home / "runs").iterdir()) == []


def dead(holder: ProcessHandle) -> ProcessHandle:
    """Describe a process like the holder that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return holder.model_copy(update={"pid": ended.pid})


def test_clean_removes_what_a_killed_command_left(manycpu: Type, staging: RunContext) -> None:
    holder = process.handle_of_this_process(Path(), staging.name, 0)
    staging.ledger.change_lease(holder=holder)
    assert "left alone" in manycpu("clean", "--yes")[1]
    staging.ledger.change_lease(holder=dead(holder))
    assert "left alone" not in manycpu("clean", "--yes")[1]
    assert not staging.ledger.exists()


def test_a_run_is_not_resumed_while_clean_removes_it(
    manycpu: Type, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run_file(tmp_path, program=script("raise SystemExit(3)"), output="out", keep="always")
    assert manycpu("run", file, "--run-id", "x")[0] == 1
    (ctx,) = on_this_machine(tmp_path / "home")

    def resume_and_clean_up(found: RunContext, **options: Any) -> Report | None:
        printed, _ = typed("run", file, "--run-id", "x").communicate(timeout=300)
        assert f"process {os.getpid()} of this machine works on run {ctx.name}" in printed
        return cleanup(found, **options)

    monkeypatch.setattr("manycpu.pipeline.cli.run_commands.cleanup", resume_and_clean_up)
    assert manycpu("clean", ctx.name, "--delete-model", "--yes")[0] == 0
    assert not ctx.ledger.exists()


def test_clean_leaves_alone_a_run_that_is_resumed_after_it_looked(
    manycpu: Type, staging: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging.ledger.keep(None)

    looked = list[RunContext]()

    def resume(ctx: RunContext) -> Remains:
        looked.append(ctx)
        if len(looked) == 2:  # the first time, it only lists the run
            prepare(staging)
        return Remains.NOTHING

    monkeypatch.setattr("manycpu.pipeline.cli.run_commands.remains", resume)
    code, printed = manycpu("clean", staging.name, "--yes")
    assert (code, "another process has taken up the run" in printed) == (1, True), printed
    assert staging.ledger.lease().held(staging.ledger.now())


def test_a_cancel_leaves_the_lease_of_a_process_that_resumes_the_run_meanwhile(
    manycpu: Type, staging: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_clock, holder = FileLedger.now, process.handle_of_this_process(Path(), staging.name, 0)
    staging.ledger.change_lease(holder=dead(holder))

    def resume(ledger: FileLedger) -> float:  # at the moment at which the command reads the clock of leases
        with monkeypatch.context() as without:
            without.setattr(FileLedger, "now", read_clock)
            ledger.change_lease(holder=holder)
        return read_clock(ledger)

    monkeypatch.setattr("manycpu.pipeline.cli.run_commands.cancel_or_prevent", lambda *_, **__: "ended")
    monkeypatch.setattr(FileLedger, "now", resume)
    assert manycpu("cancel", staging.name) == (0, f"{staging.name}: ended\n")
    assert not staging.ledger.lease().ended


def test_clean_removes_a_run_that_a_notebook_stopped_following_after_an_error(
    manycpu: Type, script: Script, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notebook's process lives on; it is this one."""
    read = process.LogFollower.read

    def fail(follower: process.LogFollower, *limit: int) -> list[str]:
        if "waiting" in "".join(lines := read(follower, *limit)):
            raise OSError(errno.ESTALE, "Stale file handle")
        return lines

    run = {"program": script(WAITS), "output": str(tmp_path / "out"), "nproc_per_node": 1, "keep": "never"}
    with monkeypatch.context() as patched:
        patched.setattr(process.LogFollower, "read", fail)
        with pytest.raises(OSError, match="Stale"):
            train(run)
    (ctx,) = on_this_machine(home)
    assert "left alone" in manycpu("clean", "--yes")[1]  # it trains
    assert manycpu("cancel", ctx.name) == (0, f"{ctx.name}: ended\n")
    assert "left alone" not in manycpu("clean", "--yes")[1]
    assert not ctx.ledger.exists()


def test_clean_deletes_a_model_that_was_not_exported_by_a_word_for_its_run_alone(
    manycpu: Type, staging: RunContext
) -> None:
    with staging.ledger.update() as entry:
        entry.attempt, entry.verbs["wait"] = 1, VerbRecord(seconds=1, result="done")
    staging.ledger.keep(0)
    for name in ([], [staging.name]):
        code, printed = manycpu("clean", *name, "--yes")
        assert code == 0
        assert f"has a model that was not exported; `manycpu clean {staging.name} --delete-model`" in printed
    assert manycpu("clean", "--yes", "--delete-model")[0] == 2
    assert staging.ledger.exists()
    assert manycpu("clean", staging.name, "--yes", "--delete-model")[0] == 0
    assert not staging.ledger.exists()


def test_a_run_that_cannot_be_cleaned_up_does_not_keep_clean_from_the_others(
    manycpu: Type, staging: RunContext
) -> None:
    other = another(staging, "f" * 10, "other-ffffffffff")
    prepare(other)
    for ctx in (staging, other):
        ctx.ledger.change_lease(until=1.0)
    Path(f"{staging.base}/out").write_text("since prepare")  # where its report would be
    code, printed = manycpu("clean", "--yes")
    assert code == 1
    assert f"the run left behind: run {staging.name}: run.output: report.json cannot be written" in printed
    assert not other.ledger.exists()


@pytest.mark.parametrize("words", [("cancel",), ("clean", "--yes"), ("clean", "--delete-model", "--yes")])
def test_what_ends_or_deletes_a_run_takes_its_whole_name(
    manycpu: Type, staging: RunContext, words: tuple[str, ...]
) -> None:
    with staging.ledger.update() as entry:
        entry.attempt, entry.verbs["wait"] = 1, VerbRecord(seconds=1, result="done")
    staging.ledger.keep(0)
    for part in ("train", staging.name[:-1]):
        code, printed = manycpu(words[0], part, *words[1:])
        assert (code, f"Give the whole name: {staging.name}" in printed) == (2, True), printed
        assert f"there is no run {part!r}" in printed
    assert staging.ledger.exists()
    assert "done" not in manycpu("status", "train")[1]  # to look at one, its beginning suffices
    assert manycpu(words[0], staging.name, *words[1:])[0] == 0


@pytest.mark.parametrize("columns", ["80", "60"])
def test_a_narrow_terminal_shows_whole_names(
    manycpu: Type, staging: RunContext, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    name = "the-longest-name-of-any-run-1-1111111111"
    long = another(staging, "1" * 10, name)
    prepare(long)
    with long.ledger.update() as entry:
        entry.attempt, entry.verbs["wait"] = 1, VerbRecord(seconds=1, result="done")
    for words in ((), (name,)):
        code, printed = manycpu("status", *words)
        assert (code, name in printed, "…" in printed) == (0, True, False), printed


def test_reasons_are_below_the_list_in_whole_words(
    manycpu: Type, staging: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column for them would be narrow, and break their words."""
    monkeypatch.setenv("COLUMNS", "80")
    reason = f"the first line has words enough for a column {'and more ' * 20}\nthe last line"
    status = ("failed", reason)
    monkeypatch.setattr("manycpu.pipeline.cli.run_commands._state_and_reason", lambda *_: status)
    code, printed = manycpu("status")
    assert (code, max(map(len, printed.splitlines())) <= 80) == (0, True), printed
    assert f"{staging.name}: the first line has words" in printed
    assert printed.splitlines()[-1] == "`manycpu status NAME` shows a whole reason"
    assert {word for line in printed.splitlines()[5:-1] for word in line.split()} <= {
        *(f"{staging.name}:", "..."),
        *reason.split(),
    }
    assert "the last line" not in printed
    assert reason in manycpu("status", staging.name)[1]


def test_a_run_that_another_version_left_is_no_obstacle_to_looking_at_the_others(
    manycpu: Type, staging: RunContext, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = home / "runs" / "other"
    other.mkdir()
    (other / "ledger.json").write_text('{"schema": 99}')
    code, printed = manycpu("status")
    assert code == 0
    assert "not launched" in printed
    assert f"{other}/ledger.json cannot be read, another version" in caplog.text
    assert staging.ledger.exists()


@pytest.mark.parametrize(
    "words", [("preflight", "--program", "LONG", "--output", "out"), ("status", "--directory", "LONG")]
)
def test_a_path_that_is_too_long_is_bad_input(manycpu: Type, words: tuple[str, ...]) -> None:
    code, printed = manycpu(*(word.replace("LONG", "x" * 5000) for word in words))
    assert (code, "is too long: File name too long" in printed) == (2, True)


def test_a_run_whose_export_failed_has_failed(manycpu: Type, script: Script, tmp_path: Path) -> None:
    out = tmp_path / "out"
    body = f"import os\nopen(os.environ['MANYCPU_OUTPUT'] + '/model', 'w')\nopen({str(out)!r}, 'w')\n"
    given = ["--program", script(body), "--output", str(out), "--nproc-per-node", "1"]
    assert manycpu("run", *given, "--run-id", "x")[0] == 1
    assert "succeeded" not in manycpu("status")[1]
    code, printed = manycpu("status", "train")
    assert (code, "failed" in printed, f"{out} was not written" in printed) == (0, True, True)


def test_one_run_that_cannot_be_judged_hides_no_other(
    manycpu: Type, staging: RunContext, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of another host, one with a damaged file, and one that a disk does not give."""
    monkeypatch.setenv("COLUMNS", "1000")
    handle = process.handle_of_this_process(home / "nowhere", "far-0000000001", 1)
    far = another(staging, "1" * 10, "far-0000000001")
    near = another(staging, "2" * 10, "near-0000000002")
    for ctx, host in ((far, "another-host"), (near, handle.host)):
        prepare(ctx)
        with ctx.ledger.update() as entry:
            entry.attempt = 1
            folder = str(home / "runs" / ctx.name / "attempts" / "1")
            entry.handle = handle.model_copy(update={"host": host, "run": ctx.name, "directory": folder})
    Path(folder).mkdir(parents=True)
    Path(folder, "exit.json").write_text("{half of")
    (home / "runs" / "unreadable" / "ledger.json").mkdir(parents=True)
    (home / "runs" / staging.name / "lease.json").write_text("half of")
    code, printed = manycpu("status")
    assert code == 0, printed
    state_of = {line.split()[1]: line.split()[3] for line in printed.splitlines() if line.startswith("│")}
    assert state_of == {staging.name: "not", "far-0000000001": "unknown", "near-0000000002": "unknown"}
    assert "another-host" in printed
    code, printed = manycpu("clean", "--yes")
    assert code == 0, printed
    assert printed.count("is left alone") == 3
    assert all(ctx.ledger.exists() for ctx in (staging, far, near))


def test_a_range_of_nodes_in_a_run_file_is_no_number_in_base_60(
    manycpu: Type, script: Script, tmp_path: Path
) -> None:
    """YAML 1.1 reads 1:4 as 64, 12:30 as 750, and 010 as 8; docs/fields.md shows 1:4 as it is."""
    path = tmp_path / "run.yaml"
    fields = "nnodes: 1:4, nproc_per_node: 2, args: [--at, 12:30, 1:30.5, 010, 1_000], env: {A: 2:1}"
    path.write_text(f"run: {{program: {script()}, output: out, {fields}}}\ntarget: {{kind: kubernetes}}\n")
    code, printed = manycpu("render", str(path), "--target-image", "r/x:1", "--env", "{B: 3:1}")
    assert code == 0, printed
    job = yaml.safe_load(printed)
    assert (job["spec"]["elasticPolicy"]["minReplicas"], job["spec"]["elasticPolicy"]["maxReplicas"]) == (
        1,
        4,
    )
    assert all(text in printed for text in ("'12:30'", "'1:30.5'", "'010'", "'1_000'", "'3:1'"))
    code, printed = manycpu(
        "render", str(path), "--target-image", "r/x:1", "--env", "{B: 3:1}", "--nnodes", "2:3"
    )
    assert "maxReplicas: 3" in printed


def test_mappings_are_given_name_by_name(manycpu: Type, script: Script, tmp_path: Path) -> None:
    """Each name wins over the file's; a whole mapping replaces the file's; lists are repeated too."""
    file = run_file(tmp_path, program=script(), output="out", env={"A": "of the file", "B": "2"})
    words = ["--env", "A=1=one", "--env", "C=", "--resources", "cpu=1", "--env-from", "x", "--env-from", "y"]
    code, printed = manycpu("render", file, *words)
    env = yaml.safe_load(printed)["env"]
    assert code == 0
    assert (env["A"], env["B"], env["C"], env["MANYCPU_CPUS"]) == ("1=one", "2", "", "1.0")
    assert "B" not in yaml.safe_load(manycpu("render", file, "--env", "{A: 1}")[1])["env"]
    selector = ["--target-kind", "kubernetes", "--target-node-selector", "zone=a", "--target-image", "r/x:1"]
    pod = yaml.safe_load(manycpu("render", file, *selector, "--target-build-args", "TORCH=2")[1])["spec"]
    assert "zone: a" in yaml.safe_dump(pod)
    said = "run.env: 'A' is no NAME=value. Write it as --env NAME=value, once for each.\n"
    assert manycpu("render", file, "--env", "A") == (2, f"manycpu: {said}")
    assert manycpu("render", file, "--env", "=1") == (2, "manycpu: " + said.replace("'A'", "''"))
    code, printed = manycpu("render", file, "--env", "{A: [")
    assert (code, printed.startswith("manycpu: run.env: ")) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("--env", "HF_TOKEN:hunter2"),
        ("--env", "HF_TOKEN hunter2"),
        ("--env", "{HF_TOKEN: hunter2, X: ["),
        ("--args", "[--hub_token, hunter2, ["),
        ("--args", "[*hunter2]"),
        ("--args", "--hub_token hunter2 'x"),
        ("--args", "[!!bool hunter2]"),
        ("--args", "[!!timestamp hunter2]"),
    ],
)
def test_a_mistyped_option_is_named_without_its_value_which_may_be_a_secret(
    manycpu: Type, words: tuple[str, ...]
) -> None:
    code, printed = manycpu("preflight", "--program", "x.py", *words)
    field = f"run.{words[0].removeprefix('--')}: "
    assert (code, field in printed, "hunter2" in printed) == (2, True, False), printed


def test_no_output_is_a_word_on_the_command_line_too(manycpu: Type, script: Script, tmp_path: Path) -> None:
    file = run_file(tmp_path, program=script(), output="out")
    code, printed = manycpu("preflight", file, "--output", "null", "--args", "--to {output}")
    assert code == 0
    assert "warning: run.args: {output}" in printed
    assert not manycpu("render", file, "--output", "null")[0]


def test_a_script_in_the_place_of_a_run_file_is_pointed_out(manycpu: Type, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for text, problem in SCRIPTS:
        script.write_bytes(text)
        assert manycpu("run", str(script)) == (
            2,
            f"manycpu: {script} {problem}. Give a script as --program {script}, with --output.\n",
        )


def test_a_script_that_is_not_there_is_no_run_file_either(manycpu: Type, tmp_path: Path) -> None:
    script = tmp_path / "none.py"
    said = "cannot be read: No such file or directory. Give the path of a run file. Give a script as"
    code, printed = manycpu("run", str(script))
    assert (code, printed) == (2, f"manycpu: {script} {said} --program {script}, with --output.\n")


SCRIPTS = [
    (b"print('trains')", "holds no fields"),
    (b"def f(x):\n    return {x: 1}\n", "is not a run file"),
    (b"\x00\xff", "is not a run file"),
]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "none.yaml",
            None,
            "none.yaml cannot be read: No such file or directory. Give the path of a run file.",
        ),
        (".", None, " cannot be read: Is a directory. Give the path of a run file."),
        ("run.yaml", b"\xff\x00", "run.yaml is not a run file. Give the path of a run file."),
    ],
)
def test_what_is_no_run_file_is_refused_in_one_line(
    manycpu: Type, tmp_path: Path, name: str, content: bytes | None, problem: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    code, printed = manycpu("run", str(path))
    assert (code, printed.count("\n")) == (2, 1)
    assert printed.startswith("manycpu: ")
    assert printed.endswith(f"{problem}\n")


def test_a_placeholder_whose_field_is_not_given_is_refused(
    manycpu: Type, script: Script, tmp_path: Path
) -> None:
    given = {"program": script(), "output": "out", "nproc_per_node": 1}
    file = run_file(tmp_path, **given, args=["{data}", "--from={model}", "{output}"])
    code, printed = manycpu("preflight", file)
    assert code == 2
    assert "error: run.args: {data} is in them, and there is no run.data. Give run.data" in printed
    assert "error: run.args: {model} is in them, and there is no run.model. Give run.model" in printed
    assert "{output}" not in printed
    assert manycpu("run", file)[0] == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("{dta}", "{data}"),
        ("--out={ouput}/x", "{output}"),
        ("{ data }", "{data}"),
        ("{CHECKPOINT}", "{checkpoints}"),
        ("{checkpoints}", None),
        ('{"data": 1}', None),
        ('{"a": {dta: 1}}', None),
        ("${data}", None),
        ("${dta}", None),
        ("{{ dta }}", None),
        ("run-{date}-{mode}", None),
        ("{lr}", None),
        ("{out}", None),
        ("{}", None),
    ],
)
def test_braces_that_are_like_a_placeholder_are_refused(
    manycpu: Type, script: Script, tmp_path: Path, argument: str, meant: str | None
) -> None:
    """Others are left to the program, as JSON is."""
    file = run_file(tmp_path, program=script(), output="out", nproc_per_node=1, args=[argument])
    code, printed = manycpu("preflight", file)
    assert (code, printed.count("error")) == ((2, 1) if meant else (0, 0)), printed
    assert meant is None or f"is no placeholder. Did you mean {meant}?" in printed
