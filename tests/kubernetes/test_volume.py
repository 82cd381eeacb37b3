"""Data reaches the claim, and models leave it, complete, even if pods or the API server fail meanwhile.

Data goes through the API server here, which is slow enough for the faults. See also test_direct.py.
"""

# ruff: noqa: S108 - paths inside pods, which have no other users

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.faults import Faults
from cluster.space import Space
from support.volume_shell import no_pod_is_left, pods, quiet, shell, sums, sums_here

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.pod.channel import RemoteError
from manycpu.pipeline.spec.errors import BadInputError, ClusterError, DeadlineError, StageError
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.output import REPORT
from manycpu.pipeline.targets.kubernetes import export, launch, stage
from manycpu.pipeline.targets.kubernetes.context import (
    ClusterContext,
    attempt_directory,
    claim_of,
    cluster_of,
    directory_of,
)
from manycpu.pipeline.targets.kubernetes.volume import claims, helper_pod

pytestmark = pytest.mark.pod_security("restricted")
Fields = dict[str, Any]
Open = Callable[..., ClusterContext]
LARGE = 64 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep er").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"alpha")
    (folder / "deep er" / "große\nDatei.bin").write_bytes(os.urandom(3 << 20))
    (folder / "empty").write_bytes(b"")
    (folder / "link").symlink_to(folder / "a.txt")
    return folder


@pytest.fixture
def large(tmp_path: Path) -> Path:
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"alpha")
    with (folder / "weights.bin").open("wb") as file:
        for _ in range(LARGE >> 20):
            file.write(os.urandom(1 << 20))
    return folder


def test_data_and_model_are_staged_from_this_machine(a_context: Open, source: Path, namespace: Space) -> None:
    ctx = a_context()
    told: list[tuple[int, int]] = []
    wanted = {"data": str(source), "model": str(source / "a.txt")}
    found = stage.stage(ctx, wanted, lambda done, total: told.append((done, total)))
    digest = transfer.scan(Location.of(str(source), "run.data")).digest
    assert found["data"].path == f"/tmp/pvc-mount/manycpu/data/{digest[:16]}"
    assert Path(found["model"].path).name == "a.txt"
    with shell(ctx, namespace) as run:
        assert sums(run, found["data"].path) == sums_here(source)
        assert run("cat", found["model"].path) == "alpha"
        assert run("sh", "-c", "cd /tmp/pvc-mount/manycpu/data; ls -A | wc -l").strip() == "2"
    claim = cluster_of(ctx).get("PersistentVolumeClaim", claim_of(ctx))
    assert claim is not None
    assert claim["metadata"]["ownerReferences"][0]["name"] == ctx.name
    no_pod_is_left(ctx)


def test_a_second_run_finds_what_is_on_the_users_claim(a_context: Open, source: Path) -> None:
    own = claims.ensure_claim(a_context("maker"))
    first = stage.stage(a_context("first", claim=own), {"data": str(source)}, quiet)
    second = stage.stage(a_context("second", claim=own), {"data": str(source)}, quiet)
    assert (first["data"].reused, second["data"].reused) == (False, True)
    assert first["data"].path == second["data"].path


def test_two_runs_that_stage_the_same_at_once_share_one_copy(
    a_context: Open, large: Path, namespace: Space
) -> None:
    maker = a_context("maker")
    own, found = claims.ensure_claim(maker), {}

    def work(name: str) -> None:
        found[name] = stage.stage(a_context(name, claim=own), {"data": str(large)}, quiet)["data"]

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["one"].path == found["other"].path
    with shell(maker, namespace) as run:
        assert sums(run, found["one"].path) == sums_here(large)
        assert run("sh", "-c", "cd /tmp/pvc-mount/manycpu/data; ls -A | wc -l").strip() == "2"


def test_a_volume_that_is_bound_to_a_node_will_do(a_context: Open, source: Path, namespace: Space) -> None:
    ctx = a_context(storage_class="node-local", claim_access="ReadWriteOnce")
    found = stage.stage(ctx, {"data": str(source)}, quiet)
    with shell(ctx, namespace) as run:
        assert sums(run, found["data"].path) == sums_here(source)


