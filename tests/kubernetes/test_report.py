"""The report of a run whose output only pods can reach: here a folder of the claim, behind a URL."""

# ruff: noqa: S108 - paths inside pods, which have no other users

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster.command import wait_for
from cluster.space import Space
from support.cluster_runs import DAG
from support.volume_shell import no_pod_is_left, quiet, shell

from manycpu.pipeline import train, transfer
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import ExportError, TrainingFailedError
from manycpu.pipeline.spec.output import LOG, REPORT
from manycpu.pipeline.targets.kubernetes import cleanup
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, claim_of, cluster_of, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.volume import claims, helper_pod
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs import report
from manycpu.pipeline.verbs.cleanup import may_delete_expired

pytestmark = pytest.mark.pod_security("restricted")
Fields = dict[str, Any]
Open = Callable[..., ClusterContext]
OUTPUT = "dir://published::file:///tmp/pvc-mount"
FAILS = "raise SystemExit('there is no cheese')"
LOCKS = f"import os; os.chmod('/tmp/pvc-mount/published/{REPORT}', 0o400); {FAILS}"


@pytest.fixture
def maker(a_context: Open) -> ClusterContext:
    """Return a run that owns the claim; the other runs publish to it."""
    ctx = a_context("maker")
    claims.ensure_claim(ctx)
    return ctx


@pytest.fixture
def remote(target: Fields, maker: ClusterContext, script: Callable[..., str], tmp_path: Path) -> Open:
    """Return a function that opens a run with one rank, whose output is a URL."""

    def make(name: str, text: str | None = None, **run: Any) -> ClusterContext:
        fields = {"program": script(text) if text else script(), "output": OUTPUT, **run}
        ctx = open_context(fields, target | {"claim": claim_of(maker)}, "cli", name, base=tmp_path)
        assert is_on_kubernetes(ctx)
        return ctx

    return make


def trained(ctx: ClusterContext, name: str) -> Report:
    return train(ctx.run, ctx.target, run_id=name)


def test_it_is_written_and_read_inside_the_cluster(
    remote: Open, maker: ClusterContext, namespace: Space
) -> None:
    ctx = remote("done")
    told = trained(ctx, "done")
    with shell(maker, namespace) as run:
        written = json.loads(run("cat", f"/tmp/pvc-mount/published/{REPORT}"))
        assert run("cat", "/tmp/pvc-mount/published/model.txt") == "sum 1"
        log = run("cat", f"/tmp/pvc-mount/published/{LOG}")
        written_files = [transfer.MANIFEST, "model.txt", REPORT, LOG]
        assert run("ls", "/tmp/pvc-mount/published").split() == written_files
    assert "[rank 0 " in log
    assert (written["state"], written["verbs"]["cleanup"]["result"]) == ("succeeded", "done")
    assert report.read_report(ctx) == told == Report.model_validate(written)
    assert report.report_path(ctx) == f"{OUTPUT}/{REPORT}"
    assert not Path("/tmp/pvc-mount").exists()
    no_pod_is_left(ctx)


def test_that_of_a_dag_run_is_its_last_task_s(
    run_dag: Callable[..., SimpleNamespace],
    connected: Fields,
    a_run: Callable[..., Fields],
    maker: ClusterContext,
    namespace: Space,
) -> None:
    groups = [("train", a_run(output=OUTPUT), connected | {"claim": claim_of(maker)})]
    ran = run_dag("cluster", DAG.format(groups=groups))
    assert (ran.state, set(ran.tasks.values())) == ("success", {"success"}), ran.said[-5000:]
    with shell(maker, namespace) as run:
        written = Report.model_validate_json(run("cat", f"/tmp/pvc-mount/published/{REPORT}"))
        assert run("cat", "/tmp/pvc-mount/published/model.txt") == "sum 2"
    assert (written.state, written.world_size, len(written.hosts)) == ("succeeded", 2, 2)
    assert (written.verbs["cleanup"].result, written.left_behind) == ("done", [])


def test_that_of_a_run_that_failed_says_why(remote: Open) -> None:
    ctx = remote("fails", FAILS)
    with pytest.raises(TrainingFailedError, match="there is no cheese"):
        trained(ctx, "fails")
    written = report.read_report(ctx)
    assert written.state == "failed"
    assert "there is no cheese" in str(written.error)
    no_pod_is_left(ctx)


def test_one_that_cannot_be_written_is_an_error_that_says_how_the_run_ended(remote: Open) -> None:
    ctx = remote("locked", LOCKS)
    with pytest.raises(ExportError, match=r"(?s)^run\.output: report\.json cannot be written .*no cheese"):
        trained(ctx, "locked")
    assert report.read_report(ctx).state == "running"
    no_pod_is_left(ctx)


def test_an_output_that_pods_cannot_write_to_is_found_before_anything_is_trained(remote: Open) -> None:
    ctx = remote("nowhere", output="dir://published::file:///proc")
    with pytest.raises(
        ExportError, match=r"cannot be written to .*; run\.output: .* from inside the cluster"
    ):
        trained(ctx, "nowhere")
    no_pod_is_left(ctx)


def test_an_output_that_holds_something_else_is_refused_before_anything_is_trained(
    remote: Open, maker: ClusterContext, namespace: Space
) -> None:
    with shell(maker, namespace) as run:
        run("sh", "-c", "mkdir /tmp/pvc-mount/published; echo mine >/tmp/pvc-mount/published/thesis")
    ctx = remote("occupied")
    with pytest.raises(ExportError, match=r"(?s)^run\.output: .* is not empty: thesis is in it"):
        trained(ctx, "occupied")
    with shell(maker, namespace) as run:
        assert run("ls", "/tmp/pvc-mount/published").split() == ["thesis"]
    no_pod_is_left(ctx)


def test_a_pod_that_a_killed_worker_forgot_goes_with_a_later_run(
    remote: Open, maker: ClusterContext, namespace: Space
) -> None:
    ctx, image = remote("killed"), str(maker.target.helper_image)
    forgotten = helper_pod.manifest(ctx, "report", None, image, [])
    forgotten["spec"]["containers"][0]["command"] = ["true"]
    name = namespace.create(forgotten)["metadata"]["name"]
    namespace.wait_pod(name, "Succeeded")
    with helper_pod.helper(remote("at-work"), "report", None, quiet) as pod:
        pod.wait_ready()
        cleanup.remove_expired(maker, 0, may_delete_expired)
        wait_for("the pod to be gone", lambda: cluster_of(ctx).get("Pod", name) is None, seconds=30)
        assert cluster_of(ctx).get("Pod", pod.name) is not None
