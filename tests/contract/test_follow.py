"""What is believed of a job: an end is asked for, whatever a watch that is half dead tells."""

import asyncio
import base64
import pickle
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import api_objects
from support.api_objects import T0, Object, at, container, handle, job, pod, with_sidecar
from support.event_collector import EventCollector
from support.fake_api_server import ApiServer
from support.helper_process import helper_here
from support.waiting import until

from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.cluster_watch import Changes, ClusterWatch
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.ledger.configmap import ConfigMapLedger
from manycpu.pipeline.ledger.file import FileLedger
from manycpu.pipeline.listeners import tell
from manycpu.pipeline.notebook.cell import CellDisplay, Returned
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.errors import DeadlineError, ManycpuError
from manycpu.pipeline.spec.event_types import ResultEvent
from manycpu.pipeline.spec.events import RankLine
from manycpu.pipeline.spec.exit_records import FOLDER, write
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.kubernetes import launch
from manycpu.pipeline.targets.kubernetes.context import cluster_of, sharing
from manycpu.pipeline.targets.kubernetes.following import exit_records, follower
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import (
    AttemptRecorder,
    Cursor,
    attempt_state,
)
from manycpu.pipeline.targets.kubernetes.following.follower import Follower
from manycpu.pipeline.targets.kubernetes.wait import JobWatch
from manycpu.pipeline.targets.outcome import outcome

HOUR = 3600
WORKER = "qa-1-worker-0"


@pytest.fixture(autouse=True)
def _volume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exit_records, "helper", helper_here("", ""))


@pytest.fixture(autouse=True)
def an_hour_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the job have been created an hour ago, by the server's clock."""
    monkeypatch.setattr(api_objects, "T0", int(time.time()) - HOUR)


def worker(number: int = 0, **state: Any) -> Object:
    phase = "Running" if "running" in state else "Succeeded"
    return pod(f"qa-1-worker-{number}", placed=30, phase=phase, containerStatuses=[container(**state)])


def said(seconds: float, event: str, rank: int = 0, **fields: Any) -> str:
    """Write a rank's line as the API gives it."""
    line = events.encode(event, rank=rank, host="node", hostname=f"qa-1-worker-{rank}", **fields)
    return f"{at(seconds)[:-1]}.0Z {events.join(rank, 'node', line)}\n"


def healthy(server: ApiServer) -> None:
    """Have a job whose ranks have met, and which still runs."""
    server.objects = {
        "PyTorchJob": [job("Running")],
        "Pod": [worker(running={"startedAt": at(HOUR - 20)})],
    }
    server.logs[WORKER] = said(HOUR - 10, "proof", world_size=1, round=0, meeting="m")


def ends(server: ApiServer) -> None:
    """Let it succeed."""
    last = {"exitCode": 0, "startedAt": at(HOUR - 20), "finishedAt": at(HOUR)}
    server.objects |= {"PyTorchJob": [job("Succeeded")], "Pod": [worker(terminated=last)]}
    server.logs[WORKER] += said(HOUR, "exit", code=0)


def picture(server: ApiServer) -> list[Changes]:
    """Report the present objects, as a list does."""
    return [Changes(kind, found, [], complete=True) for kind, found in server.objects.items()]


class Following:
    """A follower of the job, and the stream that tells it of the namespace."""

    def __init__(self, server: ApiServer, folder: Path, cursor: Cursor | None = None, **run: Any) -> None:
        ledger = FileLedger(folder / "qa")
        ledger.open(Entry(key="k", name="qa", created=T0, run={}, target={}, attempt=1))
        fields = {"program": "a.py", "output": "o", "stall_timeout": 600, "queue_timeout": 600, **run}
        self.ctx: Any
        self.ctx = SimpleNamespace(name="qa", run=TrainingRun.model_validate(fields), ledger=ledger)
        self.ctx.target = Kubernetes(
            launch="pytorchjob", namespace="ml", claim="data", mount_path=str(folder)
        )
        self.ctx.access = sharing(Cluster(server.connect, "ml"))
        self.connect = server.connect
        self.stream: asyncio.Queue[list[Changes]] = asyncio.Queue()
        self.notes: list[str] = []
        self.lines: list[str] = []
        self.collector = EventCollector()
        self.recorder = AttemptRecorder(self.ctx, handle(), cursor, "")
        self._follower: Follower | None = None

    async def run(self, *told: Changes) -> Status:
        """Follow to the end; first the stream tells this."""
        self.stream.put_nowait(list(told))
        watch = ClusterWatch(self.connect, "ml")
        self._follower = Follower(self.ctx, handle(), watch, self.recorder)
        try:
            return await self._follower.run(self._told(), self._note)
        finally:
            await watch.aclose()

    @property
    def status(self) -> Status:
        """How the job is doing, by its follower."""
        return self._follower.status if self._follower else Status(state=RunState.PENDING)

    async def _told(self) -> AsyncGenerator[list[Changes]]:
        while True:
            yield await self.stream.get()

    async def _note(self, lines: list[RankLine]) -> None:
        self.notes += [line.text for line in lines if line.rank is None]
        self.lines += [line.text for line in lines if line.rank is not None]
        tell(lines, self.collector)