def test_a_url_is_fetched_inside_the_cluster(a_context: Open, namespace: Space) -> None:
    ctx = a_context()
    url = "dir://www/set::file:///tmp/pvc-mount"  # this folder exists in pods only
    with shell(ctx, namespace) as run:
        run("sh", "-c", "mkdir -p /tmp/pvc-mount/www/set/deep; cd /tmp/pvc-mount/www/set; seq 100000 >deep/b")
        found = stage.stage(ctx, {"data": url}, quiet)
        again = stage.stage(ctx, {"data": url}, quiet)
        assert sums(run, found["data"].path) == sums(run, "/tmp/pvc-mount/www/set")
    assert (found["data"].reused, again["data"].reused) == (False, True)


@pytest.mark.parametrize(
    "fault",
    [
        "container killed",
        pytest.param("pod deleted", marks=pytest.mark.long),
        pytest.param("API server away", marks=pytest.mark.alone),
    ],
)
def test_staging_goes_on_after_a_break_in_a_large_file(
    a_context: Open, large: Path, namespace: Space, faults: Faults, fault: str
) -> None:
    ctx = a_context(direct=False)
    broken: list[int] = []

    def breaking(done: int, total: int) -> None:
        if not broken and done > total // 4:
            broken.append(done)
            _break(ctx, namespace, faults, fault)

    found = stage.stage(ctx, {"data": str(large)}, breaking)
    assert broken, "it was over before it could be broken"
    with shell(ctx, namespace) as run:
        assert sums(run, found["data"].path) == sums_here(large)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("container killed", marks=pytest.mark.long),
        "pod deleted",
        pytest.param("API server away", marks=[pytest.mark.alone, pytest.mark.long]),
    ],
)
def test_exporting_goes_on_after_a_break_in_a_large_file(
    a_context: Open, large: Path, namespace: Space, faults: Faults, fault: str, tmp_path: Path
) -> None:
    ctx = a_context(direct=False)
    output = _written(ctx, large, namespace)
    broken: list[int] = []

    def breaking(done: int, total: int) -> None:
        if not broken and done > total // 4:
            broken.append(done)
            _break(ctx, namespace, faults, fault)

    manifest = export.export(ctx, _handle(ctx), breaking)
    assert broken, "it was over before it could be broken"
    written = sums_here(tmp_path / "out")
    assert written.pop(transfer.MANIFEST)
    assert written == output == {file.path: file.sha256 for file in manifest.files}
    no_pod_is_left(ctx)


def test_a_model_is_published_inside_the_cluster(a_context: Open, source: Path, namespace: Space) -> None:
    ctx = a_context(run={"output": "dir://published::file:///tmp/pvc-mount"})
    output = _written(ctx, source, namespace)
    manifest = export.export(ctx, _handle(ctx), quiet)
    assert {file.path: file.sha256 for file in manifest.files} == output
    with shell(ctx, namespace) as run:
        published = sums(run, "/tmp/pvc-mount/published")
    assert published.pop(transfer.MANIFEST)
    assert published.pop(REPORT)  # stage writes it, to check that the output is writable
    assert published == output


def test_a_program_that_wrote_nothing_has_nothing_exported(a_context: Open, tmp_path: Path) -> None:
    ctx = a_context()
    claims.ensure_claim(ctx)
    assert export.export(ctx, _handle(ctx), quiet).size == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.alone
def test_a_full_volume_is_named(a_context: Open, large: Path, faults: Faults) -> None:
    os.truncate(large / "weights.bin", 192 << 20)  # more than a file system frees later by itself
    ctx = a_context()
    # The lack of space is found before anything is copied; at once if not even a folder can be created.
    with faults.volumes_full(), pytest.raises(StageError, match=r"(are needed|No space left).*target\.claim"):
        stage.stage(ctx, {"data": str(large)}, quiet)
    no_pod_is_left(ctx)
    assert not stage.stage(ctx, {"data": str(large)}, quiet)["data"].reused


def test_a_pod_that_a_killed_worker_left_is_used(a_context: Open, source: Path) -> None:
    ctx = a_context()
    left = helper_pod.Helper(ctx, "stage", claims.ensure_claim(ctx), quiet)
    left.create()
    left.wait_ready()
    uid = cluster_of(ctx).get("Pod", left.name)["metadata"]["uid"]  # type: ignore[index]
    seen: list[str] = []

    def look(*_: int) -> None:
        seen.append(cluster_of(ctx).get("Pod", left.name)["metadata"]["uid"])  # type: ignore[index]

    with helper_pod.helper(ctx, "stage", claims.ensure_claim(ctx), quiet) as pod:
        pod.wait_ready()
        look()
    assert seen == [uid]
    assert not stage.stage(ctx, {"data": str(source)}, quiet)["data"].reused


