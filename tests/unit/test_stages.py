"""What takes seconds runs first, and a stage in which something failed is the last one."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from support import stages

PROJECT = Path(__file__).parents[2]


def stages_of(folder: Path, test: str, *options: str) -> str:
    """Run two tests of stage contract, and two of stage unit with a body, in a project of their own."""
    bodies = {"contract": "pass", "unit": test}
    return session(
        folder,
        {
            f"{stage}/test_{name}_{stage}": f"def test_it(): {text}\n"
            for stage, text in bodies.items()
            for name in ("first", "second")
        },
        *options,
    )


def notes_of(folder: Path, files: dict[str, str], processes: int) -> list[tuple[str, ...]]:
    """Run tests that note what they do; each note's words."""
    output = session(folder, files, "-n", str(processes), NOTES=str(folder / "notes"))
    assert output.endswith("exit code 0"), output
    return [tuple(line.split()) for line in (folder / "notes").read_text().splitlines()]


def session(folder: Path, files: dict[str, str], *options: str, **env: str) -> str:
    """Run test files in a project of their own; what is said, and the exit code."""
    support = folder / "tests" / "support"
    support.mkdir(parents=True)
    shutil.copy(stages.__file__, support)
    (folder / "tests" / "conftest.py").write_text('pytest_plugins = ["support.stages"]')
    for name, text in files.items():
        file = folder / "tests" / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    plugins = ("-p", "no:cacheprovider", "-p", "xdist")  # no others: their import takes most of a session
    words = ("-v", *plugins, "-o", "pythonpath=tests", "--import-mode=importlib", *options)
    pytest_there = [sys.executable, "-m", "pytest", "--rootdir=.", "--max-worker-restart=0", *words, "tests"]
    # Of its own, also where this session is one of several processes.
    env |= {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
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


WORKS = """
import os, pathlib, time
file = pathlib.Path(__file__).with_suffix("")
def note(what):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{what} {os.environ['PYTEST_XDIST_WORKER']} {file.parent.name}/{file.name}\\n")
def works():
    note("begins")
    time.sleep(0.05)
    note("ends")
test_first = test_second = test_third = works
"""
AT_THE_END = ["cluster/test_life", "kubernetes/test_whole_rights"]
WITH_AIRFLOW = ["e2e/test_a", "kubernetes/test_airflow", "ui/test_a"]
AT_THE_CLUSTER = [f"{folder}/test_{name}" for folder in ("cluster", "kubernetes") for name in "abcd"]


@pytest.mark.parametrize("processes", [3])
def test_two_processes_are_at_the_cluster_and_it_ends_last(processes: int, tmp_path: Path) -> None:
    files = [*AT_THE_END, *WITH_AIRFLOW, *AT_THE_CLUSTER, "contract/test_a", "contract/test_b"]
    notes = notes_of(tmp_path, dict.fromkeys(files, WORKS), processes)
    assert Counter(file for what, _, file in notes if what == "ends") == dict.fromkeys(files, 3)
    assert {file for _, _, file in notes[-12:]} == set(AT_THE_END)
    assert len({process for _, process, file in notes if file in WITH_AIRFLOW}) == 1
    working: set[str] = set()
    for what, process, file in notes:
        if file in AT_THE_CLUSTER:
            (working.add if what == "begins" else working.discard)(process)
        assert len(working) <= 2


def test_a_process_takes_up_the_cluster_at_once(tmp_path: Path) -> None:
    files = ["contract/test_a", "contract/test_b", "e2e/test_a", "cluster/test_a"]
    notes = notes_of(tmp_path, dict.fromkeys(files, WORKS), processes=2)
    begun = [file for what, _, file in notes if what == "begins"]
    assert {"cluster/test_a", "e2e/test_a"} == set(begun[:4])
    assert begun.index("contract/test_a") > 2


def test_what_needs_airflow_runs_in_a_row(tmp_path: Path) -> None:
    """Airflow ends after the last in a row, and does not come back."""
    airflow = "import pytest\n@pytest.fixture\ndef airflow(): pass\n"
    with_it, without = f"{airflow}def test_with(airflow): pass\n", "def test_without(): pass\n"
    files = {f"{stage}/test_{stage}": with_it + without for stage in ("e2e", "ui")}
    files["kubernetes/test_airflow"] = with_it + without
    output = session(tmp_path, files)
    ran = [line.split()[0].split("::")[1] for line in output.splitlines() if "::test_with" in line]
    assert ran == [*["test_without"] * 2, *["test_with"] * 3, "test_without"], output


def test_every_folder_of_tests_has_its_stage_and_the_fast_ones_come_first() -> None:
    paths = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
        "testpaths"
    ]
    folders = [f"tests/{folder}" for stage in stages.STAGES.values() for folder in stage]
    assert folders[: len(paths)] == paths
    assert {path.parent.name for path in (PROJECT / "tests").glob("*/test_*.py")} == {
        Path(folder).name for folder in folders
    }