async def followed(server: ApiServer, following: Following, *told: Changes) -> Status:
    """Follow a healthy job that ends once its ranks were heard; first the stream tells this."""
    ending = asyncio.create_task(following.run(*told or picture(server)))
    await asyncio.to_thread(until, lambda: ending.done() or following.recorder.activity.met)
    assert not ending.done(), ending.result()
    ends(server)
    following.stream.put_nowait(picture(server))
    return await ending


def test_a_sidecar_that_crashes_ends_no_training_and_its_log_is_not_read(
    server: ApiServer, tmp_path: Path
) -> None:
    healthy(server)
    killed = {"terminated": {"exitCode": 137, "startedAt": at(3400), "finishedAt": at(3450)}}
    with_sidecar(server.objects["Pod"][0], restarts=9, running={"startedAt": at(3500)}, last=killed)
    following = Following(server, tmp_path)
    assert asyncio.run(followed(server, following)).state is RunState.SUCCEEDED
    assert following.collector.kinds == ["proof", "exit"]


GONE = [Changes(kind, [], [], complete=True) for kind in ("PyTorchJob", "Pod")]
OLD: dict[str, Callable[[], tuple[list[Object], list[Object]]]] = {
    "it was created since": lambda: ([], []),
    "no operator had taken notice": lambda: ([job()], []),
    "it was suspended": lambda: ([job("Suspended", suspend=True)], []),
    "its pod had no node": lambda: ([job("Created")], [pod(WORKER, placed=None)]),
    "its image could never be pulled": lambda: (
        [job("Created")],
        [pod(WORKER, containerStatuses=[container(waiting={"reason": "ErrImageNeverPull"})])],
    ),
}


@pytest.mark.parametrize("case", OLD)
def test_an_old_picture_ends_nothing(case: str, server: ApiServer, tmp_path: Path) -> None:
    healthy(server)
    kinds = zip(server.objects, OLD[case](), strict=True)
    following = Following(server, tmp_path)
    old = [Changes(kind, found, [], complete=True) for kind, found in kinds]
    assert asyncio.run(followed(server, following, *old)).state is RunState.SUCCEEDED
    assert server.deleted == []


def test_pods_that_still_work_are_waited_for_though_a_watch_knows_none(
    server: ApiServer, tmp_path: Path
) -> None:
    healthy(server)
    server.objects["PyTorchJob"] = [job("Succeeded")]
    following = Following(server, tmp_path)
    old = [
        Changes(kind, found, [], complete=True)
        for kind, found in (("PyTorchJob", [job("Succeeded")]), ("Pod", []))
    ]
    assert asyncio.run(followed(server, following, *old)).state is RunState.SUCCEEDED


def test_an_end_that_cannot_be_asked_for_is_not_believed(server: ApiServer, tmp_path: Path) -> None:
    healthy(server)
    server.refuses = {"PyTorchJob"}
    following = Following(server, tmp_path)

    async def run() -> Status:
        ending = asyncio.create_task(followed(server, following, *GONE))
        await asyncio.to_thread(until, lambda: ending.done() or following.notes)
        server.refuses = set()
        return await ending

    assert asyncio.run(run()).state is RunState.SUCCEEDED
    assert "whether it has ended cannot be asked" in following.notes[0]


