"""Follow the tutorial: its program trains, and the same run id resumes it after an interruption."""

import ast
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.waiting import until

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
pytestmark = pytest.mark.usefixtures("home", "no_process_left")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the tutorial writes."""
    files = re.findall(r"```(?:python|yaml)\n# ([\w.]+)\n(.*?)```", PAGE, re.DOTALL)
    assert [name for name, _ in files] == ["train.py", "digits.yaml", "digits_dag.py"]
    for name, text in files:
        # Each step waits for the other rank, which is slow on a busy machine.
        (tmp_path / name).write_text(text.replace("STEPS = 200", "STEPS = 50"))
    return tmp_path


def typed(words: str, folder: Path) -> subprocess.Popen[str]:
    """Start a command of the page."""
    assert f"manycpu {words}" in PAGE
    argv = [sys.executable, "-m", "manycpu.pipeline.cli", *words.split()]
    return subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_the_run_of_the_tutorial_is_interrupted_resumed_and_not_replaced(
    folder: Path, home: Path, manycpu: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert "manycpu preflight digits.yaml" in PAGE
    assert "ready: nothing stands in the way of this run" in manycpu("preflight", "digits.yaml")[1]
    command = "run digits.yaml --run-id second --output ./models/second"
    first = typed(command, folder)
    until(lambda: first.poll() is not None or [*home.glob("runs/*/checkpoints/latest.pt")])
    first.send_signal(signal.SIGINT)
    said, _ = first.communicate(timeout=300)
    assert first.returncode == 130, said
    second = typed(command, folder)
    said, _ = second.communicate(timeout=600)
    assert (second.returncode, "resumes after step" in said) == (0, True), said
    assert "succeeded: 2 ranks on 1 host" in said
    (folder / "models" / "second").rename(folder / "models" / "digits")
    report = json.loads((folder / "models" / "digits" / "report.json").read_text())
    assert 80 < report["metrics"]["accuracy"] < 97
    files = {path.name for path in (folder / "models" / "digits").iterdir()}
    assert {"model.pt", "manifest.json", "report.html"} <= files
    assert "manycpu run digits.yaml" in PAGE
    assert "is not empty: another run" in manycpu("run", "digits.yaml")[1]


def test_the_dag_of_the_tutorial_is_python_that_names_its_program(folder: Path) -> None:
    ast.parse((folder / "digits_dag.py").read_text())
    assert 'program="./train.py"' in (folder / "digits_dag.py").read_text()
