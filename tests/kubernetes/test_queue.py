"""Runs in a Kueue queue: they wait for quota, are preempted, and resume from their checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.fixtures import TestCluster
from cluster.space import Space
from support.handmade_jobs import Looker, begin
from support.queues import HIGH, QUEUE, Queue, local_queue, queue
from support.training_scripts import goes_on

from manycpu.pipeline import train
from manycpu.pipeline.listeners import Silent
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.job_kinds import PRIORITY_LABEL, QUEUE_LABEL
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.kubernetes import preflight
from manycpu.pipeline.targets.kubernetes.context import is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.launch import status
from manycpu.pipeline.targets.open_run import open_context

Fields = dict[str, Any]
MakeRun = Callable[..., Fields]
KINDS: dict[str, Fields] = {
    "pytorchjob": {"launch": "pytorchjob"},
    "mpijob": {"launch": "mpijob"},
    "trainjob": {"launch": "trainjob"},
}
SLEEP = "time.sleep({seconds})"
UNTIL_TOLD = "while not os.path.exists('/tmp/end'): time.sleep(0.1)"


@pytest.fixture
def for_one(namespace: Space) -> Iterator[Queue]:
    """Create a queue whose quota is enough for one run over both nodes, of any launch kind."""
    with queue(namespace, cpu="2500m") as made:
        yield made


def queued(**more: str) -> Callable[[Fields], None]:
    """Return a change that puts a handmade job into the queue; each rank requests nearly one core."""

    def change(job: Fields) -> None:
        job["metadata"]["labels"] = job["metadata"]["labels"] | {QUEUE_LABEL: QUEUE, **more}
        job["spec"]["runPolicy"]["suspend"] = True
        (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
        container["resources"] = {"requests": {"cpu": "900m", "memory": "20Mi"}}

    return change


@pytest.fixture
def start(target: Fields, cluster: TestCluster, tmp_path: Path) -> Iterator[Callable[..., Looker]]:
    """Return a function that creates and follows a job of two ranks, which sleep or wait for a file."""
    lookers = []

    def make(name: str, seconds: float | None, *, run: Fields | None = None, **more: str) -> Looker:
        waiting = begin(target, cluster.image("base"), tmp_path, name=name, nnodes=2, **(run or {}))
        script = UNTIL_TOLD if seconds is None else SLEEP.format(seconds=seconds)
        lookers.append(Looker(waiting.ctx, waiting.create(script, change=queued(**more))))
        return lookers[-1]

    yield make
    for looker in lookers:
        looker.close()


def end_ranks(namespace: Space, looker: Looker) -> None:
    """Create the file that both ranks of a job wait for; their pods must run."""
    for number in range(2):
        namespace.run(f"{looker.handle.name}-worker-{number}", "touch", "/tmp/end")  # noqa: S108


def test_with_quota_for_one_the_second_waits_says_for_what_and_runs(
    start: Callable[..., Looker], for_one: Queue
) -> None:
    first = start("first", None)
    first.until("its ranks to meet", lambda: first.watch.observed.met)
    second = start("second", 1)
    second.until("its place", lambda: second.said(f"it is number 1 in queue {QUEUE}"))
    assert (
        f"it is number 1 in queue {QUEUE}"
        in status(second.ctx, second.handle, second.ctx.ledger.read()).reason
    )
    third = start("third", 1)
    third.until("its place", lambda: third.said(f"it is number 2 in queue {QUEUE}"))
    assert second.said(f"it is suspended, until Kueue's queue {QUEUE} admits it")
    assert second.said("insufficient unused quota for cpu")
    assert second.seen.state is RunState.PENDING
    assert not second.watch.observed.ranks
    end_ranks(for_one.namespace, first)
    for each in (first, second, third):
        assert each.to_the_end().state is RunState.SUCCEEDED, each.lines


def test_a_run_that_waits_longer_than_it_may_fails_with_what_it_waited_for(
    start: Callable[..., Looker], for_one: Queue
) -> None:
    for_one.set_quota("1")
    waiting = start("waits", 1, run={"queue_timeout": 6})
    seen = waiting.to_the_end()
    assert (seen.state, seen.budget) == (RunState.FAILED, "run.queue_timeout")
    assert "no capacity for it within 6 s" in seen.reason
    assert "insufficient quota for cpu" in seen.reason


def test_a_workload_that_somebody_deactivates_is_told(start: Callable[..., Looker], for_one: Queue) -> None:
    trains = start("trains", None)
    trains.until("its ranks to meet", lambda: trains.watch.observed.met)
    for_one.change_workload({"active": False})
    trains.until(
        "the word", lambda: trains.said("is deactivated: it waits until its spec.active is set to true")
    )
    before = trains.watch.observed.met_last
    for_one.change_workload({"active": True})
    # New pods replace those that the suspension deleted.
    trains.until("its ranks to meet again", lambda: trains.watch.observed.met_last > before)
    end_ranks(for_one.namespace, trains)
    assert trains.to_the_end().state is RunState.SUCCEEDED, trains.lines


class Preempting(Silent):
    """Listener that starts a job of higher priority when the ranks have reached step 5."""

    def __init__(self, interrupt: Callable[[], Looker]) -> None:
        self._interrupt, self.lines = interrupt, list[str]()
        self.urgent: Looker | None = None

    def line(self, line: RankLine) -> None:
        self.lines.append(line.text)
        if line.text == "reached step 5" and self.urgent is None:
            self.urgent = self._interrupt()


@pytest.mark.usefixtures("for_one")
@pytest.mark.parametrize(
    "kind", [*(pytest.param(one, marks=pytest.mark.long) for one in ("pytorchjob", "mpijob")), "trainjob"]
)
def test_a_run_that_is_preempted_goes_on_from_its_checkpoint(
    kind: str, target: Fields, a_run: MakeRun, start: Callable[..., Looker]
) -> None:
    listener = Preempting(lambda: start("urgent", 8, **{PRIORITY_LABEL: HIGH}))
    where = target | KINDS[kind] | {"queue": QUEUE}
    report = train(a_run(goes_on(2), stall_timeout=60), where, run_id="goes-on", listener=listener)
    assert (report.state, report.attempts) == ("succeeded", 1)
    assert report.metrics["begun_at"] >= 5
    assert any("it was preempted: Preempted to accommodate a workload" in line for line in listener.lines)
    assert listener.urgent is not None
    assert listener.urgent.to_the_end().state is RunState.SUCCEEDED
    assert report.left_behind == []


def findings(target: Fields, tmp_path: Path) -> list[Finding]:
    ctx = open_context(
        {"program": "question_answering", "output": str(tmp_path / "out")}, target, "t", base=tmp_path
    )
    assert is_on_kubernetes(ctx)
    return [finding for finding in preflight.findings(ctx) if finding.field.startswith("target.queue")]


def test_preflight_names_the_queue_that_takes_every_trainjob_of_the_namespace(
    target: Fields, for_one: Queue, tmp_path: Path
) -> None:
    where = target | {"launch": "trainjob"}
    assert findings(where, tmp_path) == []
    local_queue(for_one.namespace, "default", behind=for_one.namespace.name)
    (finding,) = findings(where, tmp_path)
    assert "into LocalQueue 'default'" in finding.message
    assert findings(where | {"queue": "default"}, tmp_path) == []


def test_preflight_looks_for_the_queue_and_its_priority(
    target: Fields, for_one: Queue, tmp_path: Path
) -> None:
    assert findings(target | {"queue": QUEUE}, tmp_path) == []
    (finding,) = findings(target | {"queue": "team-b"}, tmp_path)
    assert finding.message == f"there is no LocalQueue 'team-b' in namespace {for_one.namespace.name}"