def test_a_budget_ends_the_wait_though_nobody_answers(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_UNCONFIRMED_S", 0.0)
    healthy(server)
    server.logs[WORKER] = ""
    server.refuses = {"PyTorchJob"}
    seen = asyncio.run(Following(server, tmp_path, stall_timeout=1).run(*picture(server)))
    assert seen.budget == "run.stall_timeout"


def test_a_job_that_is_gone_is_believed_to_be_once_it_was_asked_for(
    server: ApiServer, tmp_path: Path
) -> None:
    seen = asyncio.run(Following(server, tmp_path).run(*GONE))
    assert (seen.state, "somebody deleted it" in seen.reason) == (RunState.FAILED, True)
    assert server.calls["get PyTorchJob"] == 1


def test_silence_counts_while_somebody_listens(server: ApiServer, tmp_path: Path) -> None:
    """There was no follower for longer than ranks may take to meet, or be silent."""
    healthy(server)
    following = Following(server, tmp_path)
    following.recorder.state.spoke = api_objects.T0 + 60.0
    assert asyncio.run(followed(server, following)).state is RunState.SUCCEEDED
    silent = Following(server, tmp_path / "silent", stall_timeout=1)
    server.logs[WORKER] = ""
    healthy(server)
    seen = asyncio.run(silent.run(*picture(server)))
    assert (seen.state, seen.budget) == (RunState.FAILED, "run.stall_timeout")
    assert server.deleted == ["PyTorchJob/qa-1"]


def test_a_worker_that_is_deleted_while_the_job_succeeds_is_missed(server: ApiServer, tmp_path: Path) -> None:
    healthy(server)
    server.objects["Pod"] += [worker(1, running={"startedAt": at(HOUR - 20)})]
    for rank in (0, 1):
        proof = said(HOUR - 10, "proof", rank, world_size=2, round=0, meeting="m")
        server.logs[f"qa-1-worker-{rank}"] = proof
    following = Following(server, tmp_path, nnodes=2, max_restarts=1)
    seen = asyncio.run(followed(server, following))
    believed = outcome(following.ctx, seen, following.recorder.state.observed)
    assert (seen.state, believed.state) == (RunState.SUCCEEDED, RunState.FAILED)
    assert "nothing shows how the ranks on qa-1-worker-1 ended" in believed.reason


def test_a_log_is_read_on_after_a_picture_without_its_pod(server: ApiServer, tmp_path: Path) -> None:
    healthy(server)
    following = Following(server, tmp_path, queue_timeout=1)

    async def run() -> Status:
        ending = asyncio.create_task(following.run(*picture(server)))
        await asyncio.to_thread(until, lambda: following.recorder.activity.met)
        following.stream.put_nowait([Changes("Pod", [], [], complete=True)])
        # It seems to be queued for long.
        await asyncio.to_thread(until, lambda: server.calls["get PyTorchJob"])
        server.logs[WORKER] += f"{at(HOUR - 5)[:-1]}.0Z {events.join(0, 'node', 'step 1')}\n"
        await asyncio.to_thread(until, lambda: "step 1" in following.lines)
        ends(server)
        following.stream.put_nowait(picture(server))
        return await ending

    assert asyncio.run(run()).state is RunState.SUCCEEDED
    assert following.lines.count("step 1") == 1


def test_a_listener_hears_each_event_once_also_where_a_follower_goes_on_from_another(
    server: ApiServer, tmp_path: Path
) -> None:
    healthy(server)
    server.logs[WORKER] += said(HOUR - 9, "progress", step=1) + said(HOUR - 9, "metrics", values={"f1": 1.0})
    first = Following(server, tmp_path / "first")

    async def leave() -> None:
        leaving = asyncio.create_task(first.run(*picture(server)))
        await asyncio.to_thread(until, lambda: "metrics" in first.collector.kinds)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)

    asyncio.run(leave())
    server.logs[WORKER] += said(HOUR - 9, "progress", step=2)
    ends(server)
    second = Following(server, tmp_path / "second", cursor=dict(first.recorder.state.cursor))
    assert asyncio.run(second.run(*picture(server))).state is RunState.SUCCEEDED
    assert first.collector.kinds == ["proof", "progress 1", "metrics"]
    assert second.collector.kinds == ["progress 2", "exit"]


