"""TrainJobs on Kubeflow Trainer, with a runtime of the cluster and with the run's own runtime."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.space import Space
from support.training_scripts import goes_on

from manycpu.pipeline import train
from manycpu.pipeline.listeners import Silent
from manycpu.pipeline.spec.errors import Finding, TrainingFailedError
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.targets.kubernetes import preflight
from manycpu.pipeline.targets.kubernetes.context import is_on_kubernetes
from manycpu.pipeline.targets.open_run import open_context

Fields = dict[str, Any]
MakeRun = Callable[..., Fields]
pytestmark = pytest.mark.pod_security("restricted")

FAILS = """
import os, torch.distributed as dist
print("began", flush=True)
dist.init_process_group()
if dist.get_rank() == 1:
    raise SystemExit("the disk of rank 1 is made of cheese")
dist.barrier()
"""


class Pods(Silent):
    """Listener that inspects the pods when a rank prints a word, and can kill one of them."""

    def __init__(self, namespace: Space, word: str, *, kill: bool = False) -> None:
        self.namespace, self.word, self.kill = namespace, word, kill
        self.heard, self.classes = 0, set[str]()

    def line(self, line: RankLine) -> None:
        if line.text != self.word:
            return
        self.heard += 1
        pods = self.namespace.pods("manycpu/role=rank")
        self.classes |= {str(pod.status.qos_class) for pod in pods}
        if self.kill and self.heard == 2:
            victim = next(pod.metadata.name for pod in pods if "-node-0-1-" in pod.metadata.name)
            self.namespace.core.delete_namespaced_pod(victim, self.namespace.name, grace_period_seconds=0)


def findings(target: Fields, tmp_path: Path) -> list[Finding]:
    run = {"program": "question_answering", "output": str(tmp_path / "out")}
    ctx = open_context(run, target, "test", base=tmp_path)
    assert is_on_kubernetes(ctx)
    return [finding for finding in preflight.findings(ctx) if finding.fatal]


@pytest.mark.parametrize("runtime", ["torch-distributed", pytest.param("own", marks=pytest.mark.long)])
def test_a_failed_rank_is_named_with_its_last_lines_and_begins_once(
    runtime: str, target: Fields, a_run: MakeRun, namespace: Space
) -> None:
    pods = Pods(namespace, "began")
    where = target | {"launch": "trainjob", "runtime": runtime}
    with pytest.raises(TrainingFailedError, match=r"(?s)rank 1 on node-\w failed first.*made of cheese"):
        train(a_run(FAILS), where, run_id="fails", listener=pods)
    assert (pods.heard, pods.classes) == (2, {"Guaranteed"})


def test_a_pod_that_is_lost_is_made_anew_and_the_run_goes_on_from_the_checkpoint(
    target: Fields, a_run: MakeRun, namespace: Space, tmp_path: Path
) -> None:
    pods = Pods(namespace, "reached step 5", kill=True)
    where = target | {"launch": "trainjob", "runtime": "own"}
    report = train(a_run(goes_on(2), max_restarts=2), where, run_id="goes-on", listener=pods)
    assert report.state == "succeeded"
    assert pods.heard >= 2
    assert report.metrics["begun_at"] >= 5
    assert len(report.rounds) >= 2
    log = (tmp_path / "out" / "run.log").read_text()
    assert log.count("reached step 5") >= 2  # also of the pod that is gone
    assert "[rank 0 " in log
    assert "[rank 1 " in log


def test_a_runtime_that_the_cluster_lacks_is_named(target: Fields, tmp_path: Path) -> None:
    where = target | {"launch": "trainjob"}
    assert findings(where, tmp_path) == []
    assert findings(where | {"runtime": "own"}, tmp_path) == []
    (finding,) = findings(where | {"runtime": "torch-tuned"}, tmp_path)
    assert finding.field == "target.runtime"
    assert "'torch-tuned'" in finding.message
    assert re.search("must be created before|not found", finding.message)  # depends on which webhook answers
