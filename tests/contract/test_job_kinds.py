"""A launch kind is one record and one launcher: all verbs work with a third one, which no cluster has."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.fake_api_server import ApiServer, running
from support.helper_process import helper_here
from support.job_pods import NO_ROOM, line, meet, now, refused, up
from support.third_kind import FITJOB, operate, register
from support.waiting import until

from manycpu.pipeline.cli.spec_commands import as_yaml
from manycpu.pipeline.launchers import JOB_LAUNCHERS, refusals
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.errors import BadInputError, DeadlineError, LaunchError
from manycpu.pipeline.spec.exit_records import FOLDER, write
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.spec.validation import read_target
from manycpu.pipeline.targets.attempt import attempt_status
from manycpu.pipeline.targets.context import Access, Built, Staged
from manycpu.pipeline.targets.kubernetes import launch as kubernetes_launch
from manycpu.pipeline.targets.kubernetes import preflight
from manycpu.pipeline.targets.kubernetes.context import (
    ClusterContext,
    attempt_directory,
    claim_of,
    is_on_kubernetes,
)
from manycpu.pipeline.targets.kubernetes.following import exit_records
from manycpu.pipeline.targets.kubernetes.volume import claims
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.targets.outcome import outcome
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.launch import launch
from manycpu.pipeline.verbs.wait import watch

BUILT = Built(code="/opt/manycpu/code", program=("train.py",), digest="0", image="registry.example/train:1")
NO_MORE: Mapping[str, str] = {}


@pytest.fixture(autouse=True)
def _fitjob(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    monkeypatch.setattr(exit_records, "helper", helper_here("", ""))  # no registry has its image


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with running() as found:
        found.absent = {"PyTorchJob", "MPIJob"}  # a cluster has the operators that it needs
        yield found


def open_run(
    server: ApiServer, folder: Path, name: str = "a", target: Mapping[str, str] = NO_MORE, **run: Any
) -> ClusterContext:
    fields = {"program": "question_answering", "output": str(folder / "out"), "nnodes": 2}
    fields |= {"resources": {"cpu": 2, "memory": "1Gi"}, **run}
    common = {"kind": "kubernetes", "launch": "fitjob", "namespace": "ml", "image": BUILT.image}
    ctx = open_context(fields, {**common, **target}, name, base=folder, access=Access(connect=server.connect))
    assert is_on_kubernetes(ctx)
    return ctx


def put_claim(server: ApiServer, ctx: ClusterContext, **more: Any) -> None:
    meta = {"name": claim_of(ctx), "ownerReferences": ctx.ledger.owner(), **more}
    server.put("PersistentVolumeClaim", {"metadata": meta, "spec": {}, "status": {"phase": "Bound"}})


def begin(server: ApiServer, folder: Path, name: str = "a", **run: Any) -> tuple[ClusterContext, JobHandle]:
    """Launch the first attempt of a run."""
    ctx = open_run(server, folder, name, **run)
    ctx.ledger.open(ctx.new_entry(0.0))
    handle, attached = launch(ctx, Staged(), BUILT)
    assert isinstance(handle, JobHandle)
    assert not attached
    return ctx, handle


def story(ctx: ClusterContext, handle: JobHandle) -> Status:
    return attempt_status(ctx, handle, ctx.ledger.read())


def test_a_target_may_name_it_and_what_it_cannot_do_is_refused(server: ApiServer, tmp_path: Path) -> None:
    ctx = open_run(server, tmp_path, nnodes="1:2")
    (finding,) = refusals(ctx.run, ctx.target)
    assert (finding.field, "a fixed number of nodes" in finding.message) == ("run.nnodes", True)
    with pytest.raises(BadInputError, match="or 'fitjob'; given was 'fitjobs'"):
        read_target({"kind": "kubernetes", "launch": "fitjobs"})


def test_its_companion_is_rendered_before_it(server: ApiServer, tmp_path: Path) -> None:
    ctx = open_run(server, tmp_path)
    documents = list(yaml.safe_load_all(as_yaml(*ctx.driver.objects(ctx))))
    assert [one["kind"] for one in documents] == ["FitRuntime", "FitJob"]


def test_preflight_asks_for_its_operator_its_rights_and_its_pods(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *checks, _ = preflight._CHECKS  # noqa: SLF001 - the last asks a registry, and there is none here
    monkeypatch.setattr(preflight, "_CHECKS", checks)
    ctx = open_run(server, tmp_path, nproc_per_node=1)
    assert [finding for finding in preflight.findings(ctx) if finding.field != "target.claim_access"] == []
    (pod,) = [one for one in server.tried if one["kind"] == "Pod"]
    assert pod["spec"]["containers"][0]["name"] == "trainer"
    server.absent |= {"FitJob", "FitRuntime"}
    server.denied = {"patch fitjobs", "create fitruntimes", "create mpijobs"}
    operator, *rights = preflight.findings(ctx)
    assert operator.message == "the cluster does not serve FitJob of fit.example/v1alpha1"
    assert operator.fix.startswith("Install fit-operator")
    assert [one.message for one in rights] == [
        f"this account may not {right} in namespace ml" for right in ("patch fitjobs", "create fitruntimes")
    ]


def test_it_is_launched_after_its_companion_and_attached_to(server: ApiServer, tmp_path: Path) -> None:
    ctx, handle = begin(server, tmp_path)
    assert server.created[-2:] == [f"FitRuntime/{ctx.name}-1", f"FitJob/{ctx.name}-1"]
    owners = [server.objects[kind][0]["metadata"]["ownerReferences"] for kind in ("FitRuntime", "FitJob")]
    assert owners == [ctx.ledger.owner()] * 2
    assert (handle.launch, str(handle)) == ("fitjob", f"fitjob ml/{ctx.name}-1")
    assert launch(ctx, Staged(), BUILT) == (handle, True)


def test_a_run_that_has_succeeded_before_has_the_folder_of_checkpoints_that_its_ledger_names(
    server: ApiServer, tmp_path: Path
) -> None:
    ctx = open_run(server, tmp_path, target={"claim": "data"}, checkpoints="points")
    ctx.ledger.open(ctx.new_entry(0.0))
    with ctx.ledger.update() as entry:
        entry.checkpoints_since = 1.5
    launch(ctx, Staged(), BUILT)
    (job,) = server.objects["FitJob"]
    assert f"{ctx.run.checkpoints}/{ctx.name}-19700101T000001.500000" in json.dumps(job)


def finish(server: ApiServer, ctx: ClusterContext, handle: JobHandle, volume: Path, ranks: int = 2) -> None:
    """Leave the exit records of so many of two ranks, which ended well, on a volume."""
    put_claim(server, ctx)
    folder = attempt_directory(ctx, 1).replace(ctx.target.mount_path, str(volume), 1)
    for rank in range(ranks):
        who = {"rank": rank, "host": "node", "hostname": f"{handle.name}-{rank}", "meeting": "m"}
        lines = [
            events.encode("proof", **who, world_size=2),
            events.encode("backend", observed="gloo"),
            events.encode("exit", **who, code=0),
        ]
        write(Path(folder, FOLDER), who | {"world_size": 2, "code": 0, "time": 1.0, "lines": lines})


EVICTED = up(terminated={"exitCode": 137}) | {"phase": "Failed", "reason": "Evicted"}


@pytest.mark.parametrize("pods", [[EVICTED, EVICTED], []], ids=["evicted", "deleted before"])
@pytest.mark.parametrize(("ranks", "again"), [(2, False), (1, True)])
def test_what_all_its_ranks_finished_is_not_trained_again_where_nobody_followed(
    server: ApiServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    pods: list[dict[str, Any]],
    *,
    again: bool,
) -> None:
    ctx, handle = begin(server, tmp_path)
    monkeypatch.setattr(exit_records, "helper", helper_here(ctx.target.mount_path, str(tmp_path / "volume")))
    finish(server, ctx, handle, tmp_path / "volume", ranks)
    operate(server, handle.name, *pods, ends="Failed")
    next_handle, attached = launch(ctx, Staged(), BUILT)
    assert (attached, next_handle != handle) == (not again, again)
    assert again or story(ctx, handle).state is RunState.SUCCEEDED


def test_what_all_its_ranks_finished_is_not_trained_again_once_the_volume_can_be_read(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def away(*_: object, **__: object) -> Iterator[Any]:
        raise DeadlineError("no node is ready")
        yield

    monkeypatch.setattr(exit_records, "helper", away)
    ctx, handle = begin(server, tmp_path)
    meet(server, operate(server, handle.name, up(), up()))
    with closing(watch(ctx, handle)) as watching:
        until(lambda: watching.look()[1].state is RunState.RUNNING)
        ended = {"exitCode": 137, "startedAt": now(), "finishedAt": now()}
        evicted = EVICTED | up(terminated=ended) | {"phase": "Failed"}
        operate(server, handle.name, evicted, evicted, ends="Failed")
        until(lambda: watching.look()[1].state.terminal)
        seen = watching.look()[1]
    assert (seen.state, seen.by_itself) == (RunState.FAILED, False)
    finish(server, ctx, handle, tmp_path / "volume")
    monkeypatch.setattr(exit_records, "helper", helper_here(ctx.target.mount_path, str(tmp_path / "volume")))
    assert launch(ctx, Staged(), BUILT) == (handle, True)
    assert story(ctx, handle).state is RunState.SUCCEEDED


def test_what_its_ranks_recorded_is_read_from_the_volume_of_their_attempt(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx, handle = begin(server, tmp_path, target={"claim": "first"})
    finish(server, ctx, handle, tmp_path / "first")

    def mounted(_ctx: object, _verb: str, claim: str, *_: object, **__: object) -> Any:
        return helper_here(ctx.target.mount_path, str(tmp_path / claim))()

    monkeypatch.setattr(exit_records, "helper", mounted)
    operate(server, handle.name, EVICTED, EVICTED, ends="Failed")
    edited = open_run(server, tmp_path, target={"claim": "second", "mount_path": "/second"})
    assert launch(edited, Staged(), BUILT) == (handle, True)


@pytest.mark.parametrize("deletion", ["done", "begun"])
def test_a_run_is_launched_again_on_another_claim_after_that_of_its_earlier_attempt_was_deleted(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletion: str
) -> None:
    @contextmanager
    def waits(ctx: ClusterContext, _verb: str, claim: str, *_: object, **__: object) -> Iterator[Any]:
        claims.check_exists(ctx, claim)
        yield

    monkeypatch.setattr(exit_records, "helper", waits)
    ctx, handle = begin(server, tmp_path, target={"claim": "first"})
    if deletion == "begun":  # a pod on a lost node still uses it
        put_claim(server, ctx, deletionTimestamp=now())
    operate(server, handle.name, EVICTED, EVICTED, ends="Failed")
    edited = open_run(server, tmp_path, target={"claim": "second"})
    again, attached = launch(edited, Staged(), BUILT)
    assert (again.attempt, attached) == (2, False)


@pytest.mark.parametrize("refused", ["not served", "no right"])
def test_a_run_is_launched_though_the_kind_of_an_earlier_attempt_cannot_be_listed(
    server: ApiServer, tmp_path: Path, refused: str
) -> None:
    begin(server, tmp_path)
    server.objects["FitJob"] = []  # its operator is uninstalled
    server.absent = {"FitJob", "FitRuntime"}
    other = open_run(server, tmp_path, target={"launch": "pytorchjob"})
    assert launch(other, Staged(), BUILT)[0].attempt == 2
    server.objects["PyTorchJob"] = []
    if refused == "no right":
        server.absent, server.refuses = set(), {"FitJob", "FitRuntime"}
    assert launch(other, Staged(), BUILT)[0].attempt == 3
    assert server.created[-1] == f"PyTorchJob/{other.name}-3"


def test_an_attempt_waits_for_the_pods_of_all_attempts_before_it(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes_launch, "_ENDED_TIMEOUT_S", 0.1)
    _, handle = begin(server, tmp_path)
    first, _ = operate(server, handle.name, up(), up(), ends="Failed")
    for pod in server.objects["Pod"]:  # on a node that does not answer: they stay without their job
        (owner,) = pod["metadata"]["ownerReferences"]
        owner["uid"] = "gone"
    for changed in ("1", "2"):  # a person edits the run after each failed try
        edited = open_run(server, tmp_path, args=[changed])
        with pytest.raises(LaunchError, match=f"an earlier attempt does not end: Pod ml/{first}"):
            launch(edited, Staged(), BUILT)
    assert edited.ledger.read().attempt == 3
    server.objects["Pod"] = []
    for attempt in ("1", "one"):  # pods of a person, with copied labels
        meta = {"name": f"debug-{attempt}", "labels": labels(edited.name, attempt=attempt)}
        server.put("Pod", {"metadata": meta, "status": up()})
    assert launch(edited, Staged(), BUILT)[1] is False


def test_its_states_are_told_by_its_own_conditions_and_pods(server: ApiServer, tmp_path: Path) -> None:
    ctx, handle = begin(server, tmp_path)
    assert "no operator has acknowledged FitJob" in story(ctx, handle).reason
    pods = operate(server, handle.name, up(), refused())
    assert f"no node: {NO_ROOM} ({pods[1]})" in story(ctx, handle).reason
    operate(server, handle.name, up(), up())
    assert story(ctx, handle) == Status(state=RunState.PENDING, reason="starting")
    meet(server, pods)
    with closing(watch(ctx, handle)) as watching:
        until(lambda: watching.look()[1].state is RunState.RUNNING)
        for rank, pod in enumerate(pods):
            server.logs[pod] += line(rank, pod.removesuffix("-x7k2p"), "exit", code=0)
        done = up(terminated={"exitCode": 0, "startedAt": now(), "finishedAt": now()})
        operate(server, handle.name, *[done | {"phase": "Succeeded"}] * 2, ends="Complete")
        until(lambda: watching.look()[1].state.terminal)
        seen = outcome(ctx, watching.look()[1], watching.observed)
    assert seen == story(ctx, handle) == Status(state=RunState.SUCCEEDED)


def test_a_rank_that_is_killed_is_named_though_its_pod_is_called_otherwise_than_its_host(
    server: ApiServer, tmp_path: Path
) -> None:
    ctx, handle = begin(server, tmp_path)
    pods = operate(server, handle.name, up(), up())
    meet(server, pods)
    with closing(watch(ctx, handle)) as watching:
        until(lambda: watching.look()[1].state is RunState.RUNNING)
        killed = up(terminated={"exitCode": 137, "startedAt": now(), "finishedAt": now()})
        operate(server, handle.name, up(), killed | {"phase": "Failed"}, ends="Failed")
        until(lambda: watching.look()[1].state.terminal)
        seen = watching.look()[1]
    assert (seen.state, seen.failure and seen.failure.rank) == (RunState.FAILED, 1)
    assert "the FitJob has failed" in seen.reason


def test_its_operator_is_named_where_it_does_not_acknowledge(server: ApiServer, tmp_path: Path) -> None:
    ctx, handle = begin(server, tmp_path, acknowledge_timeout=1)
    with closing(watch(ctx, handle)) as watching:
        until(lambda: watching.look()[1].state.terminal)
        seen = watching.look()[1]
    assert seen.budget == "run.acknowledge_timeout"
    assert "is the fit-operator running" in seen.reason
    assert server.deleted == [f"FitJob/{handle.name}"]


def test_it_gives_back_what_it_holds_and_takes_its_turn(server: ApiServer, tmp_path: Path) -> None:
    _, older = begin(server, tmp_path / "older", "older")
    operate(server, older.name, up(), refused())
    ctx, handle = begin(server, tmp_path)
    pods = operate(server, handle.name, up(), refused())

    def suspended() -> bool:
        return FITJOB.suspended(server.objects["FitJob"][-1])

    with closing(watch(ctx, handle)):
        until(suspended)
        assert "it holds nothing until there is room" in story(ctx, handle).reason
        for pod in pods:
            server.remove("Pod", pod)
        server.remove("FitJob", older.name)
        until(lambda: not suspended())


def test_it_is_cancelled_another_attempt_follows_and_all_is_cleaned_up(
    server: ApiServer, tmp_path: Path
) -> None:
    ctx, handle = begin(server, tmp_path)
    operate(server, handle.name, up(), up())
    assert cancel(ctx, by="a person")
    assert [item.split("/")[0] for item in server.deleted] == ["FitJob", "Pod", "Pod"]
    assert story(ctx, handle) == Status(state=RunState.CANCELLED, reason="ended by a person")
    again, attached = launch(ctx, Staged(), BUILT)
    assert (again.attempt, attached) == (2, False)
    report = cleanup(ctx)
    assert report is not None
    assert (report.state, report.left_behind) == (RunState.CANCELLED, [])
    assert not any(server.objects.values())
    assert json.loads((tmp_path / "out" / "report.json").read_text())["state"] == "cancelled"


def test_a_job_that_has_failed_by_its_pods_and_goes_on_is_ended(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime of the cluster may restart ranks that were to start once."""
    ctx, handle = begin(server, tmp_path)
    operate(server, handle.name, up(), up())
    failed = Status(state=RunState.FAILED, reason="a pod failed")
    monkeypatch.setattr(JOB_LAUNCHERS["fitjob"], "state", lambda *_: failed)
    assert cancel(ctx, by="a person")
    assert [item.split("/")[0] for item in server.deleted] == ["FitJob", "Pod", "Pod"]


def test_a_job_of_its_name_that_is_another_ledgers_is_neither_followed_nor_touched(
    server: ApiServer, tmp_path: Path
) -> None:
    ctx = open_run(server, tmp_path)
    ctx.ledger.open(ctx.new_entry(0.0))
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": ctx.name, "uid": "an-earlier-ledger"}
    meta = {"name": f"{ctx.name}-1", "labels": {}, "ownerReferences": [owner]}
    foreign = {"metadata": meta, "spec": {}, "status": {"conditions": [{"type": "Done", "status": "True"}]}}
    server.put(FITJOB.kind, foreign)
    for _ in range(2):
        with pytest.raises(LaunchError, match="that is not of this run"):
            launch(ctx, Staged(), BUILT)
    assert not cancel(ctx, by="a person")
    assert [one for one in server.deleted if one.startswith(FITJOB.kind)] == []