def test_what_a_worker_has_heard_is_recorded_when_it_hands_over(server: ApiServer, tmp_path: Path) -> None:
    healthy(server)
    following = Following(server, tmp_path)

    def recorded() -> Observed:
        return attempt_state(following.ctx.ledger.read(), handle()).observed

    watching = JobWatch(following.ctx, handle(), None)
    until(lambda: recorded().met)
    server.logs[WORKER] += said(HOUR - 5, "progress", step=3, total_steps=100, loss=0.5)
    until(lambda: (watching.look(), watching.observed.progress is not None)[1])
    assert recorded().progress is None  # it would be, in half a minute
    watching.close()
    progress = recorded().progress
    assert progress is not None
    assert progress.step == 3


@pytest.mark.parametrize("away", [False, True])
def test_whoever_goes_on_from_a_worker_hears_what_it_could_not_record_and_nothing_else(
    server: ApiServer, tmp_path: Path, *, away: bool
) -> None:
    healthy(server)
    ctx, proof = Following(server, tmp_path).ctx, server.logs.pop(WORKER)
    ctx.ledger = ConfigMapLedger(cluster_of(ctx), "qa")
    ctx.ledger.open(Entry(key="k", name="qa", created=T0, run={}, target={}, attempt=1))
    worker = JobWatch(ctx, handle(), None)
    server.refuses = {"ConfigMap"} if away else set()
    server.logs[WORKER] = proof
    until(lambda: (worker.look(), worker.observed.met)[1])
    worker.close()
    worker.look()
    server.refuses = set()
    ends(server)
    triggerer = JobWatch(ctx, handle(), worker.cursor)
    collector, seen = EventCollector(), Status(state=RunState.PENDING)
    while not seen.state.terminal:
        lines, seen = triggerer.look()
        tell(lines, collector)
    assert collector.kinds == (["proof", "exit"] if away else ["exit"])
    assert outcome(ctx, seen, triggerer.observed).state is RunState.SUCCEEDED


def test_silence_counts_though_events_may_not_be_read(server: ApiServer, tmp_path: Path) -> None:
    healthy(server)
    server.logs[WORKER] = ""
    following = Following(server, tmp_path, stall_timeout=2)

    async def run() -> Status:
        ending = asyncio.create_task(following.run(*picture(server)))
        async with asyncio.timeout(300):
            while not ending.done():
                following.stream.put_nowait([Changes("Event", [], [], complete=False, trouble="403")])
                await asyncio.wait([ending], timeout=0.5)
        return await ending

    assert asyncio.run(run()).budget == "run.stall_timeout"


def story(following: Following) -> Status:
    """Tell what `manycpu status` says."""
    return launch.status(following.ctx, handle(), following.ctx.ledger.read())


def test_status_and_wait_say_the_same_of_a_job_that_goes_on(server: ApiServer, tmp_path: Path) -> None:
    healthy(server)
    proof, server.logs[WORKER] = server.logs[WORKER], ""
    following = Following(server, tmp_path)

    async def run() -> list[Status]:
        task = asyncio.create_task(following.run(*picture(server)))
        await asyncio.to_thread(until, lambda: following.status.reason)
        starting = [following.status, await asyncio.to_thread(story, following)]
        server.logs[WORKER] = proof
        await asyncio.to_thread(until, lambda: following.status.state is RunState.RUNNING)
        await asyncio.to_thread(until, lambda: following.ctx.ledger.read().observed)
        running = [following.status, await asyncio.to_thread(story, following)]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return starting + running

    starting, running = Status(state=RunState.PENDING, reason="starting"), Status(state=RunState.RUNNING)
    assert asyncio.run(run()) == [starting, starting, running, running]


def test_status_and_wait_say_the_same_of_a_job_whose_budget_was_used_up(
    server: ApiServer, tmp_path: Path
) -> None:
    healthy(server)
    server.logs[WORKER] = ""
    following = Following(server, tmp_path, stall_timeout=1)
    seen = asyncio.run(following.run(*picture(server)))
    assert (seen.budget, server.deleted) == ("run.stall_timeout", ["PyTorchJob/qa-1"])
    assert story(following) == seen  # not: somebody deleted it


def test_status_and_wait_say_the_same_of_a_success_without_its_proof(
    server: ApiServer, tmp_path: Path
) -> None:
    healthy(server)
    ends(server)
    following = Following(server, tmp_path, nnodes=2)
    assert story(following).reason == "its log has not been read to the end yet"
    seen = asyncio.run(following.run(*picture(server)))
    believed = outcome(following.ctx, seen, following.recorder.state.observed)
    assert story(following) == believed
    assert (believed.state, "2 ranks were asked for, 1 met" in believed.reason) == (RunState.FAILED, True)


