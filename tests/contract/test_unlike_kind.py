"""A kind of job that is unlike Kubeflow's is one record and one launcher too: Volcano's Job."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support import volcano_kind
from support.fake_api_server import ApiServer, running
from support.job_pods import line, meet, now, up
from support.volcano_kind import VOLCANOJOB, operate
from support.waiting import until

from manycpu.pipeline.launchers import refusals
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.job_kinds import kind_of
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import Access, Built, Staged
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.following import judgement
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot
from manycpu.pipeline.targets.kubernetes.following.turns import job_of
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.targets.outcome import outcome
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.launch import launch
from manycpu.pipeline.verbs.wait import watch

BUILT = Built(code="/opt/manycpu/code", program=("train.py",), digest="0", image="registry.example/train:1")


@pytest.fixture(autouse=True)
def _volcano(monkeypatch: pytest.MonkeyPatch) -> None:
    volcano_kind.register(monkeypatch)


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with running() as found:
        found.absent = {"PyTorchJob", "MPIJob", "TrainJob", "TrainingRuntime"}
        yield found


def open_run(server: ApiServer, folder: Path, **run: Any) -> ClusterContext:
    fields = {"program": "question_answering", "output": str(folder / "out"), "nnodes": 2}
    fields |= {"resources": {"cpu": 2, "memory": "1Gi"}, **run}
    target = {"kind": "kubernetes", "launch": "volcanojob", "namespace": "ml", "image": BUILT.image}
    ctx = open_context(fields, target, "a", base=folder, access=Access(connect=server.connect))
    assert is_on_kubernetes(ctx)
    return ctx


@pytest.fixture
def begun(server: ApiServer, tmp_path: Path) -> tuple[ClusterContext, JobHandle]:
    """Launch the first attempt of a run."""
    ctx = open_run(server, tmp_path)
    ctx.ledger.open(ctx.new_entry(0.0))
    handle, attached = launch(ctx, Staged(), BUILT)
    assert isinstance(handle, JobHandle)
    assert not attached
    return ctx, handle


def story(ctx: ClusterContext, handle: JobHandle) -> Status:
    return attempt_status(ctx, handle, ctx.ledger.read())


def test_its_manifest_keeps_the_name_that_another_group_has_too(
    server: ApiServer, begun: tuple[ClusterContext, JobHandle]
) -> None:
    ctx, handle = begun
    (job,) = server.objects["VolcanoJob"]
    assert (job["apiVersion"], job["kind"]) == ("batch.volcano.sh/v1alpha1", "Job")
    assert kind_of(job) == "VolcanoJob"
    assert kind_of({"apiVersion": "batch/v1", "kind": "Job"}) == "Job"
    assert (handle.launch, str(handle)) == ("volcanojob", f"volcanojob ml/{ctx.name}-1")
    assert launch(ctx, Staged(), BUILT) == (handle, True)


@pytest.mark.parametrize(
    ("restarts", "policies"), [(0, []), (2, [{"event": "PodFailed", "action": "RestartJob"}])]
)
def test_it_restarts_as_a_whole_if_the_run_allows_that(
    server: ApiServer, tmp_path: Path, restarts: int, policies: list[dict[str, str]]
) -> None:
    ctx = open_run(server, tmp_path, max_restarts=restarts)
    (job,) = ctx.driver.objects(ctx)
    assert (job["spec"]["maxRetry"], job["spec"]["policies"]) == (restarts + 1, policies)


def test_its_phase_tells_its_states(server: ApiServer, begun: tuple[ClusterContext, JobHandle]) -> None:
    ctx, handle = begun
    assert "no operator has acknowledged VolcanoJob" in story(ctx, handle).reason
    operate(server, handle.name, "Pending")
    assert "it has no pods yet" in story(ctx, handle).reason
    pods = operate(server, handle.name, "Running", up(), up())
    meet(server, pods)
    with closing(watch(ctx, handle)) as watching:
        until(lambda: watching.look()[1].state is RunState.RUNNING)
        for rank, pod in enumerate(pods):
            server.logs[pod] += line(rank, pod, "exit", code=0)
        done = up(terminated={"exitCode": 0, "startedAt": now(), "finishedAt": now()})
        operate(server, handle.name, "Completed", *[done | {"phase": "Succeeded"}] * 2)
        until(lambda: watching.look()[1].state.terminal)
        seen = outcome(ctx, watching.look()[1], watching.observed)
    assert seen == story(ctx, handle) == Status(state=RunState.SUCCEEDED)
    assert [one for one in server.deleted if one.startswith("VolcanoJob")] == []  # it has ended by itself


@pytest.mark.parametrize("phase", ["Failed", "Aborted", "Terminated"])
def test_each_phase_of_a_bad_end_is_a_failure(
    server: ApiServer, begun: tuple[ClusterContext, JobHandle], phase: str
) -> None:
    ctx, handle = begun
    pods = operate(server, handle.name, "Running", up(), up())
    meet(server, pods)
    with closing(watch(ctx, handle)) as watching:
        until(lambda: watching.look()[1].state is RunState.RUNNING)
        killed = up(terminated={"exitCode": 137, "startedAt": now(), "finishedAt": now()})
        operate(server, handle.name, phase, up(), killed | {"phase": "Failed"})
        until(lambda: watching.look()[1].state.terminal)
        seen = watching.look()[1]
    assert (seen.state, seen.failure and seen.failure.rank) == (RunState.FAILED, 1)
    assert "the VolcanoJob has failed" in seen.reason


def test_its_end_has_a_time(server: ApiServer, begun: tuple[ClusterContext, JobHandle]) -> None:
    _, handle = begun
    operate(server, handle.name, "Completed")
    snapshot = JobSnapshot(handle, ())
    snapshot.replace(server.objects["VolcanoJob"][0], [])
    assert judgement.end_time(snapshot) > handle.created - 1


def test_volcano_alone_decides_when_it_gets_its_nodes(
    server: ApiServer, begun: tuple[ClusterContext, JobHandle]
) -> None:
    _, handle = begun
    operate(server, handle.name, "Pending")
    (job,) = server.objects["VolcanoJob"]
    assert not VOLCANOJOB.suspended(job)
    assert job_of(job, VOLCANOJOB, [], 0.0) is None


def test_it_is_cancelled_and_cleaned_up_and_no_job_of_the_group_batch_is_touched(
    server: ApiServer, begun: tuple[ClusterContext, JobHandle]
) -> None:
    ctx, handle = begun
    operate(server, handle.name, "Running", up(), up())
    assert cancel(ctx, by="a person")
    assert [item.split("/")[0] for item in server.deleted] == ["VolcanoJob", "Pod", "Pod"]
    assert story(ctx, handle) == Status(state=RunState.CANCELLED, reason="ended by a person")
    again, attached = launch(ctx, Staged(), BUILT)
    assert (again.attempt, attached) == (2, False)
    report = cleanup(ctx)
    assert report is not None
    assert (report.state, report.left_behind) == (RunState.CANCELLED, [])
    assert not any(server.objects.values())


def test_what_it_cannot_do_is_refused(server: ApiServer, tmp_path: Path) -> None:
    ctx = open_run(server, tmp_path, nnodes="1:2")
    (finding,) = refusals(ctx.run, ctx.target)
    assert "a fixed number of nodes" in finding.message
