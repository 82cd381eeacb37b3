"""The trigger and its task, on a real training: what they log, what ends the training, and what must not."""

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import timezone
from airflow.triggers.base import TriggerEvent
from support.event_collector import EventCollector
from support.nasty_lines import NASTY
from support.waiting import until

from manycpu.operators import TrainOperator, following, triggers
from manycpu.operators.airflow_versions import (
    AirflowException,
    AirflowFailException,
    AirflowTaskTimeout,
    TaskDeferred,
)
from manycpu.operators.following import DeferralTimer
from manycpu.operators.job_trigger import JobTrigger
from manycpu.operators.train import WholeRunOperator, _deferral_timeout
from manycpu.operators.triggers import TrainingTrigger
from manycpu.pipeline.listeners import tell
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.errors import ClusterError
from manycpu.pipeline.spec.event_types import ProgressEvent, decode
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.build import build
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.launch import launch
from manycpu.pipeline.verbs.prepare import prepare
from manycpu.pipeline.verbs.report import read_report
from manycpu.pipeline.verbs.stage import stage

WAITS = """
import os, time
from manycpu.pipeline.node.metrics import metrics, progress
for number in range(3):
    progress(step=number + 1)
    print("line", number, flush=True)
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.05)
metrics({"f1": 90.0}, step=3)
print("last line", flush=True)
open(os.path.join(os.environ["MANYCPU_OUTPUT"], "model"), "w").write("x")
"""

pytestmark = pytest.mark.usefixtures("no_process_left", "light_torch")
Training = tuple[RunContext, ProcessHandle, Path]


@pytest.fixture
def training(tmp_path: Path, home: Path, script: Callable[..., str]) -> Iterator[Training]:  # noqa: ARG001
    """Launch a training that runs until its file exists."""
    go = tmp_path / "go"
    run = {"program": script(WAITS), "output": str(tmp_path / "out"), "env": {"GO": str(go)}}
    ctx = open_context(run, None, tmp_path, base=tmp_path)
    prepare(ctx)
    handle, _ = launch(ctx, stage(ctx), build(ctx))
    assert isinstance(handle, ProcessHandle)
    until(lambda: "line 2" in (Path(handle.directory) / "log").read_text())
    yield ctx, handle, go
    cleanup(ctx, keep=False)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> EventCollector:
    """Have somebody hear what operators and triggers do, besides the task's log."""
    collector, listeners = EventCollector(), following.listeners
    monkeypatch.setattr(following, "listeners", lambda *given: (*listeners(*given), collector))
    return collector


def context(try_number: int = 1, max_tries: int = 1) -> Any:
    """Make the context of one try of the task `train`."""
    place = {"dag_id": "d", "run_id": "r", "task_id": "train", "map_index": -1}
    tries = {"try_number": try_number, "max_tries": max_tries, "id": f"id{try_number}"}
    instance = SimpleNamespace(**place, **tries, start_date=timezone.utcnow())
    return {"ti": instance, "dag_run": SimpleNamespace(), "task": None}


