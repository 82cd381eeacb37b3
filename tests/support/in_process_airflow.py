"""An Airflow of the tests' own, in this process: a database and a folder for DAG files."""

import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from manycpu.operators import local_airflow

if TYPE_CHECKING:
    from airflow.models.dagrun import DagRun

# Airflow reads its settings when it is first imported: they have to be there before any test is collected.
_HOME = Path(tempfile.mkdtemp(prefix="manycpu-airflow-"))
DATABASE = _HOME / "airflow.db"
"""What the fixture ``database`` makes, for an Airflow of a test's own to begin with."""
os.environ |= {name: value for name, value in local_airflow.settings(_HOME).items() if "AIRFLOW" in name}
os.environ["AIRFLOW__MANYCPU__INSTANCE"] = "tests"


def pytest_sessionfinish() -> None:
    """Delete it, also where no test has made the database."""
    shutil.rmtree(_HOME, ignore_errors=True)


def pytest_unconfigure() -> None:
    """Delete it where there was no session."""
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def database() -> None:
    """Make Airflow's database once."""
    from airflow.utils import db

    db.initdb()


Ran = SimpleNamespace
"""A DAG run that has ended: ``state``, ``tasks`` (task -> state) and ``said``, all that was logged."""


@pytest.fixture
def run_dag(
    database: None,  # noqa: ARG001 - it has to be there
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., Ran]:
    """Run a DAG to its end in this process: one of the package's, or the only one of a file's text.

    The same ``when`` again is the same DAG run, cleared.
    """

    def run(
        dag_id: str, text: str = "", conf: dict[str, Any] | None = None, when: datetime | None = None
    ) -> Ran:
        folder = local_airflow.DAGS
        if text:
            folder = tmp_path / "dags"
            folder.mkdir(exist_ok=True)
            (folder / "file.py").write_text(text)
        bundles = local_airflow.settings(_HOME, dags={"tests": folder})
        variable = "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST"
        monkeypatch.setenv(variable, bundles[variable])
        capfd.readouterr()
        ended = _test(folder, dag_id, conf, when)
        said = "".join(capfd.readouterr())
        tasks = {ti.task_id.removeprefix("training."): str(ti.state) for ti in ended.get_task_instances()}
        return Ran(state=str(ended.state), tasks=tasks, said=said, run_id=ended.run_id)

    return run


def _test(folder: Path, dag_id: str, conf: dict[str, Any] | None, when: datetime | None) -> "DagRun":
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(folder)
    assert bag.import_errors == {}
    dates: dict[str, Any] = {"run_after": when, "logical_date": when} if when else {}  # None is no default
    ended: DagRun = bag.dags[dag_id].test(run_conf=conf or {}, **dates)
    return ended