def test_status_and_wait_say_the_same_of_a_job_that_was_cancelled_as_it_ended(
    server: ApiServer, tmp_path: Path
) -> None:
    healthy(server)
    ends(server)
    following = Following(server, tmp_path)
    with following.ctx.ledger.update() as entry:
        entry.cancelled[1] = "a person"
    seen = asyncio.run(following.run(*picture(server)))
    assert (seen.state, seen.reason) == (RunState.CANCELLED, "ended by a person")
    assert story(following) == seen


def test_a_recorded_log_runs_no_code_in_a_notebook(server: ApiServer, tmp_path: Path) -> None:
    """Whatever stands in the log of a container: of older versions, or put there by somebody."""

    class Runs:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "code was run",)

    code = pickle.dumps(Runs())
    healthy(server)
    server.logs[WORKER] += said(HOUR - 4, "result", value="honest")
    server.logs[WORKER] += said(HOUR - 3, "pickled", part=1, parts=1, text=base64.b64encode(code).decode())
    display = CellDisplay(None)
    watching = JobWatch(Following(server, tmp_path).ctx, handle(), None)
    ends(server)
    seen = Status(state=RunState.PENDING)
    while not seen.state.terminal:
        lines, seen = watching.look()
        tell(lines, display)
    watching.close()
    recorded = attempt_state(watching.ctx.ledger.read(), watching.handle).observed.result
    assert recorded is not None
    assert recorded.value == "honest"
    returned = Returned("Call again")
    assert not returned.read(ResultEvent(sha256=64 * "0"), lambda _: code)
    with pytest.raises(ManycpuError):
        returned.value()
    assert not (tmp_path / "code was run").exists()


def recorded(folder: Path, rank: int, code: int = 0, world: int = 2, returned: str = "null") -> None:
    """Leave the exit record of a rank on the volume, as its parent does."""
    who = {"rank": rank, "host": "node", "hostname": f"qa-1-worker-{rank}"}
    ended = api_objects.T0 + HOUR - 5
    lines = [
        events.encode("proof", **who, world_size=world, meeting="m", time=ended - 5),
        events.encode("backend", observed="gloo"),
        events.encode("returned", part=1, parts=1, text=returned),
        events.encode("exit", **who, code=code, meeting="m", time=ended),
    ]
    record = {"meeting": "m", "world_size": world, "code": code, "time": ended, "lines": lines}
    write(folder / "manycpu/runs/qa/attempts/1" / FOLDER, record | who)


def evicted(number: int) -> Object:
    """Make a pod that the taint manager has evicted before its end was reported."""
    lost = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    made = worker(number, terminated={"exitCode": 137, "startedAt": at(HOUR - 20), "finishedAt": at(HOUR)})
    made["status"] |= {"phase": "Failed", "conditions": [*made["status"]["conditions"], lost]}
    return made


def lost(server: ApiServer, *, met: bool = True) -> None:
    """Have a job of two ranks that failed with its pods; what their logs had last was not read."""
    server.objects = {"PyTorchJob": [job("Failed")], "Pod": [evicted(0), evicted(1)]}
    for rank in (0, 1) if met else ():
        server.logs[f"qa-1-worker-{rank}"] = said(
            HOUR - 10, "proof", rank, world_size=2, round=0, meeting="m"
        ) + said(HOUR - 9, "backend", rank, observed="gloo")


@pytest.mark.parametrize("met", [True, False], ids=["their proofs were heard", "nothing was heard"])
def test_what_all_ranks_recorded_counts_before_an_eviction(
    server: ApiServer, tmp_path: Path, *, met: bool
) -> None:
    lost(server, met=met)
    for rank in (0, 1):
        recorded(tmp_path, rank)
    following = Following(server, tmp_path, nnodes=2)
    seen = asyncio.run(following.run(*picture(server)))
    observed = following.recorder.state.observed
    believed = outcome(following.ctx, seen, observed)
    assert (seen.state, believed.state) == (RunState.SUCCEEDED,) * 2
    assert seen.reason.startswith("all ranks had finished before: the PyTorchJob has failed")
    assert [rank.exit_code for rank in observed.ranks] == [0, 0]
    assert [note for note in following.notes if note.startswith("it counts as a success")]
    state = attempt_state(following.ctx.ledger.read(), handle())
    assert state.verdict is not None
    assert state.verdict.state is RunState.SUCCEEDED