@pytest.fixture
def deferred(
    tmp_path: Path,
    home: Path,  # noqa: ARG001
    script: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[TrainOperator]:
    """Make a task whose first try has deferred; its training runs until there is the file `go`."""
    monkeypatch.setattr(following, "_STAY_IN_WORKER_S", 0.0)
    (tmp_path / "data").write_text("x")
    run = {"program": script(WAITS), "output": str(tmp_path / "out"), "data": str(tmp_path / "data")}
    env = {"GO": str(tmp_path / "go")}
    limit = timedelta(hours=1)
    task = TrainOperator(task_id="train", run=run | {"env": env}, execution_timeout=limit)
    with pytest.raises(TaskDeferred):
        task.execute(context())
    yield task
    cleanup(task.open(context()), keep=False)


def trigger(handle: ProcessHandle, **more: Any) -> TrainingTrigger:
    """Make a trigger as the triggerer does: from what another one was serialised to."""
    made = TrainingTrigger(
        handle=handle.model_dump(mode="json"), cursor=0, by="task train, try 1 (id)", **more
    )
    path, kwargs = made.serialize()
    assert path == "manycpu.operators.triggers.TrainingTrigger"
    assert len(repr(kwargs)) < 1000
    return TrainingTrigger(**kwargs)


async def event(trigger: TrainingTrigger) -> TriggerEvent:
    return await anext(aiter(trigger.run()))


def told(said: str) -> list[str]:
    """List what the script said, of all that was logged."""
    return re.findall(r"\[rank 0 \S+\] (line \d|last line)", said)


async def follows(handle: ProcessHandle) -> None:
    """Wait until a trigger has begun to tell what there is."""
    folder = Path(handle.directory)
    # What was told is noted after it was told: a trigger that is cancelled in between would report it twice.
    await asyncio.to_thread(until, lambda: any(int(told.read_text() or 0) for told in folder.glob("told.*")))


def test_the_lease_of_what_it_follows_is_renewed(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    ctx, handle, go = training
    monkeypatch.setattr("manycpu.pipeline.ledger.base.renewal_pause", lambda: 0.01)
    ctx.ledger.change_lease(until=0)

    async def follow() -> TriggerEvent:
        following = asyncio.create_task(event(trigger(handle)))
        renewed = partial(until, lambda: ctx.ledger.lease().held(time.time()), 60)
        await asyncio.to_thread(renewed)
        go.touch()
        return await following

    assert asyncio.run(follow()).payload["status"]["state"] == "succeeded"


def test_every_line_and_event_once_and_the_end_soon(
    training: Training, collector: EventCollector, capfd: pytest.CaptureFixture[str]
) -> None:
    _, handle, go = training

    async def moved() -> TriggerEvent:
        first = asyncio.create_task(event(trigger(handle)))
        await follows(handle)
        first.cancel("the triggerer goes away; another one takes over")
        await asyncio.gather(first, return_exceptions=True)
        go.touch()
        return await event(trigger(handle))

    payload = asyncio.run(moved()).payload
    ended = time.time()
    assert payload["status"]["state"] == "succeeded"
    assert payload["handle"] == handle.model_dump(mode="json")
    said = "".join(capfd.readouterr())
    assert told(said) == ["line 0", "line 1", "line 2", "last line"]
    events_ = [kind for kind in collector.kinds if kind != "start"]
    assert events_ == ["proof", "progress 1", "progress 2", "progress 3", "metrics 3", "exit"]
    # A fraction of a second, where others leave it the cores.
    assert ended - (Path(handle.directory) / "exit.json").stat().st_mtime < 10


def test_a_triggerer_that_goes_leaves_the_training(training: Training) -> None:
    ctx, handle, _ = training

    async def leave() -> None:
        gone = trigger(handle)
        task = asyncio.create_task(event(gone))
        await follows(handle)
        task.cancel("the triggerer goes away")
        await asyncio.gather(task, return_exceptions=True)
        await gone.cleanup()

    asyncio.run(leave())
    assert not attempt_status(ctx, handle, ctx.ledger.read()).state.terminal


def test_a_person_ends_the_training_and_the_record_says_who(training: Training) -> None:
    ctx, handle, _ = training
    asyncio.run(trigger(handle).on_kill())
    entry = ctx.ledger.read()
    assert attempt_status(ctx, handle, entry).state == "cancelled"
    assert entry.cancelled == {1: "task train, try 1 (id)"}


def test_a_triggerer_that_lost_its_trigger_to_another_one_leaves_the_training(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, handle, _ = training
    monkeypatch.setattr(triggers, "state_of", lambda _place: "deferred")
    asyncio.run(trigger(handle, place={"task_id": "t"}).on_kill())
    assert ctx.ledger.read().cancelled == {}


def test_a_run_that_is_its_tasks_own_goes_with_it_unless_the_task_was_cleared(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No worker comes back to a deferred task that a person has ended."""
    ctx, handle, _ = training
    states, task = {1: None, 2: "failed"}, {"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": -1}
    asked: list[Any] = []

    def state_of(place: dict[str, Any]) -> str | None:
        asked.append(place)
        return states[len(asked)]

    monkeypatch.setattr(triggers, "state_of", state_of)
    asyncio.run(trigger(handle, cleans=task).on_kill())
    assert ctx.ledger.read().cancelled == {1: "task train, try 1 (id)"}, "the next try resumes from here"
    asyncio.run(trigger(handle, cleans=task).on_kill())
    assert asked == [task, task]
    assert not ctx.ledger.exists()
    assert read_report(ctx).state == "cancelled"


@pytest.mark.parametrize(("state", "goes"), [("skipped", True), ("removed", True), ("failed", False)])
def test_where_no_other_task_runs_the_run_goes_with_the_task_that_trains(
    training: Training, monkeypatch: pytest.MonkeyPatch, state: str, *, goes: bool
) -> None:
    """At the ``dagrun_timeout`` of a DAG, Airflow skips all that has not ended, teardowns too."""
    ctx, handle, _ = training
    monkeypatch.setattr(triggers, "state_of", lambda _place: state)
    place = {"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": -1}
    asyncio.run(trigger(handle, place=place).on_kill())
    assert ctx.ledger.exists() is not goes
    if goes:
        assert read_report(ctx).state == "cancelled"


@pytest.mark.parametrize(("state", "goes"), [("skipped", True), ("failed", False)])
def test_a_worker_cleans_up_too_where_no_other_task_runs(
    training: Training, monkeypatch: pytest.MonkeyPatch, state: str, *, goes: bool
) -> None:
    ctx, handle, _ = training
    monkeypatch.setattr("manycpu.operators.train.state_of", lambda _place: state)
    instance = SimpleNamespace(
        dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1, id="id", start_date=timezone.utcnow()
    )
    with pytest.raises(AirflowFailException, match="ended this task, and the training with it"):
        TrainOperator(task_id="t")._watch_in_worker({"ti": instance}, ctx, handle)  # type: ignore[typeddict-item] # noqa: SLF001
    assert ctx.ledger.exists() is not goes


@pytest.mark.parametrize(
    ("states", "state"), [({}, "removed"), ({"r": {"t": None}}, None), ({"r": {"t": "failed"}}, "failed")]
)
def test_a_task_that_is_gone_with_its_dag_run_is_no_task_that_was_cleared(
    monkeypatch: pytest.MonkeyPatch, states: dict[str, dict[str, str | None]], state: str | None
) -> None:
    asked = "airflow.sdk.execution_time.task_runner.RuntimeTaskInstance.get_task_states"
    monkeypatch.setattr(asked, lambda **_: states)
    assert following.state_of({"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": -1}) == state


def test_the_training_is_ended_once_airflow_answers_though_airflow_waits_only_a_second(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, handle, _ = training
    answers = chain([""], repeat("failed"))

    def state_of(_place: dict[str, Any]) -> str:
        if not (answer := next(answers)):
            raise AirflowException("no answer")
        return answer

    monkeypatch.setattr(triggers, "state_of", state_of)
    monkeypatch.setattr(triggers, "_RETRY_INTERVAL_S", 1.0)
    monkeypatch.setattr(triggers, "_ON_KILL_TIMEOUT_S", 0.1)

    async def kill() -> None:
        await trigger(handle, place={"task_id": "t"}).on_kill()
        await asyncio.gather(*triggers._ENDINGS)  # noqa: SLF001 - Airflow's event loop keeps running too

    asyncio.run(kill())
    assert ctx.ledger.read().cancelled == {1: "task train, try 1 (id)"}


@pytest.mark.parametrize(
    ("message", "state", "ends"),
    [
        ((), "failed", True),
        ((), None, True),  # the task was cleared
        ((), "deferred", False),  # another triggerer has taken over
        (("EOF - shutting down",), "failed", False),
    ],
)
def test_before_airflow_3_3_the_trigger_finds_out_that_a_person_ended_its_task(
    training: Training,
    message: tuple[str, ...],
    state: str | None,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ends: bool,
) -> None:
    ctx, handle, _ = training
    monkeypatch.setattr(triggers, "CALLS_ON_KILL", False)
    monkeypatch.setattr(triggers, "state_of", lambda _place: state)

    async def cancel() -> None:
        task = asyncio.create_task(event(trigger(handle, place={"task_id": "t"})))
        await follows(handle)
        task.cancel(*message)
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(cancel())
    assert attempt_status(ctx, handle, ctx.ledger.read()).state.terminal is ends


def test_the_deadline_ends_the_training(training: Training) -> None:
    ctx, handle, _ = training
    payload = asyncio.run(event(trigger(handle, deadline=time.time() + 1))).payload
    assert payload["status"]["state"] == "cancelled"
    assert ctx.ledger.read().cancelled == {1: "execution_timeout"}


def test_a_retry_attaches_though_the_source_of_its_data_is_gone(
    deferred: TrainOperator, tmp_path: Path
) -> None:
    (tmp_path / "data").unlink()
    (tmp_path / "go").touch()
    deferred.deferrable = False
    assert deferred.execute(context(2))["attempt"] == 1


def test_a_trigger_that_cannot_write_beside_the_log_follows_to_the_end(
    training: Training, capfd: pytest.CaptureFixture[str]
) -> None:
    _, handle, go = training
    made = trigger(handle)
    made._bookmark.mkdir()  # noqa: SLF001 - whose name is taken: no write succeeds, as on a full disk
    go.touch()
    assert asyncio.run(event(made)).payload["status"]["state"] == "succeeded"
    assert told("".join(capfd.readouterr())) == ["line 0", "line 1", "line 2", "last line"]


def test_a_training_that_had_succeeded_at_its_deadline_is_a_success(
    deferred: TrainOperator, tmp_path: Path
) -> None:
    handle, status = ended(deferred, tmp_path / "go")
    payload = {"handle": handle, "status": status}
    assert deferred.execute_complete(context(), payload)["attempt"] == 1


def ended(task: TrainOperator, go: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let the training of a deferred task end; return its handle and status as JSON."""
    go.touch()
    ctx = task.open(context())
    handle = ctx.ledger.read().handle
    assert handle is not None
    until(lambda: attempt_status(ctx, handle, ctx.ledger.read()).state.terminal)
    status = attempt_status(ctx, handle, ctx.ledger.read())
    return handle.model_dump(mode="json"), status.model_dump(mode="json")


DEFERRAL_TIMED_OUT = ("__fail__", {"error": "Trigger timeout"})
"""How Airflow resumes a task that no triggerer has resumed in time."""


def test_the_task_ends_a_training_whose_deadline_no_triggerer_has_kept(deferred: TrainOperator) -> None:
    with pytest.raises(AirflowTaskTimeout, match="it took longer than 1:00:00"):
        deferred.resume_execution(*DEFERRAL_TIMED_OUT, context())
    entry = deferred.open(context()).ledger.read()
    assert (entry.cancelled, entry.ends[1].state) == ({1: "execution_timeout"}, "cancelled")


def test_a_training_that_ended_while_no_triggerer_was_there_is_a_success(
    deferred: TrainOperator, tmp_path: Path
) -> None:
    ended(deferred, tmp_path / "go")
    assert deferred.resume_execution(*DEFERRAL_TIMED_OUT, context())["attempt"] == 1


def test_a_training_that_a_person_cancelled_while_no_triggerer_was_there_has_not_timed_out(
    deferred: TrainOperator,
) -> None:
    cancel(deferred.open(context()), by="manycpu cancel")
    with pytest.raises(AirflowFailException, match=r"ended by manycpu cancel"):
        deferred.resume_execution(*DEFERRAL_TIMED_OUT, context())


def test_a_timeout_between_the_launch_and_the_first_look_ends_the_training(
    deferred: TrainOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rings(*_: Any) -> None:
        raise AirflowTaskTimeout

    monkeypatch.setattr(following, "listeners", rings)
    with pytest.raises(AirflowTaskTimeout):
        deferred.execute(context(2))
    assert deferred.open(context()).ledger.read().cancelled == {1: "execution_timeout"}


def test_a_triggerer_that_does_not_see_the_training_sends_its_task_back_to_the_worker(
    deferred: TrainOperator, tmp_path: Path
) -> None:
    handle, _ = ended(deferred, tmp_path / "go")
    elsewhere = {**handle, "directory": str(tmp_path / "no" / "such" / "folder")}
    settled = time.time() + 1
    sent = asyncio.run(event(TrainingTrigger(handle=elsewhere, cursor=0, by="me", not_before=settled)))
    assert time.time() >= settled
    assert deferred.execute_complete(context(), sent.payload)["attempt"] == 1


def test_the_worker_that_follows_after_a_deferral_keeps_the_deadline_of_the_try(
    deferred: TrainOperator,
) -> None:
    late = context()
    late["ti"].start_date -= timedelta(hours=1)
    entry = deferred.open(late).ledger.read()
    assert entry.handle is not None
    sent = {"handle": entry.handle.model_dump(mode="json"), "status": {"state": "unknown"}}
    with pytest.raises(AirflowTaskTimeout, match="it took longer than 1:00:00"):
        deferred.execute_complete(late, sent)
    assert deferred.open(late).ledger.read().cancelled == {1: "execution_timeout"}


def test_a_try_whose_task_was_tried_again_meanwhile_does_not_clean_up(deferred: TrainOperator) -> None:
    task = WholeRunOperator(task_id="train", run=deferred.run)
    for number in (3, 2):  # the earlier try began last: its process was frozen
        with pytest.raises(TaskDeferred):
            task.execute(context(number))
    with pytest.raises(AirflowException, match="lost"):
        task.resume_execution("__fail__", {"error": "lost"}, context(2, max_tries=1))
    assert task.open(context()).ledger.read().cancelled == {}
    with pytest.raises(AirflowException, match="lost"):
        task.resume_execution("__fail__", {"error": "lost"}, context(3, max_tries=2))
    assert not task.open(context()).ledger.exists()


def test_the_event_waits_for_the_scheduler_to_settle(training: Training) -> None:
    _, handle, go = training
    go.touch()
    settled = time.time() + 3
    asyncio.run(event(trigger(handle, not_before=settled)))
    assert time.time() >= settled


def test_no_line_that_only_looks_like_progress_sends_the_task_away() -> None:
    timer = DeferralTimer(try_number=1)
    others = [line for line in NASTY if not isinstance(decode(line), ProgressEvent)]
    assert len(others) > len(NASTY) // 2
    tell([events.RankLine(0, "a", line) for line in others], timer)
    assert not timer.has_expired
    long_rest = events.RankLine(0, "a", events.encode("progress", seconds_left=1e6))
    tell([long_rest], timer)
    assert timer.has_expired
    second = DeferralTimer(try_number=2)
    tell([long_rest], second)
    assert not second.has_expired, "the trigger of a cleared try would take this one's deferral for its own"


def test_a_cluster_that_never_answers_ends_the_trigger_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triggers, "_RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(triggers, "_RETRY_TIMEOUT_S", 0.2)
    tries = []

    def away() -> None:
        tries.append(1)
        raise ClusterError("the API server does not answer")

    job = JobTrigger(handle={"attempt": 1}, cursor=None, by="me")
    with pytest.raises(ClusterError, match="does not answer"):
        asyncio.run(asyncio.wait_for(job._retry_on_thread(away), 300))  # noqa: SLF001 - its one way to any cluster
    assert len(tries) > 1


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_deferral_ends_after_the_deadlines_of_the_run_each_wait_for_nodes_included(restarts: int) -> None:
    run = TrainingRun(program="x", output="/out", queue_timeout=3600, run_timeout=7200, max_restarts=restarts)
    latest = _deferral_timeout(run, Kubernetes(namespace="ml"))
    assert latest is not None
    assert latest.total_seconds() > 3600 * (1 + restarts) + 7200


def test_a_deferral_of_the_longest_run_ends_at_a_date() -> None:
    run = TrainingRun(program="x", output="/out", queue_timeout=3_000_000_000, max_restarts=100)
    latest = _deferral_timeout(run, Kubernetes(namespace="ml"))
    assert latest is not None
    assert timezone.utcnow() + latest > timezone.utcnow()


def test_a_deferral_of_a_run_that_a_queue_may_preempt_has_no_end_of_its_own() -> None:
    run = TrainingRun(program="x", output="/out")
    assert _deferral_timeout(run, Kubernetes(namespace="ml", queue="team-a")) is None
