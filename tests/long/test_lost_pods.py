"""Runs that lose pods: a round whose ranks have all ended is finished, and an evicted worker leaves none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.command import wait_for
from cluster.faults import Faults
from cluster.space import Space
from support.losing_pods import LosesAtStep5
from support.training_scripts import goes_on

from manycpu.pipeline import train
from manycpu.pipeline.listeners import Silent
from manycpu.pipeline.spec.errors import TrainingFailedError
from manycpu.pipeline.spec.event_types import Event, ExitEvent
from manycpu.pipeline.spec.events import RankLine

pytestmark = pytest.mark.pod_security("restricted")


def test_of_an_mpijob_whose_worker_is_evicted_no_pod_stays(
    target: dict[str, Any], a_run: Callable[..., dict[str, Any]], namespace: Space, tmp_path: Path
) -> None:
    evictor = LosesAtStep5(namespace, ranks=2, by_eviction=True)
    with pytest.raises(TrainingFailedError):
        train(a_run(goes_on(2)), target | {"launch": "mpijob"}, run_id="evicted", listener=evictor)
    assert evictor.there > 2
    assert namespace.pods() == []
    assert "reached step 5" in (tmp_path / "out" / "run.log").read_text()


ENDS = """
import os, pathlib, socket, time, torch, torch.distributed as dist
dist.init_process_group()
dist.all_reduce(torch.ones(1))
world = dist.get_world_size()
dist.destroy_process_group()
with open(os.environ["MANYCPU_OUTPUT"] + "/model.txt", "a") as model:
    model.write(f"trained by {world}\\n")
"""
"""A script that appends to the model: the model shows how often the script ran."""
TRAINED = "trained by 2\n" * 2
LAST = """
if socket.gethostname().endswith("-worker-0"):  # where all meet
    time.sleep(2)  # in which the other pod is lost; where it is lost later, that is no trouble either
"""
WHEN_TOLD = """
print("waits", flush=True)
while not pathlib.Path(os.environ["MANYCPU_CHECKPOINTS"], "go").exists():
    time.sleep(0.1)
"""


class Loser(Silent):
    """Listener that deletes the second pod when the rank there has ended."""

    def __init__(self, namespace: Space) -> None:
        self.namespace, self.lost = namespace, ""

    def event(self, event: Event, line: RankLine) -> None:  # noqa: ARG002 - signature of all listeners
        pod = (event.hostname or "") if isinstance(event, ExitEvent) else ""
        if pod.endswith("-worker-1") and not self.lost:
            self.namespace.core.delete_namespaced_pod(pod, self.namespace.name, grace_period_seconds=0)
            self.lost = pod


def test_a_pod_that_is_lost_when_its_ranks_have_ended_turns_nothing_red(
    target: dict[str, Any], a_run: Callable[..., dict[str, Any]], namespace: Space, tmp_path: Path
) -> None:
    """The run does not wait as long as torchrun does for the agent of a lost pod.

    torchrun waits 300 s. The run waits half a minute after the last rank's end.
    """
    loser = Loser(namespace)
    # The run times out before torchrun would.
    run = a_run(ENDS + LAST, nnodes="1:2", max_restarts=3, spread="prefer", run_timeout=280)
    report = train(run, target, run_id="ends", listener=loser)
    assert loser.lost
    assert (report.state, report.attempts, report.left_behind) == ("succeeded", 1, [])
    assert [found["world_size"] for found in report.rounds] == [2]
    assert (tmp_path / "out" / "model.txt").read_text() == TRAINED


class Freezer(Silent):
    """Listener that freezes the kubelet of the first pod's node until that pod is evicted."""

    def __init__(self, namespace: Space, faults: Faults) -> None:
        self.namespace, self.faults, self.waiting, self.evicted = namespace, faults, 0, False

    def line(self, line: RankLine) -> None:
        self.waiting += line.text == "waits"
        if self.waiting == 2:
            self.waiting += 1
            (claim,) = self.namespace.core.list_namespaced_persistent_volume_claim(self.namespace.name).items
            with self.faults.kubelet_frozen(self._first().spec.node_name):
                self.faults.touch(self.namespace, claim.metadata.name, "checkpoints", "go")
                wait_for("the first pod to be evicted", self._is_evicted, seconds=180)
                self.evicted = True

    def _first(self) -> Any:
        (pod,) = self.namespace.pods("manycpu/role=rank,training.kubeflow.org/replica-index=0")
        return pod

    def _is_evicted(self) -> bool:
        return self._first().metadata.deletion_timestamp is not None


@pytest.mark.alone
def test_ranks_that_end_while_a_kubelet_cannot_tell_are_believed_by_what_they_recorded(
    target: dict[str, Any],
    a_run: Callable[..., dict[str, Any]],
    namespace: Space,
    faults: Faults,
    tmp_path: Path,
) -> None:
    freezer = Freezer(namespace, faults)
    report = train(a_run(ENDS + WHEN_TOLD), target, run_id="frozen", listener=freezer)
    assert freezer.evicted
    assert (report.state, report.attempts, report.left_behind) == ("succeeded", 1, [])
    assert (tmp_path / "out" / "model.txt").read_text() == TRAINED
