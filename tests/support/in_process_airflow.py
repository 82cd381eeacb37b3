"""An Airflow for tests, in this process: a database and a folder for DAG files."""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from manycpu.operators import local_airflow
from manycpu.pipeline.adapters.lock import locked

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun

# Airflow reads its settings at its first import: set them before any test is collected.
_HOME = Path(tempfile.mkdtemp(prefix="manycpu-airflow-"))
_DATABASE = _HOME / "airflow.db"
os.environ |= {name: value for name, value in local_airflow.settings(_HOME).items() if "AIRFLOW" in name}
os.environ["AIRFLOW__MANYCPU__INSTANCE"] = "tests"


def pytest_sessionfinish() -> None:
    """Delete the folder of this Airflow."""
    shutil.rmtree(_HOME, ignore_errors=True)


def pytest_unconfigure() -> None:
    """Delete the folder if there was no session."""
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def new_database(shared_folder: Path) -> Path:
    """Create a database as Airflow's first start does, once for all test processes; return its file."""
    made = shared_folder / "airflow.db"
    with locked(made.with_suffix(".lock")):
        if not made.exists():
            from airflow.utils import db

            db.initdb()
            with closing(sqlite3.connect(_DATABASE)) as own, closing(sqlite3.connect(made)) as copy:
                own.backup(copy)
    return made


@pytest.fixture(scope="session")
def database(new_database: Path) -> None:
    """Copy the new database to the Airflow of this process, if it has none."""
    if not _DATABASE.exists():
        shutil.copy(new_database, _DATABASE)


Ran = SimpleNamespace
"""A DAG run that has ended: ``state``, ``tasks`` (task -> state), ``run_id`` and ``said``, the whole log."""


@pytest.fixture
def run_dag(
    database: None,  # noqa: ARG001 - the database must exist
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., Ran]:
    """Return a function that runs a DAG to its end in this process.

    ``text`` is the source of the DAG file; empty: the DAG is one of the package's. A second call with the
    same ``when`` clears the same DAG run and runs it again.
    """

    def run(
        dag_id: str, text: str = "", conf: dict[str, Any] | None = None, when: datetime | None = None
    ) -> Ran:
        # A folder with only this file: each run of a DAG reads and stores all DAGs of the folder.
        folder = tmp_path / ("dags" if text else "copied")
        folder.mkdir(exist_ok=True)
        (folder / "file.py").write_text(text or _file_of(dag_id).read_text())
        bundles = local_airflow.settings(_HOME, dags={"tests": folder})
        variable = "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST"
        monkeypatch.setenv(variable, bundles[variable])
        capfd.readouterr()
        ended = _test(folder, dag_id, conf, when)
        said = "".join(capfd.readouterr())
        tasks = {ti.task_id.removeprefix("training."): str(ti.state) for ti in ended.get_task_instances()}
        return Ran(state=str(ended.state), tasks=tasks, said=said, run_id=ended.run_id)

    return run


def _file_of(dag_id: str) -> Path:
    """Return the file of a DAG of the package."""
    (file,) = (path for path in local_airflow.DAGS.glob("*.py") if f"\ndef {dag_id}(" in path.read_text())
    return file


def _test(folder: Path, dag_id: str, conf: dict[str, Any] | None, when: datetime | None) -> "DagRun":
    from manycpu.operators.airflow_versions import dag_bag

    bag = dag_bag(folder)
    assert bag.import_errors == {}
    # Left out if None: Airflow does not accept None for them.
    dates: dict[str, Any] = {"run_after": when, "logical_date": when} if when else {}
    ended: DagRun = bag.dags[dag_id].test(run_conf=conf or {}, **dates)
    return ended
