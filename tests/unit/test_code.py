"""What of a program's folder is its code."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline.cli.options import open_run
from manycpu.pipeline.spec.errors import BadInputError, BuildError
from manycpu.pipeline.targets import program_code as chosen
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.targets.program_code import code_of, program_of
from manycpu.pipeline.verbs.build import build
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.preflight import preflight

SAMPLES = Path(__file__).parents[1] / "samples" / "0.1.0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mine"
    made.mkdir()
    (made / "train.py").write_text("")
    return made


def put(folder: Path, *names: str, text: str = "x") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def opened(folder: Path, **fields: Any) -> RunContext:
    return open_context({"program": "./train.py", "output": "../out"} | fields, None, "test", base=folder)


def code(folder: Path, **fields: Any) -> set[str]:
    ctx = opened(folder, **fields)
    root, arguments = program_of(ctx)
    assert root is not None
    return set(code_of(ctx, root, arguments).files)


def exported(folder: Path, name: str, text: str) -> None:
    put(folder, f"{name}/weights.bin")
    put(folder, f"{name}/{'manifest.json' if 'files' in text else 'report.json'}", text=text)


FILE = {"path": "weights.bin", "size": 1, "sha256": "0" * 64}
REPORT = {"key": "k", "name": "n", "state": "failed", "attempts": 1, "run": {}, "target": {}}


def test_what_runs_exported_into_the_folder_is_no_code(folder: Path) -> None:
    """As in the README: train.py, data/ and models/ beside one another, and a second run."""
    exported(folder, "models/first", json.dumps({"files": [FILE]}))
    exported(folder, "models/failed", json.dumps(REPORT))
    exported(folder, "models/theirs", json.dumps({"loss": 0.5}))
    put(folder, "data/set.txt", "pages/manifest.json")
    there = code(folder, data="./data", output="./models/second")
    assert there == {
        "train.py",
        "pages/manifest.json",
        "models/theirs/weights.bin",
        "models/theirs/report.json",
    }


COPY = "0123456789abcdef"


def test_what_manycpu_keeps_in_the_folder_is_no_code(folder: Path) -> None:
    put(folder, "mc/runs/train-0123456789/ledger.json", "mc/runs/train-0123456789/owner")
    put(folder, "host/runs/train-0123456789/owner", "host/runs/train-0123456789/attempts/1/log")
    old = json.loads((SAMPLES / "failed.json").read_text())
    put(folder, "old/train-0123456789/ledger.json", text=old["home/runs/train-2ea8290c81/ledger.json"])
    for copy in (COPY, f"{COPY}-2", f"{COPY}.partial"):
        put(folder, f"mc/data/{copy}/a", f"mc/data/.{copy.removesuffix('.partial')}.lock")
    put(
        folder,
        f"mc/code/{COPY}/a",
        f"mc/code/{COPY}.manifest.json",
        f"mc/code/{COPY}.manifest.0a1b2c3d.partial",
    )
    put(folder, f"mc/model/{COPY}.{COPY}.0a1b2c3d.partial/a", "mc/functions/0123456789/dag.py")
    (folder / "latest").symlink_to("mc/runs/train-0123456789")
    (folder / "log").symlink_to("host/runs/train-0123456789/attempts/1")
    (folder / "set").symlink_to(f"mc/data/{COPY}")
    own = ("data/loader.py", f"data/{COPY}/a", f"data/{COPY}.partial/a", "runs/ledger.json", "runs/2/owner")
    put(folder, *own, "functions/loss.py")
    assert code(folder) == {"train.py", *own, "functions/loss.py"}


def test_runs_and_caches_in_the_folder_are_no_code_whatever_is_left_of_them(folder: Path) -> None:
    put(folder, "runs/train-0123456789/attempts/1/log", "caches/hub/token", "mine/runs/a.py")
    ctx = open_context({"program": "./train.py", "output": "../out"}, {"directory": "."}, "test", base=folder)
    root, arguments = program_of(ctx)
    assert root is not None
    assert set(code_of(ctx, root, arguments).files) == {"train.py", "mine/runs/a.py"}


def test_what_tools_make_and_the_run_names_is_no_code(folder: Path) -> None:
    put(folder, ".git/config", "__pycache__/x.pyc", "helper.py", "set/a", "old/b", "points/c")
    assert code(folder, data="set", model="old", checkpoints="points") == {"train.py", "helper.py"}


def test_an_environment_of_python_is_no_code_and_a_package_of_its_name_is(folder: Path) -> None:
    put(folder, "env/__init__.py", "venv/__init__.py", "mine/pyvenv.cfg", "mine/lib.py")
    put(folder, "sub/env/conda-meta/history", "sub/env/lib.py")
    assert code(folder) == {"train.py", "env/__init__.py", "venv/__init__.py"}


def test_a_folder_of_the_code_that_cannot_be_listed_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "configs/large.yaml")
    listed = os.scandir

    def scandir(path: object) -> Any:
        if str(path).endswith("configs"):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(BuildError, match=r"^run\.program: folder \S+/configs cannot be listed: Stale"):
        code(folder)
    assert [finding.field for finding in preflight(opened(folder)) if finding.fatal] == ["run.program"]


@pytest.mark.parametrize(
    "source",
    [
        "x = 3\nif x == 0: pass\n" + "".join(f"elif x == {number}: pass\n" for number in range(1, 2000)),
        "x = " + "+".join(["'text'"] * 2500),
    ],
    ids=["elif", "sum"],
)
def test_a_program_too_deeply_nested_for_a_check_is_not_refused(folder: Path, source: str) -> None:
    put(folder, "train.py", text=source)
    compile(source, "train.py", "exec")
    assert preflight(opened(folder)) == []


def test_a_program_that_overflows_the_parser_of_python_is_left_to_its_ranks(folder: Path) -> None:
    put(folder, "train.py", text="x = " + "-" * 20_000 + "1")
    assert preflight(opened(folder)) == []


def test_a_program_that_cannot_be_read_is_a_finding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "train.py":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    (finding,) = preflight(opened(folder))
    assert (finding.field, finding.fatal) == ("run.program", True)
    assert "Permission denied" in finding.message


def test_a_module_that_is_imported_and_left_out_of_the_code_is_named_before_it_is_missed(
    folder: Path,
) -> None:
    put(folder, "loaders/__init__.py", "helper.py", "sets/__init__.py", "sets.py")
    put(folder, ".gitignore", text="loaders/\nsets/\n")
    (folder / "train.py").write_text("import helper\nimport loaders\nimport sets\n")
    (finding,) = preflight(opened(folder))
    assert (finding.field, finding.fatal) == ("run.code", False)
    assert finding.message.startswith("train.py:2: loaders is among what .gitignore or .dockerignore")


def test_the_run_file_is_no_code(folder: Path) -> None:
    put(folder, "run.yaml", text="run: {program: ./train.py, output: ../out, env: {PASSWORD: hunter2}}\n")
    put(folder, "settings.yaml", "sub/run.yaml")
    (folder / "link.yaml").symlink_to("run.yaml")
    ctx = open_run(folder / "run.yaml", {}, "test")
    root, arguments = program_of(ctx)
    assert root is not None
    assert set(code_of(ctx, root, arguments).files) == {"train.py", "settings.yaml", "sub/run.yaml"}


def test_a_run_file_is_read_as_utf_8_in_any_locale(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {program: ./übung.py, output: ../out}\n", encoding="utf-8")
    reading = "import sys; from manycpu.pipeline import runfile as f; f.read_run_file(f.Path(sys.argv[1]))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", reading, file], env=os.environ | locale, check=True)


def test_other_run_files_are_no_code_and_settings_of_the_program_are(folder: Path) -> None:
    put(
        folder, "run.yaml", "more/eight.yml", text="run: {program: ./train.py, output: ../out, nnodes: 1:4}\n"
    )
    put(folder, "cluster.yaml", text="# where\ntarget:\n  kind: kubernetes\n  namespace: ml\n")
    settings = {
        "own.yaml": "run: {program: ./train.py, speed: 3}\n",
        "two.yaml": "run: {program: ./train.py}\nmodel: {layers: 3}\n",
        "target.yaml": "target: {kind: local, mean: 0.5}\n",
        "short.yaml": "run: {dtype: bf16}\n",
        "text.yaml": "run",
        "broken.yaml": "run: {program: [",
        "many.yaml": "run: {program: a}\n---\nrun: {program: b}\n",
        "run.json": '{"run": {"program": "./train.py"}}',
    }
    for name, text in settings.items():
        put(folder, name, text=text)
    put(folder, "bytes.yaml")
    (folder / "bytes.yaml").write_bytes(b"run: \xff")
    before = code(folder)
    assert before == {"train.py", "bytes.yaml", *settings}
    put(folder, "run.yaml", text="run: {program: ./train.py, output: ../other}\n")
    assert code(folder) == before


def test_gitignore_is_heeded_as_git_does(folder: Path) -> None:
    put(folder, "a.bin", "keep.bin", "logs/x", "sub/b.bin", "sub/c.log", "sub/logs/y", "other/d.log", "e.tmp")
    put(folder, ".gitignore", text="# large\n*.bin\n!keep.bin\n/logs/\n")
    put(folder, "sub/.gitignore", text="\ufeff*.log\n!b.bin\n!\nsub\\\n")
    put(folder.parent, ".gitignore", text="*.tmp\n")
    assert "e.tmp" in code(folder)  # another folder's, as long as there is no repository above
    subprocess.run(["git", "init", "-q", str(folder.parent)], check=True)
    listed = ["git", "-C", str(folder), "ls-files", "-z", "--others", "--exclude-standard", "."]
    said = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    assert code(folder) == {name for name in said if name and not name.endswith(".gitignore")}
    assert "sub/b.bin" in said


def test_dockerignore_is_heeded_as_docker_does(folder: Path) -> None:
    put(folder, "a.log", "sub/b.log", "data/c", "data/keep.py", "deep/er/x.bin")
    put(folder, ".dockerignore", text="# not for images\n*.log\ndata/\n!data/keep.py\n**/*.bin\n")
    assert code(folder) == {"train.py", "sub/b.log", "data/keep.py"}
    put(folder, ".dockerignore", text="\ufeff*\n! train.py\n!sub\n #x\nsub\\\n")
    assert code(folder) == {"train.py", "sub/b.log"}


@pytest.mark.parametrize("name", [".gitignore", ".dockerignore"])
def test_a_program_that_is_ignored_itself_is_refused_at_once(folder: Path, name: str) -> None:
    put(folder, name, text="*.py\n")
    (finding,) = preflight(opened(folder))
    assert (finding.field, finding.fatal) == ("run.program", True)
    assert "train.py is among what .gitignore or .dockerignore" in finding.message


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"program": "./run.yaml"}, "run.yaml is a run file, and no program"),
        ({"data": "./train.py"}, "train.py is named as data, model, output or checkpoints of this run too"),
        ({"program": "./.train.py"}, ".train.py has a name that is not taken for code"),
        ({"program": "-m env.train"}, "env.train is in an environment of Python, which is no code"),
        ({"program": "./env/train.py", "code": "."}, "env/train.py is in an environment of Python"),
        ({"program": "-m train", "data": "train.py"}, "train is named as data"),
        ({"program": "-m done.train"}, "done.train is in "),
        ({"program": "old/train.py", "model": "old", "code": "."}, "old/train.py is in "),
        ({"program": "run/train.py", "code": "."}, "run/train.py is in "),
    ],
)
def test_a_program_that_is_left_out_of_its_code_is_refused_with_the_reason(
    folder: Path, fields: dict[str, str], why: str
) -> None:
    put(
        folder,
        "run.yaml",
        ".train.py",
        "env/train.py",
        "env/pyvenv.cfg",
        "old/train.py",
        "run/train.py",
        "run/owner",
        "run/ledger.json",
        "done/train.py",
        text="run: {program: ./train.py, output: ../out}\n",
    )
    exported(folder, "done", json.dumps(REPORT))
    ctx = open_run(folder / "run.yaml", {f"run__{name}": value for name, value in fields.items()}, "test")
    root, arguments = program_of(ctx)
    assert root is not None
    with pytest.raises(BadInputError, match=rf"^run\.program: {re.escape(why)}") as caught:
        code_of(ctx, root, arguments)
    assert "ignore" not in str(caught.value)


def test_linked_and_empty_folders_are_code_but_no_loop_and_no_data_by_another_name(
    folder: Path, home: Path
) -> None:
    put(folder.parent, "common/conf.yaml", "data/set.txt")
    put(folder, "deep/helper.py", "logs/x.log")
    (folder / "empty" / "deeper").mkdir(parents=True)
    (folder / "ignored").mkdir()
    put(folder, ".gitignore", text="*.log\nignored/\n")
    for name, leads_to in {
        "lib": folder.parent / "common",
        "set": folder.parent / "data",
        "deep/up": folder,
        "deep/self": folder / "deep",
        "a": folder / "deep",
    }.items():
        (folder / name).symlink_to(leads_to)
    (folder.parent / "common" / "back").symlink_to(folder / "deep")
    (folder / "deep" / "there").symlink_to(folder.parent / "common")
    there = code(folder, data="../data")
    assert there >= {"train.py", "lib/conf.yaml", "deep/helper.py", "a/helper.py", "empty/deeper/"}
    assert not [path for path in there if "set" in path or "ignored" in path or "logs" in path]
    assert max(path.count("/") for path in there) <= 3
    ctx = opened(folder, data="../data")
    ctx.ledger.open(ctx.new_entry(0))
    built = build(ctx).code
    assert built is not None
    assert Path(built).is_relative_to(home)
    assert (Path(built) / "lib" / "conf.yaml").read_text() == "x"
    assert (Path(built) / "empty" / "deeper").is_dir()
    cleanup(ctx)


@pytest.mark.parametrize(("limit", "value"), [("_MAX_BYTES", 20), ("_MAX_FILES", 1)])
def test_more_than_code_is_bad_input_and_the_largest_files_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    put(folder, "weights/large.bin", text="x" * 21)
    monkeypatch.setattr(chosen, limit, value)
    (finding,) = preflight(opened(folder))
    assert finding.fatal
    assert "2 file(s) of" in finding.message
    assert "the largest: weights/large.bin (21 bytes), train.py (0 bytes)" in finding.message
    with pytest.raises(BadInputError, match="more than code"):
        code(folder)


def test_what_is_taken_is_said(folder: Path, home: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(folder, "helper.py", text="x" * 2000)
    ctx = opened(folder)
    ctx.ledger.open(ctx.new_entry(0))
    caplog.set_level("INFO", "manycpu")
    built = build(ctx)
    assert (
        f"the code: 2 file(s) of {folder}, 2.0 kB; the largest: helper.py (2.0 kB), train.py" in caplog.text
    )
    assert built.code is not None
    assert Path(built.code).is_relative_to(home)
    assert sorted(path.name for path in Path(built.code).iterdir()) == ["helper.py", "train.py"]
    cleanup(ctx)


def test_pathspec_1_0_is_enough_whose_class_takes_no_type() -> None:
    as_in_1_0 = "import pathspec; pathspec.PathSpec.__class_getitem__ = None"
    command = [sys.executable, "-c", f"{as_in_1_0}\nimport manycpu.pipeline.targets.program_code"]
    subprocess.run(command, check=True)


def test_a_module_is_found_by_its_whole_name(tmp_path: Path) -> None:
    (tmp_path / "fraud" / "models").mkdir(parents=True)
    for name in ("fraud/train.py", "fraud/_fast.cpython-311-x86_64-linux-gnu.so"):
        (tmp_path / name).touch()
    found = {
        name: chosen.has_module(tmp_path, name)
        for name in ("fraud", "fraud.train", "fraud._fast", "fraud.models")
    }
    assert set(found.values()) == {True}
    assert not any(chosen.has_module(tmp_path, name) for name in ("fraud.trian", "fraud.train.x", "train"))
