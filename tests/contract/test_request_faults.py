"""A command that is killed, or meets an error, at a request to the API server: the next puts all in order.

`make faults` tries every request; else there are a few trials of each kind.
"""

import doctest
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import cluster_scenes, fault_scenes, fault_trials, request_faults
from support.cluster_scenes import (
    CancelsThere,
    CleansThere,
    FailsThere,
    OnCluster,
    Place,
    Pushes,
    ResumesThere,
    RunsAfterClockJumpBackThere,
    RunsAfterClockJumpThere,
    RunsAfterLostModelThere,
    RunsBesideThere,
    RunsThere,
    RunsWithFaultsInPods,
)
from support.fake_api_server import ApiError, Object
from support.fault_scenes import Server
from support.fault_trials import ALL, ASKED, AT_ONCE, Team, accompanied, disturbed, tried
from support.request_faults import HARMLESS
from support.simulated_cluster import SimulatedCluster

pytestmark = pytest.mark.timeout(36_000 if ALL else 900)
HOW = [
    ("data", "pytorchjob"),
    *([(None, "pytorchjob"), (None, "trainjob"), ("data", "mpijob"), (None, "mpijob")] if ASKED else []),
]
"""The claim of the run (None: one of its own), and what launches it."""
SCENES = {
    "run": (RunsThere, 2),
    "pods": (RunsWithFaultsInPods, 1),
    "clean": (CleansThere, 1),
    "cancel": (CancelsThere, 1),
}
"""The commands, and how many trials of each there are unless every request is tried."""
if ASKED:
    SCENES |= {"resume": (ResumesThere, 3), "fails": (FailsThere, 3)}
Teams = Callable[..., list[Team]]


@pytest.fixture(scope="module")
def places() -> Iterator[list[Place]]:
    with ExitStack() as stack:
        servers = [stack.enter_context(fault_scenes.server("kubernetes")) for _ in range(AT_ONCE)]
        yield [stack.enter_context(cluster_scenes.place(server)) for server in servers]


@pytest.fixture
def place(places: list[Place]) -> Place:
    return places[0]


@pytest.fixture
def server(place: Place) -> Server:
    return place.server


@pytest.fixture(scope="module")
def teams(places: list[Place], tmp_path_factory: pytest.TempPathFactory) -> Teams:
    """Return a function that makes a scene once: what its command does without a fault, it does once."""

    @cache
    def of(scene: type[OnCluster], *how: str | None) -> list[Team]:
        return cluster_scenes.teams(scene, tmp_path_factory.mktemp(scene.__name__), places, *how)

    return of


def test_which_faults_fit() -> None:
    assert doctest.testmod(request_faults).failed == 0


@pytest.mark.parametrize("crashes", [True, False], ids=["killed", "error"])
@pytest.mark.parametrize(("claim", "launch"), HOW)
@pytest.mark.parametrize("command", SCENES)
def test_a_fault(
    command: str,
    claim: str | None,
    launch: str,
    teams: Teams,
    *,
    crashes: bool,
) -> None:
    made, few = SCENES[command]
    assert tried(teams(made, claim, launch), few, crashes=crashes) == []


@pytest.mark.skipif(not ASKED, reason="other crashes are tried: this is part of `make faults`")
@pytest.mark.parametrize("scene", [RunsAfterClockJumpThere, RunsAfterClockJumpBackThere])
def test_a_clock_of_the_worker_that_jumps_after_a_crash(scene: type[OnCluster], teams: Teams) -> None:
    assert tried(teams(scene), 2, crashes=True) == []


@pytest.mark.skipif(not ASKED, reason="other crashes are tried: this is part of `make faults`")
def test_a_model_that_is_deleted_after_a_crash(teams: Teams) -> None:
    assert tried(teams(RunsAfterLostModelThere), 2, crashes=True) == []


def test_another_command_beside_a_run_does_no_harm(teams: Teams) -> None:
    assert accompanied(teams(RunsBesideThere), 3) == []


def test_a_harmless_fault_changes_nothing(teams: Teams) -> None:
    assert disturbed(teams(RunsThere, *HOW[0]), HARMLESS, 3) == []


@pytest.mark.parametrize("crashes", [False, True] if ASKED else [False])
def test_a_fault_of_the_registry(server: Server, place: Place, tmp_path: Path, *, crashes: bool) -> None:
    with cluster_scenes.registry(tmp_path / "registry", place) as host:
        scene = Pushes(tmp_path / "scene", place)
        scene.registry = host
        assert tried([(scene, server)], 1, crashes=crashes) == []


def test_a_job_that_succeeds_while_its_logs_do_not_answer_is_not_trained_again(teams: Teams) -> None:
    team = teams(RunsThere, *HOW[0])[0]
    seen, expected, _ = fault_trials.usual(*team)
    log = next(one for one in seen if "/log?" in one)
    assert fault_trials.trial(*team, ("silence", log), expected) == (0, True, [])


def test_a_folder_that_could_not_be_deleted_is_deleted_by_the_next_clean_up(
    teams: Callable[..., list[tuple[RunsThere, Server]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, server = teams(RunsThere, *HOW[0])[0]
    expected = fault_trials.usual(scene, server).found
    scene.reset()
    create = SimulatedCluster._post  # noqa: SLF001 - stands in for a quota

    def refuse(cluster: SimulatedCluster, kind: str, name: str, query: Any, body: Object) -> Object:
        if kind == "Pod" and "cleanup" in body["metadata"]["name"]:
            raise ApiError(403, "exceeded quota: pods")
        return create(cluster, kind, name, query, body)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedCluster, "_post", refuse)
        first = server.type(scene, scene.words)
    assert first.code == 1
    assert "`manycpu clean` tries again" in first.said
    cleaned = server.type(scene, ("clean", scene.named, "--yes", *scene.location))
    assert cleaned.code == 0, cleaned.said
    assert scene.found()["objects"] == expected["objects"]
    assert list(scene.volume.glob(f"**/{scene.named}")) == []
