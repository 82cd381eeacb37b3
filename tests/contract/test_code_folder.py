"""``run.code``: the folder that is a program's code, where that is a project."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline import train
from manycpu.pipeline.spec.errors import BadInputError, TrainingFailedError

light = pytest.mark.usefixtures("home", "light_torch", "no_process_left")

USES_ROOT = """
import json, os, sys
import torch.distributed as dist
from mylib.parts import answer
dist.init_process_group()
if os.environ["RANK"] == "0":
    seen = {"answer": answer, "cwd": sorted(os.listdir()), "argv": sys.argv[0]}
    seen["config"] = open("config.yaml").read()
    seen["path"] = [os.path.relpath(path) for path in sys.path[:2]]
    open(os.environ["MANYCPU_OUTPUT"] + "/seen.json", "w").write(json.dumps(seen))
"""


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Write a project whose program is in a folder of it, and imports from its root."""
    root = tmp_path / "project"
    for name, text in {
        "pyproject.toml": "[project]\nname = 'mine'\n",
        "mylib/__init__.py": "",
        "mylib/parts.py": "answer = 42\n",
        "config.yaml": "a: 1",
        "scripts/train.py": USES_ROOT,
        "scripts/helper.py": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def fields(root: Path, **more: Any) -> dict[str, Any]:
    return {"program": "scripts/train.py", "output": str(root.parent / "out"), "nproc_per_node": 1} | more


@light
@pytest.mark.parametrize("code", [".", "auto"])
def test_a_script_of_a_project_works_from_its_root(whole: Path, code: str) -> None:
    train(fields(whole, code=code), base=whole)
    seen = json.loads((whole.parent / "out" / "seen.json").read_text())
    assert seen == {
        "answer": 42,
        "cwd": ["config.yaml", "mylib", "pyproject.toml", "scripts"],
        "argv": "scripts/train.py",
        "config": "a: 1",
        "path": ["scripts", "."],
    }


@light
def test_a_module_beside_the_folder_of_the_code_is_looked_for_and_named(
    whole: Path, manycpu: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole)
    words = ["run", "--program", "scripts/train.py", "--output", "../out", "--nproc-per-node", "1"]
    exit_code, said = manycpu(*words)
    hint = f"mylib is in {whole}, and the code is {whole}/scripts alone. Set run.code to {whole}"
    assert exit_code == 1
    assert f"warning: run.code: train.py:4: {hint}" in said
    assert "ModuleNotFoundError: No module named 'mylib'" in said
    assert said.count(hint) == 2  # before it starts, and when it has failed
    assert manycpu(*words, "--code", ".")[0] == 0


@light
def test_a_module_that_only_a_helper_imports_is_named_when_it_is_missing(whole: Path) -> None:
    (whole / "scripts" / "train.py").write_text("import helper")
    (whole / "scripts" / "helper.py").write_text("import mylib.parts")
    with pytest.raises(TrainingFailedError, match=rf"mylib is in {whole}, .* Set run\.code to {whole}"):
        train(fields(whole), base=whole)


@light
def test_a_module_of_a_source_folder_is_named_with_its_way(whole: Path) -> None:
    (whole / "src").mkdir()
    (whole / "mylib").rename(whole / "src" / "mylib")
    with pytest.raises(
        TrainingFailedError, match=r"Set run\.code to \S+ and run\.env to \{PYTHONPATH: src\}"
    ):
        train(fields(whole), base=whole)
    train(fields(whole, code="auto", env={"PYTHONPATH": "src"}), base=whole)


@light
def test_a_module_that_is_nowhere_gets_no_hint(whole: Path) -> None:
    (whole / "scripts" / "train.py").write_text("import nowhere_at_all")
    with pytest.raises(TrainingFailedError) as caught:
        train(fields(whole), base=whole)
    assert "run.code" not in str(caught.value)


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"code": "mylib"}, r"^run\.code: \S+/scripts/train\.py is not in \S+/mylib"),
        ({"code": "nothing"}, r"^run\.code: there is no folder \S+/nothing"),
        ({"code": "config.yaml"}, r"^run\.code: there is no folder \S+/config\.yaml"),
        ({"code": "s3://bucket/code"}, r"^run\.code: there is no folder s3://bucket/code"),
        ({"program": "hogwild", "code": "."}, r"^run\.code: the recipe hogwild has its code in manycpu"),
        (
            {"program": "-m json.tool", "code": "."},
            r"^run\.code: there is no module json\.tool in \S+/project",
        ),
    ],
)
def test_a_folder_that_is_not_around_the_program_is_bad_input(
    whole: Path, more: dict[str, Any], why: str
) -> None:
    with pytest.raises(BadInputError, match=why):
        train(fields(whole, **more), base=whole)


@pytest.mark.usefixtures("home")
def test_where_nothing_marks_a_project_its_folder_is_asked_for(whole: Path) -> None:
    (whole / "pyproject.toml").unlink()
    if any((folder / ".git").exists() for folder in whole.parents):
        pytest.skip("temporary files are in a repository here")
    with pytest.raises(
        BadInputError, match=r"^run\.code: no folder around the program has \.git or pyproject\.toml"
    ):
        train(fields(whole, code="auto"), base=whole)


@light
def test_a_module_of_a_project_is_found_below_its_folder(whole: Path) -> None:
    (whole / "mylib" / "fit.py").write_text(USES_ROOT)
    train(fields(whole, program="-m mylib.fit", code=".."), base=whole / "scripts")
    assert json.loads((whole.parent / "out" / "seen.json").read_text())["answer"] == 42


PRINTS_FILES = """
import os, pathlib
files = sorted(path.as_posix() for path in pathlib.Path().rglob("*") if path.is_file())
pathlib.Path(os.environ["MANYCPU_OUTPUT"], "files").write_text("\\n".join(files))
"""


@light
@pytest.mark.parametrize("first_directory", [".", "mc"])
def test_runs_and_copies_in_the_project_are_no_code_and_folders_called_like_theirs_are(
    tmp_path: Path, first_directory: str
) -> None:
    """The first run is kept: its ledger holds a token, and only its owner may read it."""
    project = tmp_path / "project"
    sources = {"data/loader.py", "model/net.py", "functions/loss.py", "code/lib.py"}
    for name in (*sources, "set/a.txt"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x = 1")
    (project / "train.py").write_text(PRINTS_FILES)
    (project / "fails.py").write_text("raise SystemExit(3)")
    first: dict[str, Any] = {"program": "fails.py", "output": "one", "nproc_per_node": 1, "data": "set"}
    first |= {"env": {"HF_TOKEN": "hf_secret"}, "keep": "always"}
    with pytest.raises(TrainingFailedError):
        train(first, {"directory": first_directory}, base=project)
    (ledger,) = (project / first_directory / "runs").glob("*/ledger.json")
    assert "hf_secret" in ledger.read_text()
    second = {"program": "train.py", "output": "two", "nproc_per_node": 1}
    train(second, {"directory": "."}, base=project)
    files = set((project / "two" / "files").read_text().split())
    assert files == {"train.py", "fails.py", "set/a.txt", *sources}
    snapshots = [path.read_text() for path in (project / "code").rglob("*") if path.is_file()]
    assert not any("hf_secret" in text for text in snapshots)
