"""What a clean-up on Kubernetes keeps and records, where a run was edited, judged or resumed meanwhile."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_api_server import ApiServer

from manycpu.pipeline import run_report, transfer
from manycpu.pipeline.adapters.cluster import Cluster
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.ledger import CLEANUP, Entry
from manycpu.pipeline.ledger.configmap import ConfigMapLedger
from manycpu.pipeline.pod.commands import COMMANDS
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec import events
from manycpu.pipeline.spec.errors import (
    BadInputError,
    CancelledError,
    ClusterError,
    LaunchError,
    OutputTakenError,
)
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.image import Reference
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.output import MANIFEST
from manycpu.pipeline.spec.state import RunState, Status
from manycpu.pipeline.targets.attempt import attempt_of
from manycpu.pipeline.targets.context import Access, Built, Staged
from manycpu.pipeline.targets.kubernetes import cleanup, launch, output_report, preflight, run_secret, stage
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import AttemptState
from manycpu.pipeline.targets.kubernetes.image.build_inputs import Build, recipe
from manycpu.pipeline.targets.kubernetes.image.builder_pod import manifest
from manycpu.pipeline.targets.kubernetes.volume import claims
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.targets.output import occupied_finding
from manycpu.pipeline.transfer import Manifest
from manycpu.pipeline.verbs import launch as verb
from manycpu.pipeline.verbs import prepare
from manycpu.pipeline.verbs.cancel import cancel_or_prevent
from manycpu.pipeline.verbs.cleanup import Remains, may_delete_expired, remains
from manycpu.pipeline.verbs.cleanup import cleanup as clean_up
from manycpu.pipeline.verbs.export import is_model_visible, why_model_invisible
from manycpu.pipeline.verbs.report import write_report

Type = Callable[..., tuple[int, str]]
DAY_S = 86_400
BUILT = Built(code=None, program=[], digest="")


def opened(
    server: ApiServer, folder: Path, run: dict[str, Any] | None = None, *, run_id: str = "a", **target: Any
) -> ClusterContext:
    fields: dict[str, Any] = {"program": "question_answering", "output": str(folder / "out")} | (run or {})
    where = {"kind": "kubernetes", "namespace": "ml", "helper_image": "r/helper:1", **target}
    ctx = open_context(fields, where, run_id, base=folder, access=Access(connect=server.connect))
    assert is_on_kubernetes(ctx)
    return ctx


def handle_of(ctx: ClusterContext, uid: str) -> JobHandle:
    names = {"run": ctx.name, "name": f"{ctx.name}-1", "namespace": "ml", "launch": "pytorchjob"}
    return JobHandle(attempt=1, uid=uid, created=0, **names)


def trains(server: ApiServer, ctx: ClusterContext) -> JobHandle:
    """Begin a run whose first attempt has a job that has not ended."""
    ctx.ledger.open(ctx.new_entry(0))
    job = server.put(
        "PyTorchJob", {"metadata": {"name": f"{ctx.name}-1"}, "spec": {"pytorchReplicaSpecs": {}}}
    )
    handle = handle_of(ctx, job["metadata"]["uid"])
    with ctx.ledger.update() as entry:
        entry.attempt, entry.handle = 1, handle
        entry.attempts[1] = attempt_of(ctx, Staged(), BUILT)
    return handle


@pytest.fixture
def volumes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Stand for helper pods: claim -> the results on it; a removed folder has none."""
    results: dict[str, list[str]] = {}

    @contextmanager
    def helper(_ctx: ClusterContext, _verb: str, claim: str, *_: Any) -> Iterator[Any]:
        def ask(command: str, **_: Any) -> dict[str, list[str]]:
            return {"results": results.pop(claim, []) if command == "remove" else results.get(claim, [])}

        yield SimpleNamespace(ask=ask)

    monkeypatch.setattr(cleanup, "helper", helper)
    return results


def put_claim(server: ApiServer, name: str, phase: str = "Bound", owners: Any = ()) -> None:
    meta = {"name": name, "ownerReferences": list(owners)}
    server.put("PersistentVolumeClaim", {"metadata": meta, "spec": {}, "status": {"phase": phase}})


