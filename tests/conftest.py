"""Fixtures for every test: a folder for its runs, scripts to train, a tiny model."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.killable_programs import end_programs, take_signals
from support.rank_launches import LIGHT
from support.tiny_bert import tiny_checkpoint, tiny_env
from support.training_scripts import ALL_REDUCE
from support.waiting import processes_of, until

# One Airflow server for e2e, ui and kubernetes, and one Airflow in this process for dags and kubernetes.
pytest_plugins = [
    "support.stages",
    "support.shared_folder",
    "support.standalone_airflow",
    "support.in_process_airflow",
]
take_signals()


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the temporary files of everything that tests start in a folder that pytest deletes."""
    folder = tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(autouse=True)
def _programs() -> Iterator[None]:
    with end_programs():
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for the test's runs."""
    folder = tmp_path / "home"
    monkeypatch.setenv("MANYCPU_HOME", str(folder))
    return folder


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes a training script; by default the script only does an all-reduce."""

    def write(text: str = ALL_REDUCE) -> str:
        path = tmp_path / "code" / "train.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def light_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace torch by a stand-in in all processes that the test starts, so that ranks start at once."""
    for name, value in LIGHT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def no_process_left(tmp_path: Path) -> Iterator[None]:
    """Check that no process is left whose command or environment names the test's folder."""
    yield
    # A supervisor ends a moment after it has written the exit record.
    until(lambda: not list(processes_of(tmp_path)))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny random BERT model; return its folder."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def env(tmp_path: Path, tiny_model: Path) -> dict[str, str]:
    """Return the environment of a run of the recipe on tiny data."""
    return tiny_env(tmp_path, tiny_model)
