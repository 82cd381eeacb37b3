"""A command that is killed, or meets an error, at a change that it makes: the same command mends all.

`make faults` tries every change; else there are a few trials of each kind.
"""

import doctest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import fault_judge
from support import fault_trials as trials
from support import namespace_hosts as made_hosts

pytestmark = pytest.mark.timeout(36_000 if trials.ALL else 900)
ON_HOSTS = pytest.mark.skipif(bool(made_hosts.reason()), reason=made_hosts.reason() or "")
CRASHES, ERRORS = ("kill", "kill-begun"), ("ENOSPC", "EIO", "EACCES", "short", "EAGAIN")
SCENES = pytest.mark.parametrize(
    ("scene", "few"),
    [(trials.Runs, 8), (trials.Cleans, 4), (trials.Cancels, 2)],
    ids=["run", "clean", "cancel"],
)
"""The commands, and how many trials of each `make test` makes."""


@pytest.fixture(scope="module")
def server() -> Iterator[trials.Server]:
    with trials.server() as started:
        yield started


@pytest.fixture
def on_host(hosts: made_hosts.Hosts, hidden: Path, tmp_path: Path) -> dict[str, Any]:
    """Describe node-b, whose folder of runs is its own."""
    hostfile, folder = str(hosts.hostfile("node-b")), str(hidden / tmp_path.name)
    target = {"kind": "baremetal", "hostfile": hostfile, "ssh": list(hosts.ssh), "directory": folder}
    return {"target": target, "host": hosts["node-b"]}


def test_the_judge() -> None:
    assert doctest.testmod(fault_judge).failed == 0


@SCENES
def test_a_killed_command(scene: type[trials.Scene], few: int, server: trials.Server, tmp_path: Path) -> None:
    assert trials.tried(scene(tmp_path), server, CRASHES, few) == []


@SCENES
def test_an_error(scene: type[trials.Scene], few: int, server: trials.Server, tmp_path: Path) -> None:
    assert trials.tried(scene(tmp_path), server, ERRORS, few) == []


@ON_HOSTS
@SCENES
def test_a_killed_command_on_hosts(
    scene: type[trials.Scene], few: int, server: trials.Server, tmp_path: Path, on_host: dict[str, Any]
) -> None:
    assert trials.tried(scene(tmp_path, **on_host), server, CRASHES, few // 2) == []


@ON_HOSTS
def test_an_error_on_hosts(server: trials.Server, tmp_path: Path, on_host: dict[str, Any]) -> None:
    assert trials.tried(trials.Runs(tmp_path, **on_host), server, ERRORS, 3) == []