def test_results_stay_on_the_claim_of_an_earlier_attempt_when_the_target_names_another(
    server: ApiServer, tmp_path: Path, volumes: dict[str, list[str]]
) -> None:
    ctx = opened(server, tmp_path)
    trains(server, ctx)
    put_claim(server, f"{ctx.name}-data", owners=ctx.ledger.owner())
    put_claim(server, "big", "Pending")
    volumes[f"{ctx.name}-data"] = ["checkpoints"]
    kept = cleanup.keep_results(opened(server, tmp_path, claim="big"), None)
    assert [name.rpartition(" ")[2] for name in kept] == [f"ml/{ctx.name}-data"]


def test_the_folders_on_all_claims_that_a_run_has_used_are_removed(
    server: ApiServer, tmp_path: Path, volumes: dict[str, list[str]]
) -> None:
    trains(server, opened(server, tmp_path, claim="first"))
    volumes |= {"first": ["checkpoints"], "second": ["checkpoints"], "of others": ["checkpoints"]}
    for name in volumes:
        put_claim(server, name)
    assert cleanup.remove(opened(server, tmp_path, claim="second")) == []
    assert [*volumes] == ["of others"]


def test_the_builder_that_a_run_of_the_same_name_has_in_this_namespace_stays(
    server: ApiServer, tmp_path: Path
) -> None:
    ctx = opened(server, tmp_path)
    ctx.ledger.open(ctx.new_entry(0))
    other = opened(server, tmp_path, namespace="team-a", build_namespace="ml")
    build = Build(recipe(other, "train"), Reference("a.test", "ml/manycpu", "train-1"))
    server.put("Pod", manifest(other, build, "a.test/builder:1", []))
    assert cleanup.remove(ctx) == []
    assert len(server.objects["Pod"]) == 1


def put_of_others(server: ApiServer, ctx: ClusterContext) -> None:
    """Create what a person may apply with a run's name and labels: a rendered job, and copies of objects."""
    meta = {"labels": labels(ctx.name, attempt="1")}
    job = server.put("PyTorchJob", {"metadata": meta | {"name": f"{ctx.name}-1"}, "spec": {}})
    for owner in (f"{ctx.name}-1", f"{ctx.name}-1-launcher"):
        owners = [{"kind": "Job", "name": owner, "uid": job["metadata"]["uid"]}]
        server.put("Pod", {"metadata": meta | {"name": f"{owner}-0", "ownerReferences": owners}})
    for kind in ("Pod", "PersistentVolumeClaim", "ConfigMap"):
        server.put(kind, {"metadata": meta | {"name": "debug"}})
    server.put("Secret", {"metadata": {"name": f"{ctx.name}-env"}, "data": {}})


