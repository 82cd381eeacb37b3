"""A command that is killed, or meets an error, at a change that it makes: the next puts all in order.

`make faults` tries every change; else there are a few trials of each kind.
"""

import doctest
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
from support import fault_judge, fault_scenes
from support import namespace_hosts as made_hosts
from support.fault_scenes import (
    Cancels,
    Cleans,
    Fails,
    Resumes,
    Runs,
    RunsAfterClockJump,
    RunsAfterClockJumpBack,
    RunsAfterLostModel,
    RunsAfterPowerLoss,
    RunsWithFaultsInSupervisor,
    Scene,
    Server,
)
from support.fault_trials import ALL, ASKED, AT_ONCE, Team, disturbed, tried

pytestmark = pytest.mark.timeout(36_000 if ALL else 900)
Teams = Callable[[type[Scene]], list[Team]]
Few = dict[bool, int]
SCENES: dict[str, tuple[type[Scene], Few]] = {
    "run": (Runs, {True: 2, False: 5}),  # one of each kind
    "supervisor": (RunsWithFaultsInSupervisor, {True: 1, False: 1}),
    "clean": (Cleans, {True: 1, False: 1}),
    "cancel": (Cancels, {True: 1, False: 1}),
}
"""The commands, and how many crashes and errors of each there are unless every change is tried."""
if ASKED:
    SCENES |= {"resume": (Resumes, {True: 8, False: 8}), "fails": (Fails, {True: 8, False: 8})}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(fault_scenes.server()) for _ in range(AT_ONCE)]


@pytest.fixture(scope="module")
def teams(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Teams:
    """Return a function that makes a scene once: what its command does without a fault, it does once."""

    @cache
    def of(scene: type[Scene]) -> list[Team]:
        folder = tmp_path_factory.mktemp(scene.__name__)
        return [(scene(folder / f"scene{number}"), server) for number, server in enumerate(servers)]

    return of


def test_the_judge() -> None:
    assert doctest.testmod(fault_judge).failed == 0


@pytest.mark.parametrize("crashes", [True, False], ids=["killed", "error"])
@pytest.mark.parametrize("command", SCENES)
def test_a_fault(command: str, teams: Teams, *, crashes: bool) -> None:
    scene, few = SCENES[command]
    assert tried(teams(scene), few[crashes], crashes=crashes) == []


@pytest.mark.skipif(not ASKED, reason="other crashes are tried: this is part of `make faults`")
@pytest.mark.parametrize("scene", [RunsAfterClockJump, RunsAfterClockJumpBack])
def test_a_clock_that_jumps_after_a_crash(scene: type[Scene], teams: Teams) -> None:
    assert tried(teams(scene), 2, crashes=True) == []


@pytest.mark.skipif(not ASKED, reason="other crashes are tried: this is part of `make faults`")
def test_a_model_that_is_deleted_after_a_crash(teams: Teams) -> None:
    assert tried(teams(RunsAfterLostModel), 2, crashes=True) == []


@pytest.mark.skipif(not ASKED, reason="other crashes are tried: this is part of `make faults`")
def test_a_loss_of_power(teams: Teams) -> None:
    assert tried(teams(RunsAfterPowerLoss), 2, crashes=True) == []


@pytest.mark.parametrize("scene", [Runs, RunsWithFaultsInSupervisor] if ASKED else [Runs])
def test_a_clock_that_jumps_changes_nothing(scene: type[Scene], teams: Teams) -> None:
    assert disturbed(teams(scene), ("ahead", "back"), 2) == []


@pytest.fixture(scope="module")
def with_hosts(servers: list[Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teams]:
    """Return a function that makes a scene for each server, each with a host of its own."""
    folder = tmp_path_factory.mktemp("hosts")
    own = tmp_path_factory.mktemp("own")  # each host has files of its own there
    names = [f"node-{number}" for number, _ in enumerate(servers)]
    with made_hosts.made(folder, names, {name: [str(own)] for name in names}) as hosts:

        @cache
        def of(scene: type[Scene]) -> list[Team]:
            teams = list[Team]()
            for name, server in zip(names, servers, strict=True):
                target = {"kind": "baremetal", "hostfile": str(hosts.hostfile(name)), "ssh": list(hosts.ssh)}
                target["directory"] = str(own / f"{scene.__name__}-{name}")
                here = scene(tmp_path_factory.mktemp(scene.__name__), target, hosts[name])
                here.where = "baremetal"
                teams.append((here, server))
            return teams

        yield of
    assert hosts.leftovers() == []


@pytest.mark.skipif(not ASKED, reason="trials by ssh take long: part of `make faults`")
@pytest.mark.skipif(bool(made_hosts.reason()), reason=made_hosts.reason() or "")
@pytest.mark.parametrize("crashes", [True, False], ids=["killed", "error"])
@pytest.mark.parametrize("command", ["clean", "cancel", "run"])
def test_a_fault_with_hosts(command: str, with_hosts: Teams, *, crashes: bool) -> None:
    scene, _ = SCENES[command]
    assert tried(with_hosts(scene), 2, crashes=crashes) == []
