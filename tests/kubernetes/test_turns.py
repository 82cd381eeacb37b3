"""Runs that start together where there is room for some of them: whatever fits runs, the oldest first."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.command import wait_for
from cluster.fixtures import TestCluster
from kubernetes_jobs import Looker
from kubernetes_turns import ROOM, start, times

from manycpu.pipeline.spec.state import RunState

RUNS = 6
SECONDS = 8.0  # that each of them trains


@pytest.fixture
def six(target: dict[str, Any], cluster: TestCluster, tmp_path: Path) -> Iterator[list[Looker]]:
    """Start six runs at once, PyTorchJobs and MPIJobs by turns; the oldest first."""
    image = cluster.image("base")
    lookers = [start(target, image, tmp_path, number, SECONDS) for number in range(RUNS)]
    import sys; sys.path.insert(0,'/tmp/gangtmp'); from dump import dump
    yield sorted(lookers, key=lambda looker: (looker.handle.created, looker.handle.uid))
    dump(lookers)
    for looker in lookers:
        looker.close()


@pytest.mark.timeout(400)
def test_six_that_start_together_finish_two_by_two_in_the_order_in_which_they_came(six: list[Looker]) -> None:
    wait_for("all to end", lambda: all([one.look().state.terminal for one in six]), seconds=75)  # noqa: C419
    assert [one.seen.state for one in six] == [RunState.SUCCEEDED] * RUNS, [one.seen for one in six]
    began = [times(one)[0] for one in six]
    ended = [times(one)[1] for one in six]
    for number in range(ROOM, RUNS):
        assert began[number] > min(ended[number - ROOM : number])  # when one of those before it made room
        assert began[number] > max(began[: number - 1])
    for one in six[ROOM:]:
        assert one.said("waits for 1.4 CPUs; held by run"), one.lines
        assert not [line for line in one.lines if re.search("SIGTERM|exit code|was lost", line)]
