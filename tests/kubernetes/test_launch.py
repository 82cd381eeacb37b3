"""Attempts on a cluster: attach, follow, cancel. Their jobs stay suspended, so no pod starts."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster.space import Space
from support.queues import local_queue

from manycpu.pipeline.launchers import JOB_LAUNCHERS
from manycpu.pipeline.spec.errors import LaunchError
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.spec.targets import OWN_RUNTIME
from manycpu.pipeline.targets.attempt import attempt_of, attempt_status
from manycpu.pipeline.targets.context import Built, Staged
from manycpu.pipeline.targets.kubernetes import launch as kubernetes_launch
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, cluster_of, is_on_kubernetes
from manycpu.pipeline.targets.kubernetes.deletion import wait_until_gone
from manycpu.pipeline.targets.kubernetes.volume import claims
from manycpu.pipeline.targets.open_run import find, open_context
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.launch import launch
from manycpu.pipeline.verbs.prepare import prepare

BUILT = Built(code="/opt/manycpu/code", program=("train.py",), digest="0", image="nobody/pulls:this")
pytestmark = pytest.mark.pod_security("restricted")


@pytest.fixture
def in_queue(target: dict[str, Any], namespace: Space) -> dict[str, Any]:
    """Return a target with a queue that never admits a job."""
    local_queue(namespace, "nobody-admits")
    return target | {"queue": "nobody-admits"}


@pytest.fixture(params=[*(name for name, kind in JOB_KINDS.items() if kind.suspend), OWN_RUNTIME])
def queued(
    request: pytest.FixtureRequest,
    in_queue: dict[str, Any],
    a_run: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> ClusterContext:
    """Return a prepared run whose job will wait forever in its queue."""
    own = {"launch": "trainjob", "runtime": OWN_RUNTIME}
    launches = own if request.param == OWN_RUNTIME else {"launch": request.param}
    ctx = open_context(a_run(), in_queue | launches, "test", base=tmp_path)
    assert is_on_kubernetes(ctx)
    prepare(ctx)
    return ctx


def test_a_second_launch_attaches_and_a_cancelled_attempt_is_followed(queued: ClusterContext) -> None:
    first, attached = launch(queued, Staged(), BUILT)
    assert (first.attempt, attached) == (1, False)
    assert launch(queued, Staged(), BUILT) == (first, True)
    assert cancel(queued, by="a person")
    assert not cancel(queued, by="another")
    entry = queued.ledger.read()
    assert entry.cancelled == {1: "a person"}
    seen = attempt_status(queued, first, entry)
    assert (seen.state, seen.reason) == ("cancelled", "ended by a person")
    second, attached = launch(queued, Staged(), BUILT)
    assert (second.attempt, attached) == (2, False)


def test_a_launch_that_was_killed_before_it_noted_the_handle_is_found(queued: ClusterContext) -> None:
    first, _ = launch(queued, Staged(), BUILT)
    with queued.ledger.update() as entry:
        entry.handle = None
    assert launch(queued, Staged(), BUILT) == (first, True)


def test_a_launch_that_was_killed_before_the_job_was_there_is_made_up_for(queued: ClusterContext) -> None:
    with queued.ledger.update() as entry:
        entry.attempt = 1
    place = kubernetes_launch.place(queued, Staged(), BUILT, entry)
    *companions, _ = JOB_LAUNCHERS[queued.target.launch].objects(queued.run, queued.target, place)
    for companion in companions:
        cluster_of(queued).create(companion)
    handle, attached = launch(queued, Staged(), BUILT)
    assert (handle.attempt, attached) == (1, False)


def test_an_attempt_is_ended_by_its_own_launch_kind_and_the_next_one_uses_the_edited_one(
    queued: ClusterContext, in_queue: dict[str, Any], tmp_path: Path
) -> None:
    first, _ = launch(queued, Staged(), BUILT)
    assert isinstance(first, JobHandle)
    other = next(kind for kind in JOB_KINDS if kind != first.launch)
    where = in_queue | {"launch": other}
    now = find(open_context(queued.run.model_copy(update={"job_name": "mine"}), where, "test", base=tmp_path))
    assert is_on_kubernetes(now)
    with now.ledger.update() as entry:
        entry.handle = None
    assert launch(now, Staged(), BUILT) == (first, True)
    assert cancel(now, by="a person")
    second, _ = launch(now, Staged(), BUILT)
    assert isinstance(second, JobHandle)
    assert (second.launch, second.attempt) == (other, 2)
    assert cluster_of(now).get(JOB_KINDS[first.launch].kind, first.name) is None
    cleaned = cleanup(now)
    assert cleaned is not None
    assert (cleaned.target["launch"], cleaned.left_behind) == (other, [])


def test_an_attempt_that_was_recorded_otherwise_is_not_taken_over(queued: ClusterContext) -> None:
    with queued.ledger.update() as entry:
        entry.attempt, entry.attempts[1] = 1, attempt_of(queued, Staged(data="/other"), BUILT)
    handle, attached = launch(queued, Staged(), BUILT)
    assert (handle.attempt, attached) == (2, False)


def test_two_who_launch_at_once_share_one_job(queued: ClusterContext) -> None:
    found: list[JobHandle] = []

    def one() -> None:
        handle, _ = launch(queued, Staged(), BUILT)
        assert isinstance(handle, JobHandle)
        found.append(handle)

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {(handle.attempt, handle.uid) for handle in found} == {(1, found[0].uid)}


def test_a_job_that_somebody_deleted_is_a_failure_and_the_next_attempt_follows(
    queued: ClusterContext,
) -> None:
    claims.ensure_claim(queued)
    first, _ = launch(queued, Staged(), BUILT)
    assert isinstance(first, JobHandle)
    kind = JOB_KINDS[first.launch].kind
    cluster_of(queued).delete(kind, first.name)
    wait_until_gone(queued, {"manycpu/run": queued.name, "manycpu/attempt": "1"}, 30)
    seen = attempt_status(queued, first, queued.ledger.read())
    assert (seen.state, "somebody deleted it" in seen.reason) == ("failed", True)
    assert launch(queued, Staged(), BUILT)[0].attempt == 2


def test_cleanup_ends_what_still_runs_and_nothing_is_left(queued: ClusterContext) -> None:
    launch(queued, Staged(), BUILT)
    cleaned = cleanup(queued)
    assert cleaned is not None
    assert (cleaned.state, cleaned.left_behind) == ("cancelled", [])
    assert wait_until_gone(queued, {"manycpu/run": queued.name}, 1) == []
    assert cleanup(queued) is None


def test_what_is_kept_is_named_and_the_next_run_removes_it_when_its_time_is_over(
    in_queue: dict[str, Any], a_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    fields = a_run(keep="always", keep_for=1, output=str(tmp_path / "kept"))
    kept = open_context(fields, in_queue, "kept", base=tmp_path)
    assert is_on_kubernetes(kept)
    prepare(kept)
    cleaned = cleanup(kept)
    assert cleaned is not None
    assert f"ConfigMap {kept.target.namespace}/{kept.name}" in cleaned.kept
    kept.ledger.change_lease(until=0)
    prepare(open_context(a_run(), in_queue, "next", base=tmp_path))
    assert wait_until_gone(kept, {"manycpu/run": kept.name}, 30) == []


def test_what_the_cluster_refuses_is_said_before_anything_is_created(
    in_queue: dict[str, Any], a_run: Callable[..., dict[str, Any]], namespace: Space, tmp_path: Path
) -> None:
    ctx = open_context(a_run(), in_queue, "test", base=tmp_path)
    assert is_on_kubernetes(ctx)
    prepare(ctx)
    too_long = Built(code="/opt/manycpu/code", program=("train.py",), digest="0", image="")
    with pytest.raises(LaunchError, match="does not accept the PyTorchJob"):
        launch(ctx, Staged(), too_long)
    assert namespace.pods() == []