def test_a_claim_that_is_not_there_is_named(a_context: Open) -> None:
    with pytest.raises(ClusterError, match=r"^target\.claim: there is no PersistentVolumeClaim .*/none"):
        claims.ensure_claim(a_context(claim="none"))


def test_a_pod_that_cannot_start_says_why(a_context: Open, source: Path) -> None:
    ctx = a_context(run={"start_timeout": 5}, node_selector={"color": "green"})
    with pytest.raises(DeadlineError, match=r"didn't match Pod's node affinity/selector"):
        stage.stage(ctx, {"data": str(source)}, quiet)
    no_pod_is_left(ctx)


def test_a_secret_that_is_not_there_is_named_and_not_waited_for(a_context: Open, source: Path) -> None:
    ctx = a_context(run={"env_from": ["none"]})
    with pytest.raises(BadInputError, match=r"^run\.env_from: .* there is no secret 'none' in namespace"):
        stage.stage(ctx, {"data": str(source)}, quiet)
    no_pod_is_left(ctx)


def test_a_training_cannot_write_into_what_was_staged(
    a_context: Open, source: Path, namespace: Space
) -> None:
    ctx = a_context(run={"data": str(source)})
    staged = stage.stage(ctx, {"data": str(source)}, quiet)["data"].path
    rank = launch.objects(ctx)[-1]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    rank["metadata"]["name"] = f"{ctx.name}-rank"
    rank["spec"] |= {"restartPolicy": "Never"}
    rank["spec"]["containers"][0] |= {"image": ctx.target.helper_image, "command": ["sleep", "600"]}
    rank["spec"]["containers"][0] |= {"workingDir": "/", "resources": {}}
    name = namespace.create({"apiVersion": "v1", "kind": "Pod", **rank})["metadata"]["name"]
    namespace.wait_pod(name, "Running")
    wrong = f"echo x >{staged}/a.txt || echo x >{staged}/new || echo x >{staged}/../new || echo refused"
    assert "refused" in namespace.run(name, "sh", "-c", wrong)
    assert namespace.run(name, "cat", f"{staged}/a.txt") == "alpha"
    namespace.run(name, "sh", "-c", f"mkdir -p {directory_of(ctx)}/checkpoints {ctx.target.home}/caches")


def test_a_pod_that_runs_out_of_memory_says_so(
    a_context: Open, namespace: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_pod, "MEMORY", "256Mi")
    monkeypatch.setattr(helper_pod, "STALL_TIMEOUT_S", 0.0)
    ctx = a_context()
    with helper_pod.helper(ctx, "stage", claims.ensure_claim(ctx), quiet) as pod:
        pod.wait_ready()
        namespace.run(pod.name, "truncate", "-s", "1G", "/tmp/pvc-mount/large")
        with pytest.raises((RemoteError, DeadlineError), match="memory"):
            pod.ask("read", url="/tmp/pvc-mount", name="large")


def _written(ctx: ClusterContext, source: Path, namespace: Space) -> dict[str, str]:
    """Put a model on the volume, where a training would have written it; return its checksums."""
    staged = stage.stage(ctx, {"data": str(source)}, quiet)["data"].path
    output = f"{attempt_directory(ctx, 1)}/output"
    with shell(ctx, namespace) as run:
        run("sh", "-c", f"mkdir -p {attempt_directory(ctx, 1)}; mv {staged} {output}")
        return sums(run, output)


def _handle(ctx: ClusterContext) -> JobHandle:
    return JobHandle(
        run=ctx.name,
        attempt=1,
        launch="pytorchjob",
        namespace=ctx.target.namespace,
        name=f"{ctx.name}-1",
        uid="0",
        created=0,
    )


def _break(ctx: ClusterContext, namespace: Space, faults: Faults, fault: str) -> None:
    (name,) = pods(ctx)
    if fault == "container killed":
        faults.kill_container(namespace, name)
    elif fault == "pod deleted":
        cluster_of(ctx).delete("Pod", name, grace=0)
    else:
        with faults.api_away():
            time.sleep(3)  # the length of the fault, not a wait for a condition
