"""What takes seconds runs first, and a stage in which something failed is the last one."""

import os
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
    words = ("-v", "-p", "no:cacheprovider", "-o", "pythonpath=tests", "--max-worker-restart=0", *options)
    pytest_there = [sys.executable, "-m", "pytest", "--rootdir=.", *words, "tests/contract", "tests/unit"]
    # Of its own, also where this session is one of several processes.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        pytest_there, cwd=folder, env=env, check=False, capture_output=True, text=True, timeout=120
    )
    return f"{done.stdout}{done.stderr}\nexit code {done.returncode}"


@pytest.mark.parametrize(
    ("test", "ends"), [("assert False", "2 failed in"), ("pass", "4 passed in")], ids=["failures", "none"]
)
def test_a_stage_with_failures_is_the_last(test: str, ends: str, tmp_path: Path) -> None:
    """All tests of a stage are run, the stages in their order, and none after one with failures."""
    output = stages_of(tmp_path, test)
    assert f" {ends} " in output, output
    ran = [line.split("::")[0] for line in output.splitlines() if "::test_" in line and "%" in line]
    assert ran[:2] == ["tests/unit/test_first_unit.py", "tests/unit/test_second_unit.py"]
    assert ("stage 'unit' had failures" in output) == ("failed" in ends)
    assert "seconds of each stage" in output


def test_a_stage_with_failures_ends_the_session_of_two_processes(tmp_path: Path) -> None:
    output = stages_of(tmp_path, "assert False", "-n", "2")
    assert "stage 'unit' had failures" in output
    assert "2 failed" in output
    assert output.endswith("exit code 2")


def test_two_processes_run_all(tmp_path: Path) -> None:
    output = stages_of(tmp_path, "pass", "-n", "2")
    assert "4 passed" in output
    assert output.endswith("exit code 0")


@pytest.mark.parametrize(
    "death", ["os.kill(os.getpid(), 9)", "os._exit(0)"], ids=["killed", "ended as if all was well"]
)
@pytest.mark.parametrize("when", ["in a test", "in collecting"])
def test_a_process_that_dies_fails_the_session(death: str, when: str, tmp_path: Path) -> None:
    dies = f"import os; {death}"
    if when == "in collecting":
        (tmp_path / "conftest.py").write_text(f"import os\nif 'PYTEST_XDIST_WORKER' in os.environ: {death}\n")
    output = stages_of(tmp_path, dies if when == "in a test" else "pass", "-n", "2")
    assert "a process of the session died: gw" in output
    assert not output.endswith("exit code 0")


@pytest.mark.parametrize(
    "files",
    [
        ("cluster/test_a", "cluster/test_b", "kubernetes/test_a", "kubernetes/test_b"),
        ("e2e/test_a", "ui/test_a", "kubernetes/test_airflow"),
    ],
    ids=["cluster", "airflow"],
)
def test_one_process_has_all_that_shares(files: tuple[str, ...]) -> None:
    scopes = {
        stages.Lanes._split_scope(None, f"tests/{file}.py::test_it")  # type: ignore[arg-type] # noqa: SLF001
        for file in files
    }
    assert len(scopes) == 1


def test_every_folder_of_tests_has_its_stage_and_the_fast_ones_come_first() -> None:
    paths = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
        "testpaths"
    ]
    folders = [f"tests/{folder}" for stage in stages.STAGES.values() for folder in stage]
    assert folders[: len(paths)] == paths
    assert {path.parent.name for path in (PROJECT / "tests").glob("*/test_*.py")} == {
        Path(folder).name for folder in folders
    }
