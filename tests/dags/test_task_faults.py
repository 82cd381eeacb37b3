"""A worker or a triggerer that is killed, or meets an error, at a change: the next try puts all in order.

`make faults` tries every change; else there are a few trials.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import cluster_scenes, fault_scenes
from support.cluster_scenes import RunsByTasksThere
from support.fault_scenes import RunsAsTask, RunsByTasks, Server
from support.fault_trials import ALL, ASKED, AT_ONCE, Team, trial, tried, usual

from manycpu.operators.airflow_versions import CALLS_ON_KILL

pytestmark = [
    pytest.mark.timeout(36_000 if ALL else 900),
    pytest.mark.skipif(not CALLS_ON_KILL, reason="it calls Airflow 3.3 where that has no public names"),
]


@pytest.fixture(scope="module")
def servers(new_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        made = []
        for _ in range(AT_ONCE if ASKED else 1):
            airflow = tmp_path_factory.mktemp("airflow")
            shutil.copy(new_database, airflow / "new.db")
            made.append(stack.enter_context(fault_scenes.server(airflow=airflow)))
        yield made


@pytest.fixture(scope="module")
def teams(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> list[Team]:
    folder = tmp_path_factory.mktemp("tasks")
    return [(RunsByTasks(folder / f"scene{number}"), server) for number, server in enumerate(servers)]


@pytest.fixture
def teams_there(servers: list[Server], tmp_path: Path) -> Iterator[list[Team]]:
    with ExitStack() as stack:
        places = [stack.enter_context(cluster_scenes.place(server)) for server in servers]
        yield cluster_scenes.teams(RunsByTasksThere, tmp_path, places)


@pytest.mark.parametrize("crashes", [True, False] if ASKED else [True])
def test_a_fault(teams: list[Team], *, crashes: bool) -> None:
    assert tried(teams, 1, crashes=crashes) == []


@pytest.mark.parametrize("crashes", [True, False] if ASKED else [True])
def test_a_fault_on_a_cluster(teams_there: list[Team], *, crashes: bool) -> None:
    assert tried(teams_there, 1, crashes=crashes) == []


def test_what_a_clean_up_left_is_deleted_by_its_next_try(teams: list[Team]) -> None:
    places, expected, _ = usual(*teams[0])
    removal = next(f"{number} {place}" for number, place in enumerate(places, 1) if "os.remove log" in place)
    assert trial(*teams[0], ("EIO", removal), expected) == (0, True, [])


def test_a_whole_run_is_not_trained_again_after_a_kill_before_its_success_is_recorded(
    servers: list[Server], tmp_path: Path
) -> None:
    scene, server = RunsAsTask(tmp_path / "scene"), servers[0]
    expected = usual(scene, server).found
    scene.reset()
    scene.prepare(server)
    scene.env["KILLED"] = str(tmp_path / "killed")
    assert scene.meet(server, None).killed
    again = scene.repeat(server)
    assert again.code == 0, again.said
    assert scene.found() == expected
