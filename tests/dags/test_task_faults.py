"""A worker or a triggerer that is killed, or meets an error, at a change: the next try puts all in order.

`make faults` tries every change; else there are a few trials.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import fault_scenes
from support.fault_scenes import RunsByTasks
from support.fault_trials import ALL, AT_ONCE, Team, trial, tried, usual

from manycpu.operators.airflow_versions import CALLS_ON_KILL

pytestmark = [
    pytest.mark.timeout(36_000 if ALL else 900),
    pytest.mark.skipif(not CALLS_ON_KILL, reason="it calls Airflow 3.3 where that has no public names"),
]


@pytest.fixture(scope="module")
def teams(new_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Team]]:
    folder = tmp_path_factory.mktemp("tasks")
    with ExitStack() as stack:
        found = list[Team]()
        for number in range(AT_ONCE if ALL else 1):
            airflow = folder / f"airflow{number}"
            airflow.mkdir()
            scene = RunsByTasks(folder / f"scene{number}", airflow, new_database)
            found.append((scene, stack.enter_context(fault_scenes.server("airflow", airflow=airflow))))
        yield found


@pytest.mark.parametrize("crashes", [True, False] if ALL else [True])
def test_a_fault(teams: list[Team], *, crashes: bool) -> None:
    assert tried(teams, 2, crashes=crashes) == []


def test_what_a_clean_up_left_is_deleted_by_its_next_try(teams: list[Team]) -> None:
    places, expected = usual(*teams[0])
    removal = next(f"{number} {place}" for number, place in enumerate(places, 1) if "os.remove log" in place)
    assert trial(*teams[0], ("EIO", removal), expected) == (0, True, [])