@pytest.mark.parametrize("codes", [(), (0,), (0, 1)], ids=str)
def test_an_eviction_of_ranks_that_had_not_all_finished_is_a_failure(
    server: ApiServer, tmp_path: Path, codes: tuple[int, ...]
) -> None:
    lost(server)
    for rank, code in enumerate(codes):
        recorded(tmp_path, rank, code)
    seen = asyncio.run(Following(server, tmp_path).run(*picture(server)))
    assert (seen.state, seen.by_itself) == (RunState.FAILED, False)
    assert "DeletionByTaintManager" in seen.reason


def test_a_budget_that_ends_a_run_whose_records_cannot_be_read_is_no_failure_of_its_own(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def away(*_: object, **__: object) -> Iterator[Any]:
        raise DeadlineError("pod qa-exits did not start: no node is ready")
        yield

    monkeypatch.setattr(exit_records, "helper", away)
    healthy(server)
    seen = asyncio.run(Following(server, tmp_path, run_timeout=HOUR - 27).run(*picture(server)))
    assert (seen.budget, seen.by_itself) == ("run.run_timeout", False)
    assert "pod qa-exits did not start: no node is ready" in seen.reason


@pytest.mark.parametrize("ago", [40, 27], ids=["long ago", "the wait wakes up when it is due"])
def test_a_job_that_does_not_end_after_its_ranks_is_a_success(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ago: int
) -> None:
    monkeypatch.setattr(follower, "_TICK_S", float(HOUR))
    healthy(server)
    server.logs[WORKER] = said(HOUR - 50, "proof", world_size=1, round=0, meeting="m")
    server.logs[WORKER] += said(HOUR - ago, "exit", code=0)
    following = Following(server, tmp_path)
    seen = asyncio.run(following.run(*picture(server)))
    assert seen.state is RunState.SUCCEEDED
    assert server.deleted == ["PyTorchJob/qa-1"]


async def without_logs(server: ApiServer, following: Following, *, status: int, back_after: int) -> Status:
    """Follow a job to its end whose last lines cannot be read; the log is back after so many tries of it."""
    ending = asyncio.create_task(following.run(*picture(server)))
    await asyncio.to_thread(until, lambda: following.recorder.activity.met)
    server.log_error, log = status, f"log {WORKER}"
    ends(server)
    tries = server.calls[log] + back_after
    following.stream.put_nowait(picture(server))
    await asyncio.to_thread(until, lambda: ending.done() or server.calls[log] >= tries)
    server.log_error = 0
    return await ending


@pytest.mark.parametrize(("status", "back_after"), [(500, 3), (404, 1)])
def test_the_last_lines_are_waited_for_while_requests_for_them_fail(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, back_after: int
) -> None:
    monkeypatch.setattr(follower, "_DRAIN_S", 0.3)
    healthy(server)
    following = Following(server, tmp_path)
    seen = asyncio.run(without_logs(server, following, status=status, back_after=back_after))
    assert (seen.state, following.collector.kinds) == (RunState.SUCCEEDED, ["proof", "exit"])


@pytest.mark.parametrize("status", [500, 404])
def test_what_a_function_returned_is_on_the_volume_where_its_log_cannot_be_read(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(follower, "_DRAIN_S", 0.1)
    monkeypatch.setattr(follower, "_DRAIN_TIMEOUT_S", 1.0)
    healthy(server)
    recorded(tmp_path, 0, world=1, returned='{"accuracy": 0.93}')
    following = Following(server, tmp_path)
    seen = asyncio.run(without_logs(server, following, status=status, back_after=HOUR))
    observed = following.recorder.state.observed
    assert (seen.state, observed.returned) == (RunState.SUCCEEDED, {"accuracy": 0.93})


def test_a_rank_that_found_its_round_finished_says_so_for_all(server: ApiServer, tmp_path: Path) -> None:
    """Of one the log is lost; the other came back, and the volume told it."""
    lost(server)
    server.logs[WORKER] += said(HOUR - 1, "finished", meeting="m", message="x")
    following = Following(server, tmp_path)
    assert asyncio.run(following.run(*picture(server))).state is RunState.SUCCEEDED
