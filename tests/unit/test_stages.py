"""What takes seconds runs first, and a stage in which something failed is the last one."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support import stages

PROJECT = Path(__file__).parents[2]


def stages_of(folder: Path, test: str, *options: str) -> str:
    """Run two tests of stage contract, and two of stage unit with a body, in a project of their own."""
    support = folder / "tests" / "support"
    support.mkdir(parents=True)
    shutil.copy(stages.__file__, support)
    (folder / "tests" / "conftest.py").write_text('pytest_plugins = ["support.stages"]')
    for stage, text in (("contract", "pass"), ("unit", test)):
        (folder / "tests" / stage).mkdir()
        for name in ("first", "second"):
            (folder / "tests" / stage / f"test_{name}_{stage}.py").write_text(f"def test_it(): {text}\n")
    options = ("-v", "-p", "no:cacheprovider", "-o", "pythonpath=tests", *options)
    pytest_there = [sys.executable, "-m", "pytest", "--rootdir=.", *options, "tests/contract", "tests/unit"]
    done = subprocess.run(pytest_there, cwd=folder, check=False, capture_output=True, text=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("test", "ends"), [("assert False", "2 failed in"), ("pass", "4 passed in")], ids=["failures", "none"]
)
def test_a_stage_with_failures_is_the_last(test: str, ends: str, tmp_path: Path) -> None:
    """All tests of a stage are run, the stages in their order, and none after one with failures."""
    output = stages_of(tmp_path, test)
    assert f" {ends} " in output.splitlines()[-1], output
    ran = [line.split("::")[0] for line in output.splitlines() if "::test_" in line and "%" in line]
    assert ran[:2] == ["tests/unit/test_first_unit.py", "tests/unit/test_second_unit.py"]
    assert ("stage 'unit' had failures" in output) == ("failed" in ends)
    assert "seconds of each stage" in output


def test_a_stage_with_failures_ends_the_session_of_two_processes(tmp_path: Path) -> None:
    output = stages_of(tmp_path, "assert False", "-n", "2")
    assert "stage 'unit' had failures" in output
    assert "2 failed" in output


def test_two_processes_run_all(tmp_path: Path) -> None:
    assert "4 passed" in stages_of(tmp_path, "pass", "-n", "2")


def test_every_folder_of_tests_has_its_stage_and_the_fast_ones_come_first() -> None:
    paths = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
        "testpaths"
    ]
    folders = [f"tests/{folder}" for stage in stages.STAGES.values() for folder in stage]
    assert folders[: len(paths)] == paths
    assert {path.parent.name for path in (PROJECT / "tests").glob("*/test_*.py")} == {
        Path(folder).name for folder in folders
    }
