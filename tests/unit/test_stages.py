"""What takes seconds runs first, and a stage in which something failed is the last one."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support import stages

PROJECT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("test", "ends"), [("assert False", "2 failed in"), ("pass", "4 passed in")], ids=["failures", "none"]
)
def test_a_stage_with_failures_is_the_last(test: str, ends: str, tmp_path: Path) -> None:
    """All tests of a stage are run, the stages in their order, and none after one with failures."""
    support = tmp_path / "tests" / "support"
    support.mkdir(parents=True)
    shutil.copy(stages.__file__, support)
    (tmp_path / "tests" / "conftest.py").write_text('pytest_plugins = ["support.stages"]')
    for folder, text in (("contract", "pass"), ("unit", test)):
        (tmp_path / "tests" / folder).mkdir()
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(
            f"def test_first(): {text}\ndef test_second(): {text}\n"
        )
    options = ["-v", "-p", "no:cacheprovider", "-o", "pythonpath=tests", "tests/contract", "tests/unit"]
    pytest_there = [sys.executable, "-m", "pytest", "--rootdir=.", *options]
    done = subprocess.run(pytest_there, cwd=tmp_path, check=False, capture_output=True, text=True)
    closing = done.stdout.splitlines()[-1]
    assert f" {ends} " in closing, done.stdout + done.stderr
    ran = [line.split("::")[0] for line in done.stdout.splitlines() if "::test_" in line and "%" in line]
    assert ran[:2] == ["tests/unit/test_unit.py"] * 2
    assert ("stage 'unit' had failures" in done.stdout) == ("failed" in ends)
    assert "seconds of each stage" in done.stdout


def test_every_folder_of_tests_has_its_stage_and_the_fast_ones_come_first() -> None:
    paths = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
        "testpaths"
    ]
    folders = [f"tests/{folder}" for stage in stages.STAGES.values() for folder in stage]
    assert folders[: len(paths)] == paths
    assert {path.parent.name for path in (PROJECT / "tests").glob("*/test_*.py")} == {
        Path(folder).name for folder in folders
    }
