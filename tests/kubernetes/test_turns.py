"""Runs that start together when only some fit: each run that fits starts, the oldest first."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.command import wait_for
from cluster.fixtures import TestCluster
from cluster.jobs import pod
from cluster.space import Space
from support.contending_runs import ROOM, hold, start
from support.handmade_jobs import Looker

from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.kubernetes.context import cluster_of
from manycpu.pipeline.targets.kubernetes.following import turns
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import attempt_state

RUNS = 6
SECONDS = 6.0  # training time of each run
LATE = "manycpu.test/late"  # label of the nodes that accept launchers


@pytest.fixture
def six(
    target: dict[str, Any], cluster: TestCluster, tmp_path: Path, namespace: Space
) -> Iterator[list[Looker]]:
    """Start six runs of alternating launch kinds while one of two nodes is full; yield them, oldest first.

    At first each run has space for one pod at most. When the other node has space again, two runs fit.
    """
    image = cluster.image("base")
    full = pod("full", image, "sleep", "600", node=cluster.nodes[1])
    full["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1900m"}}
    namespace.create(full)
    lookers = [start(target, image, tmp_path, number, SECONDS) for number in range(RUNS)]
    waiting = lambda: all([one.look() and one.said("waits for") for one in lookers])  # noqa: C419, E731
    wait_for("all to say what they wait for", waiting, seconds=60)
    namespace.core.delete_namespaced_pod("full", namespace.name, grace_period_seconds=0)
    yield sorted(lookers, key=lambda looker: (looker.handle.created, looker.handle.uid))
    for looker in lookers:
        looker.close()


@pytest.mark.alone
def test_six_that_start_together_finish_two_by_two_in_the_order_in_which_they_came(six: list[Looker]) -> None:
    ended = lambda: all([one.look().state.terminal for one in six])  # noqa: C419, E731
    wait_for("all to end", ended, seconds=150)
    assert [one.seen.state for one in six] == [RunState.SUCCEEDED] * RUNS, "\n".join(map(str, six))
    # The time at which each run had its nodes.
    began = [attempt_state(one.ctx.ledger.read(), one.handle).began for one in six]
    assert began == sorted(began)
    for one in six[ROOM:]:
        assert one.said("waits for 1.4 CPUs; held by run"), one.lines
        assert not [line for line in one.lines if re.search("SIGTERM|exit code|was lost|deleted", line)]


@pytest.fixture
def late(cluster: TestCluster, namespace: Space) -> Iterator[Callable[[], None]]:
    """Return a function that labels the nodes, so that they accept launchers."""
    core = namespace.by_admin.core

    def mark(value: str | None) -> None:
        for node in cluster.nodes:
            core.patch_node(node, {"metadata": {"labels": {LATE: value}}})

    yield lambda: mark("yes")
    mark(None)


@pytest.mark.alone
def test_two_mpijobs_of_two_namespaces_whose_workers_hold_what_their_launchers_wait_for_both_end(
    target: dict[str, Any],
    second: Space,
    cluster: TestCluster,
    tmp_path: Path,
    late: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "_HOLD_S", 20.0)
    monkeypatch.setattr(turns, "_REST_S", 15.0)
    targets = target, target | {"namespace": second.name, "connection": str(second.kubeconfig)}
    lookers = [
        hold(where | {"launch": "mpijob"}, cluster.image("base"), tmp_path, {LATE: "yes"})
        for where in targets
    ]
    held = lambda: all([one.look() and len(placed(one)) == 2 for one in lookers])  # noqa: C419, E731
    wait_for("the workers of both to have nodes", held, seconds=60)
    late()
    ended = lambda: all([one.look().state.terminal for one in lookers])  # noqa: C419, E731
    wait_for("both to end", ended, seconds=150)
    for one in lookers:
        one.close()
    assert [one.seen.state for one in lookers] == [RunState.SUCCEEDED] * 2, "\n".join(map(str, lookers))
    assert any("Suspended" in conditions(one) for one in lookers), [one.lines for one in lookers]


def placed(one: Looker) -> list[str]:
    """Return the names of the run's pods that have a node."""
    return [
        pod["metadata"]["name"]
        for pod in cluster_of(one.ctx).list("Pod", labels(one.ctx.name))
        if pod["spec"].get("nodeName")
    ]


def conditions(one: Looker) -> list[str]:
    """Return the types of the conditions that the operator has set on the run's job."""
    (job,) = cluster_of(one.ctx).list("MPIJob", labels(one.ctx.name))
    return [condition["type"] for condition in job["status"]["conditions"]]