@pytest.mark.parametrize("end", ["remove", "keep results", "remove without ledger"])
def test_what_a_person_made_with_the_labels_of_a_run_is_neither_deleted_nor_waited_for(
    server: ApiServer,
    tmp_path: Path,
    volumes: dict[str, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    end: str,
) -> None:
    monkeypatch.setattr(cleanup, "_GONE_TIMEOUT_S", 0.0)
    ctx = opened(server, tmp_path, claim="data")
    ctx.ledger.open(ctx.new_entry(0))
    put_of_others(server, ctx)
    put_claim(server, "data")
    volumes["data"] = ["checkpoints"]
    assert ctx.driver.keep(ctx, None) == [f"ConfigMap ml/{ctx.name}"]
    if end == "remove without ledger":
        server.remove("ConfigMap", ctx.name)
    if end == "keep results":
        assert len(cleanup.keep_results(ctx, None)) == 1
    else:
        assert cleanup.remove(ctx) == []
    assert [name for name in server.deleted if name != f"ConfigMap/{ctx.name}"] == []


def test_a_removal_waits_for_pods_whose_job_is_gone_and_leaves_them_to_kubernetes(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod of a TrainJob is owned by a Job, that by a JobSet: manycpu may read neither."""
    monkeypatch.setattr(cleanup, "_GONE_TIMEOUT_S", 0.0)
    ctx = opened(server, tmp_path)
    ctx.ledger.open(ctx.new_entry(0))
    owners = [{"kind": "Job", "name": f"{ctx.name}-1-node-0", "uid": "of a Job"}]
    meta = {"name": "rank", "labels": labels(ctx.name, attempt="1"), "ownerReferences": owners}
    server.put("Pod", {"metadata": meta})
    assert cleanup.remove(ctx) == ["Pod ml/rank"]
    assert server.deleted == [f"ConfigMap/{ctx.name}"]


def test_a_new_attempt_does_not_delete_a_job_that_a_person_applied_under_the_name_of_an_earlier_one(
    server: ApiServer, tmp_path: Path
) -> None:
    image = "r/train@sha256:" + "0" * 64
    ctx = opened(server, tmp_path, image=image)
    ctx.ledger.open(ctx.new_entry(0))
    put_of_others(server, ctx)
    edited = opened(server, tmp_path, {"args": ["--more"]}, image=image)
    for each in (ctx, edited):
        with pytest.raises(LaunchError, match=f"there is a PyTorchJob {ctx.name}-1 that is not of this run"):
            launch.launch(each, Staged(), BUILT)
    assert ctx.ledger.read().attempt == 2
    assert server.deleted == []


@pytest.mark.parametrize("verdict", [None, Status(state=RunState.FAILED, reason="the time is used up")])
def test_a_clean_up_that_ends_the_job_of_a_failed_attempt_does_not_cancel_the_attempt(
    server: ApiServer, tmp_path: Path, verdict: Status | None
) -> None:
    ctx = opened(server, tmp_path)
    handle = trains(server, ctx)
    with ctx.ledger.update() as entry:
        entry.observed = AttemptState(attempt=1, verdict=verdict).model_dump(mode="json")
    assert cleanup.cancel(ctx, CLEANUP, None)
    assert ctx.ledger.read().cancelled == ({} if verdict else {1: CLEANUP})
    assert handle.name not in [job["metadata"]["name"] for job in server.objects["PyTorchJob"]]


def test_a_run_that_was_resumed_since_the_list_of_expired_ones_trains_on(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed = opened(server, tmp_path)
    trains(server, resumed)
    resumed.ledger.change_lease(until=1.0)
    stale = ConfigMapLedger(cluster_of(resumed), resumed.name, server.objects["ConfigMap"][0])
    monkeypatch.setattr(cleanup, "expired", lambda *_: [stale])
    resumed.ledger.renew(DAY_S)
    other = opened(server, tmp_path, {"job_name": "other"})
    ends: Callable[[Any], bool] = lambda _: pytest.fail("it was asked whether it may be deleted")  # noqa: E731
    assert cleanup.remove_expired(other, resumed.ledger.now(), ends) == []
    assert resumed.ledger.read().cancelled == {}
    assert len(server.objects["PyTorchJob"]) == 1


def test_a_run_that_is_resumed_while_the_clean_up_of_expired_ones_looks_at_it_trains_on(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed, other = opened(server, tmp_path), opened(server, tmp_path, {"job_name": "other"})
    trains(server, resumed)
    resumed.ledger.change_lease(until=1.0)
    find = launch.present_handle

    def resume(ctx: ClusterContext, entry: Entry) -> JobHandle | None:
        resumed.ledger.take_up()
        return find(ctx, entry)

    monkeypatch.setattr(cleanup, "present_handle", resume)
    assert cleanup.remove_expired(other, other.ledger.now(), may_delete_expired) == []
    assert resumed.ledger.lease().held(resumed.ledger.now())
    assert resumed.ledger.read().cancelled == {}
    assert len(server.objects["PyTorchJob"]) == 1


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_that_is_cancelled_after_its_attempt_is_recorded_and_before_its_job_exists_does_not_train(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, killed: bool
) -> None:
    ctx, beside = (opened(server, tmp_path, image="r/train@sha256:" + "0" * 64) for _ in range(2))
    ctx.ledger.open(ctx.new_entry(0))
    with monkeypatch.context() as patch:

        def cancels(_: ClusterContext) -> None:
            assert "nothing more of it will be launched" in cancel_or_prevent(beside, "a person")
            if killed:
                raise SystemExit

        patch.setattr(run_secret, "provide", cancels)
        with pytest.raises(SystemExit) if killed else nullcontext():
            launched, _ = verb.launch(ctx, Staged(), BUILT)
            assert ctx.ledger.read().cancelled == {launched.attempt: "a person"}
    if killed:
        with pytest.raises(CancelledError, match="ended by a person, before anything was launched"):
            verb.launch(ctx, Staged(), BUILT)
        assert ctx.ledger.read().cancelled == {}
    assert server.objects.get("PyTorchJob", []) == []


def killed_launch(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, recorded: bool = True
) -> ClusterContext:
    """Cancel a run whose attempt is recorded or not; its launch creates the job, and is killed then."""
    ctx, beside = (opened(server, tmp_path, image="r/train@sha256:" + "0" * 64) for _ in range(2))
    ctx.ledger.open(ctx.new_entry(0))
    ctx.ledger.take_up()
    if not recorded:
        cancel_or_prevent(beside, "a person")
    with monkeypatch.context() as patch:
        if recorded:
            patch.setattr(run_secret, "provide", lambda _: cancel_or_prevent(beside, "a person"))
        launch.launch(ctx, Staged(), BUILT)
    assert len(server.objects["PyTorchJob"]) == 1
    return ctx


@pytest.mark.parametrize("recorded", [True, False])
def test_a_training_that_was_cancelled_during_a_launch_that_was_killed_is_ended_by_the_next_launch(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, recorded: bool
) -> None:
    killed = killed_launch(server, tmp_path, monkeypatch, recorded=recorded)

    def away(*_: Any, **__: Any) -> None:
        raise ClusterError("the cluster does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "delete", away)
        with pytest.raises(ClusterError):
            verb.launch(killed, Staged(), BUILT)
    with pytest.raises(CancelledError, match=r"^ended by a person\.$") if recorded else nullcontext():
        assert verb.launch(killed, Staged(), BUILT)[1]
    assert server.objects["PyTorchJob"] == []
    assert killed.ledger.read().cancelled == {1: "a person"}
    assert verb.launch(killed, Staged(), BUILT)[0].attempt == 2


def test_a_run_that_begins_again_after_a_cancelled_launch_was_killed_does_not_go_on_with_its_training(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = killed_launch(server, tmp_path, monkeypatch)
    monkeypatch.setattr(prepare, "preflight", lambda _: [])
    prepare.prepare(killed)
    assert server.objects["PyTorchJob"] == []
    assert killed.ledger.read().cancelled == {1: "a person"}
    assert verb.launch(killed, Staged(), BUILT)[0].attempt == 2


@pytest.fixture
def location(server: ApiServer, tmp_path: Path) -> list[str]:
    """Write a kubeconfig of the server; return the options that lead to it."""
    named = {"name": "x", "cluster": {"server": server.url}, "user": {"token": "t"}}
    config: dict[str, Any] = {"kind": "Config", "clusters": [named], "users": [named]}
    config |= {"contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}], "current-context": "x"}
    (tmp_path / "config").write_text(json.dumps(config))
    return ["--namespace", "ml", "--connection", str(tmp_path / "config")]


def put_pod(server: ApiServer, handle: JobHandle, **state: Any) -> None:
    """Give an attempt a pod of a rank, whose container is in a state."""
    meta = {"name": f"{handle.name}-master-0", "labels": labels(handle.run, attempt="1", role="rank")}
    status = {"containerStatuses": [{"name": "pytorch", "restartCount": 0, "state": state}]}
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    spec = {"containers": [{"name": "pytorch", "image": "r/x:1"}]}
    server.put("Pod", {"metadata": meta, "spec": spec, "status": status | {"conditions": [placed]}})


def test_the_log_up_to_now_is_printed_and_nothing_of_the_run_is_changed(
    server: ApiServer, tmp_path: Path, manycpu: Type, location: list[str]
) -> None:
    handle = trains(server, opened(server, tmp_path))
    put_pod(server, handle, running={})
    server.logs[f"{handle.name}-master-0"] = f"{events.join(0, 'node', 'step 1')}\nfrom no rank\n"
    before = {kind: list(made) for kind, made in server.objects.items()}
    code, printed = manycpu("logs", handle.run, *location)
    lines = f"[rank 0 node] step 1\n[{handle.name}-master-0/pytorch] from no rank\n"
    assert (code, printed) == (0, lines)
    assert server.objects == before


def test_the_log_up_to_now_has_no_line_of_a_sidecar_and_leaves_a_pod_out_that_cannot_be_read(
    server: ApiServer, tmp_path: Path, manycpu: Type, location: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    handle = trains(server, opened(server, tmp_path))
    put_pod(server, handle, running={})
    (pod,) = server.objects["Pod"]
    pod["spec"]["initContainers"] = [{"name": "fetch", "image": "r/x:1"}]
    pod["spec"]["containers"].append({"name": "log-shipper", "image": "shipper:1"})
    server.logs[f"{handle.name}-master-0"] = "from no rank\n"
    code, printed = manycpu("logs", handle.run, *location)
    assert (code, printed) == (0, f"[{handle.name}-master-0/pytorch] from no rank\n")
    server.log_error = 403
    assert manycpu("logs", handle.run, *location) == (0, "")
    assert f"the log of {handle.name}-master-0/pytorch cannot be read" in caplog.text


def test_a_reason_with_brackets_or_control_characters_and_an_event_without_a_message_hide_no_run(
    server: ApiServer, tmp_path: Path, manycpu: Type, location: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    handle = trains(server, opened(server, tmp_path))
    put_pod(server, handle, waiting={"reason": "CreateContainerError", "message": "of [/data] \x1b[2J"})
    about = {"kind": "PersistentVolumeClaim", "name": "manycpu", "uid": "u"}
    event = {"metadata": {"name": "e"}, "type": "Warning", "involvedObject": about}
    server.put("Event", event)
    for name in ([], [handle.run]):
        code, printed = manycpu("status", *name, *location)
        assert (code, "of [/data] \\x1b[2J" in printed) == (0, True), printed


def test_a_launch_that_wakes_up_after_another_completed_its_attempt_deletes_its_job(
    server: ApiServer, tmp_path: Path
) -> None:
    ctx = opened(server, tmp_path)
    completed = trains(server, ctx)
    assert launch._record_handle(ctx, completed)  # noqa: SLF001 - two launches that made one job
    assert not launch._record_handle(ctx, handle_of(ctx, "of a later job"))  # noqa: SLF001
    assert ctx.ledger.read().handle == completed


def test_a_launch_that_wakes_up_after_another_completed_its_attempt_keeps_what_is_recorded_of_it(
    server: ApiServer, tmp_path: Path
) -> None:
    ctx = opened(server, tmp_path)
    completed = trains(server, ctx)
    ended = {"verdict": {"state": "failed", "reason": "out of memory"}}
    with ctx.ledger.update() as entry:
        entry.observed = ended
    assert launch._record_handle(ctx, completed)  # noqa: SLF001
    assert ctx.ledger.read().observed == ended


def test_the_secret_of_a_kept_run_is_deleted_again_after_its_last_report(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = opened(server, tmp_path, {"output": "s3://bucket/out", "env": {"HF_TOKEN": "hunter2"}})
    ctx.ledger.open(ctx.new_entry(0))
    ctx.ledger.keep(DAY_S)

    @contextmanager
    def pod(of: ClusterContext) -> Iterator[Any]:
        run_secret.provide(of)
        yield SimpleNamespace(ask=lambda *_, **__: {"names": [], "text": None, "other": None})

    monkeypatch.setattr(output_report, "_report_pod", pod)
    report = run_report.draft(ctx.ledger.read(), Observed(), RunState.FAILED, "no room")
    output_report.write_report(ctx, run_report.as_json(report))
    assert server.objects["Secret"] == []


def test_credentials_of_the_output_are_no_variables_of_the_run(server: ApiServer, tmp_path: Path) -> None:
    """Its Secret is deleted with the run, before a pod writes the last report."""
    env = {"AWS_SECRET_ACCESS_KEY": "hunter2", "HF_TOKEN": "hunter2"}
    for output, count in {"s3://bucket/out": 1, str(tmp_path / "out"): 0}.items():
        ctx = opened(server, tmp_path, {"output": output, "env": env})
        messages = [finding.message for finding in preflight._check_secrets(ctx)]  # noqa: SLF001
        assert ["AWS_SECRET_ACCESS_KEY" in message for message in messages] == [True] * count


@pytest.mark.parametrize("digest", ["of this model", "of another"])
def test_a_model_at_a_url_that_only_pods_reach_is_looked_for_before_only_the_clean_up_is_left(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digest: str
) -> None:
    ctx = opened(server, tmp_path, {"output": "gs://bucket/out"})  # gcsfs is not installed here
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    (bucket / MANIFEST).write_text("".join(Manifest(files=()).lines("k")))
    known = Manifest(files=()).digest if digest == "of this model" else "0" * 64

    @contextmanager
    def pod(_: ClusterContext) -> Iterator[Any]:
        yield SimpleNamespace(
            ask=lambda command, **request: ask_here(command, **request | {"url": str(bucket)})
        )

    monkeypatch.setattr(output_report, "_report_pod", pod)
    exported = {"path": "gs://bucket/out", "sha256": known}
    assert is_model_visible(ctx, exported) is (digest == "of this model")
    (bucket / MANIFEST).unlink()
    assert why_model_invisible(ctx, exported) == "there is no manifest.json"
    edited = opened(server, tmp_path, {"output": "gs://bucket/elsewhere"})
    assert why_model_invisible(edited, exported) == "that was gs://bucket/out"


def test_checkpoints_that_shall_outlive_the_run_need_a_claim_that_does(
    server: ApiServer, tmp_path: Path
) -> None:
    ctx = opened(server, tmp_path, {"checkpoints": "./checkpoints"})
    (found,) = preflight._check_checkpoints(ctx)  # noqa: SLF001 - one of many checks
    assert (found.field, found.fatal) == ("run.checkpoints", True)


def ask_here(command: str, **request: Any) -> dict[str, Any]:
    """Run a command of a helper pod in this process."""
    answers: list[dict[str, Any]] = []
    channel = SimpleNamespace(tick=lambda: None, send_message=lambda _, **fields: answers.append(fields))
    COMMANDS[command](channel, **request)
    return answers[-1]


@pytest.fixture
def with_one_output(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], ClusterContext]:
    """Begin runs whose output is the same URL, which pods reach that are functions here."""

    @contextmanager
    def pod(_: ClusterContext) -> Iterator[Any]:
        yield SimpleNamespace(ask=ask_here)

    monkeypatch.setattr(output_report, "_report_pod", pod)

    def begin(run_id: str) -> ClusterContext:
        ctx = opened(server, tmp_path, {"output": f"dir://out::file://{tmp_path}"}, run_id=run_id)
        ctx.ledger.open(ctx.new_entry(0))
        return ctx

    return begin


def test_a_model_whose_files_are_gone_from_a_url_that_only_pods_reach_is_kept(
    server: ApiServer, tmp_path: Path, with_one_output: Callable[[str], ClusterContext]
) -> None:
    ctx = with_one_output("only")
    trains(server, ctx)
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights.bin").write_bytes(b"alpha")
    manifest = transfer.publish(source, Location.of(ctx.destination, "run.output"), ctx.claim_key)
    with ctx.ledger.update() as entry:
        entry.export = {"path": ctx.run.output, "sha256": manifest.digest}
    assert remains(ctx) is Remains.NOTHING
    (tmp_path / "out" / "weights.bin").write_bytes(b"alp")
    assert (
        why_model_invisible(ctx, ctx.ledger.read().export) == "weights.bin has 3 bytes, and 5 were exported"
    )
    assert remains(ctx) is Remains.MODEL


def report_in(ctx: ClusterContext, state: RunState) -> Report:
    return run_report.draft(ctx.ledger.read(), Observed(), state)


def test_a_run_that_is_refused_leaves_the_report_of_the_run_that_has_the_output(
    with_one_output: Callable[[str], ClusterContext], tmp_path: Path
) -> None:
    holder, refused = with_one_output("first"), with_one_output("second")
    pod: Any = SimpleNamespace(ask=ask_here)
    stage._begin_report(holder, pod)  # noqa: SLF001 - all of the stage but its pod
    with pytest.raises(BadInputError, match=f"another run has it: {holder.name}"):
        stage._begin_report(refused, pod)  # noqa: SLF001
    written = (tmp_path / "out" / "report.json").read_text()
    with pytest.raises(OutputTakenError, match=f"another run has it: {holder.name}"):
        write_report(refused, report_in(refused, RunState.FAILED))
    cleaned = clean_up(refused)
    assert cleaned is not None
    assert cleaned.state == "failed"
    assert (tmp_path / "out" / "report.json").read_text() == written
    write_report(holder, report_in(holder, RunState.SUCCEEDED))
    parsed = run_report.parse((tmp_path / "out" / "report.json").read_text())
    assert parsed is not None
    assert (parsed.key, parsed.state) == (holder.key, "succeeded")


def test_the_last_report_replaces_that_of_a_run_that_left_no_model(
    with_one_output: Callable[[str], ClusterContext], tmp_path: Path
) -> None:
    ctx, other = with_one_output("first"), with_one_output("second")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.bin"):
        (tmp_path / "model" / name).write_text(name)
    transfer.publish(tmp_path / "model", ctx.output, ctx.key)
    failed = run_report.as_json(report_in(other, RunState.FAILED))
    (tmp_path / "out" / "report.json").write_text(failed)
    write_report(ctx, report_in(ctx, RunState.SUCCEEDED))
    parsed = run_report.parse((tmp_path / "out" / "report.json").read_text())
    assert parsed is not None
    assert (parsed.key, parsed.state) == (ctx.key, "succeeded")


def test_files_of_an_unfinished_export_are_refused_with_the_name_of_its_run(
    with_one_output: Callable[[str], ClusterContext], tmp_path: Path
) -> None:
    cut, other = with_one_output("first"), with_one_output("second")
    write_report(cut, report_in(cut, RunState.FAILED))
    text = (tmp_path / "out" / "report.json").read_text()
    found = occupied_finding(other, ["a.bin", "report.json"], text)
    assert found is not None
    assert f"a.bin is in it, and the report of run {cut.name}, which is failed" in found.message
    assert occupied_finding(cut, ["a.bin", "report.json"], text) is None


@pytest.mark.parametrize("uid_of_owner", [None, "that of an earlier ledger", "its own"])
def test_a_claim_with_the_name_of_the_run_s_own_is_used_only_if_its_ledger_owns_it(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid_of_owner: str | None
) -> None:
    monkeypatch.setattr(claims, "_DELETION_TIMEOUT_S", 0.0)
    ctx = opened(server, tmp_path)
    ctx.ledger.open(ctx.new_entry(0))
    owner = {"kind": "ConfigMap", "name": ctx.name, "uid": uid_of_owner}
    if uid_of_owner == "its own":
        (owner,) = ctx.ledger.owner()
    meta = {"name": f"{ctx.name}-data", "ownerReferences": [owner] if uid_of_owner else []}
    server.put("PersistentVolumeClaim", {"metadata": meta, "spec": {}, "status": {"phase": "Bound"}})
    if uid_of_owner == "its own":
        assert claims.ensure_claim(ctx) == f"{ctx.name}-data"
    else:
        reason = "is being deleted and does not go" if uid_of_owner else "is not of this run"
        with pytest.raises(ClusterError, match=reason):
            claims.ensure_claim(ctx)
