"""What every test may use: a folder for runs of its own, and scripts to train."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import processes_of, until
from node_runs import LIGHT
from programs import end_programs, take_signals

# One Airflow of its own for e2e, ui and kubernetes, and one in this process for dags and kubernetes.
pytest_plugins = ["stages", "standalone", "dag_runs"]
take_signals()

ALL_REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group()
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), flush=True)
if dist.get_rank() == 0:
    open(os.path.join(os.environ["MANYCPU_OUTPUT"], "model.txt"), "w").write(f"sum {int(total)}")
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def _programs() -> Iterator[None]:
    with end_programs():
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the test a folder for its runs."""
    folder = tmp_path / "home"
    monkeypatch.setenv("MANYCPU_HOME", str(folder))
    return folder


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Write a script into a folder of its own, by default one that trains nothing but meets the others."""

    def write(text: str = ALL_REDUCE) -> str:
        path = tmp_path / "code" / "train.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def light_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what the test starts find a stand-in for torch: ranks begin at once."""
    for name, value in LIGHT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def no_process_left(tmp_path: Path) -> Iterator[None]:
    """See that nothing that knows the test's folder lives on."""
    yield
    until(lambda: not list(processes_of(tmp_path)))  # a supervisor ends after it has written how all ended
