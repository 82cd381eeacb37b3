"""A command that is killed, or meets an error, at a request to the API server: the same command mends all.

`make faults` tries every request; else there are a few trials of each kind.
"""

import doctest
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import fault_trials, request_faults, request_trials
from support.fault_trials import ALL, Server
from support.request_trials import CancelsThere, CleansThere, Place, Pushes, RunsThere

pytestmark = pytest.mark.timeout(36_000 if ALL else 900)
CLAIMS = [None, "data"] if ALL else ["data"]
"""The claim of the run; None: one of its own."""
SCENES = {"run": (RunsThere, 4), "clean": (CleansThere, 2), "cancel": (CancelsThere, 1)}
"""The commands, and how many trials of each there are unless every request is tried."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fault_trials.server("kubernetes") as started:
        yield started


@pytest.fixture(scope="module")
def place(server: Server) -> Iterator[Place]:
    with request_trials.place(server) as made:
        yield made


def test_which_faults_fit() -> None:
    assert doctest.testmod(request_faults).failed == 0


@pytest.mark.parametrize("crashes", [True, False], ids=["killed", "error"])
@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("command", SCENES)
def test_a_fault(
    command: str, claim: str | None, server: Server, place: Place, tmp_path: Path, *, crashes: bool
) -> None:
    scene, few = SCENES[command]
    assert request_trials.tried(scene(tmp_path, place, claim), server, few, crashes=crashes) == []


@pytest.mark.parametrize("crashes", [True, False], ids=["killed", "error"])
def test_a_fault_of_the_registry(server: Server, place: Place, tmp_path: Path, *, crashes: bool) -> None:
    with request_trials.registry(tmp_path / "registry", place) as host:
        scene = Pushes(tmp_path / "scene", place)
        scene.registry = host
        assert request_trials.tried(scene, server, 3, crashes=crashes) == []
