"""A command that is killed, or meets an error, at a change that it makes: the same command mends all.

`make faults` tries every change; else there are a few trials of each kind.
"""

import doctest
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import fault_judge
from support import fault_trials as trials
from support import namespace_hosts as made_hosts

pytestmark = pytest.mark.timeout(36_000 if trials.ALL else 900)
CRASHES, ERRORS = ("kill", "kill-begun"), ("ENOSPC", "EIO", "EACCES", "short", "EAGAIN")
SCENES = {"run": (trials.Runs, 8), "clean": (trials.Cleans, 4), "cancel": (trials.Cancels, 2)}
"""The commands, and how many trials of each there are unless every change is tried."""
ON_HOSTS = SCENES if trials.ALL else ["run"]


@pytest.fixture(scope="module")
def server() -> Iterator[trials.Server]:
    with trials.server() as started:
        yield started


def test_the_judge() -> None:
    assert doctest.testmod(fault_judge).failed == 0


@pytest.mark.parametrize("faults", [CRASHES, ERRORS], ids=["killed", "error"])
@pytest.mark.parametrize("command", SCENES)
def test_a_fault(command: str, faults: tuple[str, ...], server: trials.Server, tmp_path: Path) -> None:
    scene, few = SCENES[command]
    assert trials.tried(scene(tmp_path), server, faults, few) == []


@pytest.mark.skipif(bool(made_hosts.reason()), reason=made_hosts.reason() or "")
@pytest.mark.parametrize("command", ON_HOSTS)
def test_a_fault_with_hosts(
    command: str, server: trials.Server, tmp_path: Path, hosts: made_hosts.Hosts, hidden: Path
) -> None:
    scene, _ = SCENES[command]
    target = {"kind": "baremetal", "hostfile": str(hosts.hostfile("node-b")), "ssh": list(hosts.ssh)}
    target["directory"] = str(hidden / tmp_path.name)  # which node-b has of its own
    here = scene(tmp_path, target, hosts["node-b"])
    assert trials.tried(here, server, (*CRASHES, *ERRORS), 5) == []
