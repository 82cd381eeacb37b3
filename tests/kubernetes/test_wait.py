"""Waiting for jobs on the cluster: what is said while they wait, how they end, and that no line is lost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.faults import Faults
from cluster.fixtures import TestCluster
from cluster.space import Space
from kubernetes import client
from kubernetes_jobs import Looker, Waiting, begin

from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.wait import observed_of

Begin = Callable[..., Waiting]
COUNT = "for n in range({n}): say(f'line {{n}}'); time.sleep({pause})"


@pytest.fixture
def a_job(target: dict[str, Any], cluster: TestCluster, tmp_path: Path) -> Begin:
    """Begin a run whose job a test makes by hand."""
    return lambda **run: begin(target, cluster.image("base"), tmp_path, **run)


@pytest.fixture
def look() -> Iterator[Callable[..., Looker]]:
    """Look at jobs, and stop doing so at the end."""
    lookers: list[Looker] = []

    def make(waiting: Waiting, handle: Any, cursor: Any = None) -> Looker:
        lookers.append(Looker(waiting.ctx, handle, cursor))
        return lookers[-1]

    yield make
    for looker in lookers:
        looker.watch.close()


def test_every_line_of_every_rank_is_told_once_and_in_order(
    a_job: Begin, look: Callable[..., Looker]
) -> None:
    waiting = a_job(nnodes=2)
    handle = waiting.create(COUNT.format(n=200, pause=0.002))
    looker = look(waiting, handle)
    seen = looker.to_the_end()
    assert seen.state is RunState.SUCCEEDED
    for rank in (0, 1):
        assert looker.said(f"{rank}: line ") == [f"{rank}: line {n}" for n in range(200)]
    observed = observed_of(waiting.ctx, handle)
    assert (observed.world_size, len(observed.ranks), observed.backend) == (2, 2, "gloo")
