"""A command that is killed, or meets an error, at a change that it makes: the next puts all in order.

`make faults` tries every change; else there are a few trials of each kind.
"""

import doctest
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

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
    RunsAfterPowerLoss,
    RunsWithFaultsInSupervisor,
    Scene,
    Server,
)
from support.fault_trials import ALL, ASKED, AT_ONCE, disturbed, tried

pytestmark = pytest.mark.timeout(36_000 if ALL else 900)
SCENES: dict[str, tuple[type[Scene], int]] = {
    "run": (Runs, 8),
    "supervisor": (RunsWithFaultsInSupervisor, 1),
    "clean": (Cleans, 4),
    "cancel": (Cancels, 2),
}
"""The commands, and how many trials of each there are unless every change is tried."""
if ASKED:
    SCENES |= {"resume": (Resumes, 8), "fails": (Fails, 8)}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(fault_scenes.server()) for _ in range(AT_ONCE)]


def test_the_judge() -> None:
    assert doctest.testmod(fault_judge).failed == 0


@pytest.mark.parametrize("crashes", [True, False], ids=["killed", "error"])
@pytest.mark.parametrize("command", SCENES)
def test_a_fault(command: str, servers: list[Server], tmp_path: Path, *, crashes: bool) -> None:
    scene, few = SCENES[command]
    teams = [(scene(tmp_path / f"scene{number}"), server) for number, server in enumerate(servers)]
    assert tried(teams, few, crashes=crashes) == []


@pytest.mark.skipif(not ASKED, reason="other crashes are tried: this is part of `make faults`")
@pytest.mark.parametrize("scene", [RunsAfterClockJump, RunsAfterClockJumpBack])
def test_a_clock_that_jumps_after_a_crash(scene: type[Scene], servers: list[Server], tmp_path: Path) -> None:
    teams = [(scene(tmp_path / f"scene{number}"), server) for number, server in enumerate(servers)]
    assert tried(teams, 2, crashes=True) == []


@pytest.mark.skipif(not ASKED, reason="other crashes are tried: this is part of `make faults`")
def test_a_loss_of_power(servers: list[Server], tmp_path: Path) -> None:
    teams = [
        (RunsAfterPowerLoss(tmp_path / f"scene{number}"), server) for number, server in enumerate(servers)
    ]
    assert tried(teams, 2, crashes=True) == []


@pytest.mark.parametrize("scene", [Runs, RunsWithFaultsInSupervisor] if ASKED else [Runs])
def test_a_clock_that_jumps_changes_nothing(
    scene: type[Scene], servers: list[Server], tmp_path: Path
) -> None:
    teams = [(scene(tmp_path / f"scene{number}"), server) for number, server in enumerate(servers)]
    assert disturbed(teams, ("ahead", "back"), 4) == []


@pytest.mark.skipif(not ASKED, reason="a trial by ssh takes half a minute: part of `make faults`")
@pytest.mark.skipif(bool(made_hosts.reason()), reason=made_hosts.reason() or "")
@pytest.mark.parametrize("command", ["run", "clean", "cancel"])
def test_a_fault_with_hosts(
    command: str, servers: list[Server], tmp_path: Path, hosts: made_hosts.Hosts, hidden: Path
) -> None:
    scene, _ = SCENES[command]
    target = {"kind": "baremetal", "hostfile": str(hosts.hostfile("node-b")), "ssh": list(hosts.ssh)}
    target["directory"] = str(hidden / tmp_path.name)  # which node-b has of its own
    here = scene(tmp_path, target, hosts["node-b"])
    here.where = "baremetal"
    wrong = [
        breach for crashes in (True, False) for breach in tried([(here, servers[0])], 2, crashes=crashes)
    ]
    assert wrong == []
