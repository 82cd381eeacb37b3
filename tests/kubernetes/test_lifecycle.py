"""Which process may remove a run, and what happens to runs that lose their ledger, claim or lease.

Jobs are suspended, so that no pod starts. Tests that need no job create none.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from cluster.command import wait_for
from cluster.space import Space
from kubernetes import client
from support.volume_shell import quiet

from manycpu.pipeline.adapters.cluster import Cluster, connect
from manycpu.pipeline.ledger import VerbRecord
from manycpu.pipeline.ledger.configmap import ledgers
from manycpu.pipeline.spec.errors import LedgerError, RunGoneError
from manycpu.pipeline.spec.handle import JobHandle
from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.targets.context import Access, Built, Staged
from manycpu.pipeline.targets.kubernetes.cleanup import remove, remove_expired
from manycpu.pipeline.targets.kubernetes.context import ClusterContext, claim_of, cluster_of
from manycpu.pipeline.targets.kubernetes.volume import claims
from manycpu.pipeline.targets.kubernetes.volume.helper_pod import helper
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.cleanup import cleanup, may_delete_expired
from manycpu.pipeline.verbs.launch import launch

pytestmark = pytest.mark.pod_security("restricted")
Fields = dict[str, Any]
Open = Callable[..., ClusterContext]
BUILT = Built(code="/opt/manycpu/code", program=("train.py",), digest="0", image="nobody/pulls:this")
HELD = "manycpu.test/held"
"""A finalizer: Kubernetes deletes an object that has it only when the test removes the finalizer."""


@pytest.fixture
def hold(namespace: Space) -> Iterator[Callable[[str], None]]:
    """Return a function that adds the finalizer to a ConfigMap, and removes it if called again."""
    core, held = client.CoreV1Api(namespace.admin), set[str]()

    def finalizers(name: str, value: list[str] | None) -> None:
        core.patch_namespaced_config_map(name, namespace.name, {"metadata": {"finalizers": value}})

    def toggle(name: str) -> None:
        finalizers(name, None if name in held else [HELD])
        held.symmetric_difference_update({name})

    yield toggle
    for name in held:
        finalizers(name, None)


def present(ctx: ClusterContext) -> KubeObject | None:
    return cluster_of(ctx).get("ConfigMap", ctx.name)


def reopened(ctx: ClusterContext, cluster: Any = None) -> ClusterContext:
    """Open the same run again, as another process would; over its own connection, or over this one."""
    opened = {} if cluster is None else {ctx.target.namespace: cluster}
    return replace(ctx, access=Access(opened=opened))


def trained(ctx: ClusterContext) -> None:
    """Record a training that succeeded, without an export of its model."""
    with ctx.ledger.update() as entry:
        entry.attempt, entry.verbs["wait"] = 1, VerbRecord(seconds=1, result="done")


# leases


def test_a_kept_run_that_goes_on_is_not_removed_when_its_time_as_a_kept_one_is_over(a_context: Open) -> None:
    kept, another = a_context("kept"), a_context("another")
    kept.ledger.keep(0)
    again = reopened(kept)
    again.ledger.open(again.new_entry(time.time()))
    lease = again.ledger.lease()
    assert (lease.held(time.time()), lease.ended) == (True, False)
    assert remove_expired(another, time.time(), may_delete_expired) == []
    assert present(kept) is not None


def test_a_run_has_an_end_from_its_birth_and_work_on_it_puts_that_off(a_context: Open) -> None:
    left, worked_on, another = a_context("left"), a_context("worked-on"), a_context("another")
    tomorrow = time.time() + 25 * 3600
    with worked_on.ledger.kept_alive(30 * 3600):
        assert remove_expired(another, time.time(), may_delete_expired) == []
        assert remove_expired(another, tomorrow, may_delete_expired) == []
    wait_for("the run that was left to be gone", lambda: present(left) is None, seconds=30)
    assert present(worked_on) is not None
    assert present(another) is not None  # a run that removes other runs keeps its own ledger


def test_a_model_that_was_not_exported_is_removed_by_a_word_for_its_run_alone(a_context: Open) -> None:
    ctx, another = a_context("model"), a_context("another")
    trained(ctx)
    cleaned = cleanup(ctx, keep=False)
    assert cleaned is not None
    assert f"ConfigMap {ctx.target.namespace}/{ctx.name}" in cleaned.kept
    ctx.ledger.change_lease(until=0)  # an earlier version of manycpu did this
    assert remove_expired(another, time.time(), may_delete_expired) == []
    assert ctx.ledger.lease().until is None
    cleaned = cleanup(ctx, delete_model=True)
    assert cleaned is not None
    assert (cleaned.left_behind, present(ctx)) == ([], None)


# other runs


def test_the_troubles_of_others_are_warnings_and_nobody_waits_for_them(
    a_context: Open, hold: Callable[[str], None]
) -> None:
    broken, stuck, fine = a_context("broken"), a_context("stuck"), a_context("fine")
    ctx = a_context("ctx")
    hold(stuck.name)
    for run in (broken, stuck, fine):
        run.ledger.change_lease(until=0)
    cluster_of(ctx).patch("ConfigMap", broken.name, {"data": {"run": "{no json"}})
    (trouble,) = remove_expired(ctx, time.time(), may_delete_expired)
    assert not trouble.fatal
    assert f"ledger {ctx.target.namespace}/{broken.name} cannot be read" in trouble.message
    wait_for("the run without trouble to be gone", lambda: present(fine) is None, seconds=30)
    meta = (present(stuck) or {})["metadata"]
    assert "deletionTimestamp" in meta
    # A run that is being deleted is not deleted again.
    assert len(remove_expired(ctx, time.time(), may_delete_expired)) == 1
    with pytest.raises(LedgerError, match="another version of manycpu"):
        broken.ledger.read()


def test_a_ledger_that_nobody_can_read_is_no_obstacle_to_looking_at_the_others(
    a_context: Open, caplog: pytest.LogCaptureFixture
) -> None:
    broken, ctx = a_context("broken"), a_context("ctx")
    cluster_of(ctx).patch("ConfigMap", broken.name, {"data": {"run": "{no json"}})
    found = ctx.driver.runs(ctx.target)
    assert [one.name for one in found] == [ctx.name]
    assert f"{broken.name} cannot be read" in caplog.text


def test_of_two_who_remove_a_run_and_take_it_up_again_one_has_its_way(a_context: Open) -> None:
    ctx = a_context("taken-up")
    ctx.ledger.change_lease(until=0)
    (listed,) = ledgers(cluster_of(ctx))
    again = reopened(ctx)
    again.ledger.open(again.new_entry(time.time()))
    assert not listed.mark_removed(time.time())
    ctx.ledger.change_lease(until=0)
    (listed,) = ledgers(cluster_of(ctx))
    assert listed.mark_removed(time.time())
    uid = listed.uid()
    begun = threading.Thread(target=lambda: again.ledger.open(again.new_entry(time.time())))
    begun.start()
    listed.remove()
    begun.join(60)
    assert again.ledger.uid() != uid  # it has waited for the deletion, and created a new ledger


# deleted ledgers and claims


def test_a_ledger_that_is_being_deleted_is_waited_for_and_owns_nothing(
    a_context: Open, hold: Callable[[str], None]
) -> None:
    ctx = a_context("cleared")
    hold(ctx.name)
    uid = ctx.ledger.uid()
    cluster_of(ctx).delete("ConfigMap", ctx.name)
    assert not reopened(ctx).ledger.exists()
    for act in (ctx.ledger.owner, ctx.ledger.read, ctx.ledger.renew):
        with pytest.raises(RunGoneError, match=r"the run was taken away: somebody deleted its ledger"):
            act()
    again = reopened(ctx)
    begun = threading.Thread(target=lambda: again.ledger.open(again.new_entry(time.time())))
    begun.start()
    hold(ctx.name)
    begun.join(60)
    assert again.ledger.owner()[0]["uid"] != uid


def test_nothing_is_done_to_a_later_run_of_the_same_name(a_context: Open) -> None:
    old = a_context("twice")
    cleaning = reopened(old)
    cleaning.ledger.read()
    remove(old)
    new = a_context("twice")
    claims.ensure_claim(new)
    cleaning.ledger.remove()
    for act in (cleaning.ledger.read, cleaning.ledger.renew):
        with pytest.raises(RunGoneError):
            act()
    with pytest.raises(RunGoneError):
        remove(cleaning)
    found = cluster_of(new).get("PersistentVolumeClaim", claim_of(new))
    assert found is not None
    assert "deletionTimestamp" not in found["metadata"]
    assert new.ledger.exists()


@pytest.mark.parametrize("kind", ["ConfigMap", "PersistentVolumeClaim"])
def test_a_verb_whose_run_is_taken_away_says_so_within_seconds(
    a_context: Open, namespace: Space, kind: str
) -> None:
    ctx, core = a_context("taken"), client.CoreV1Api(namespace.admin)
    somebody = {
        "ConfigMap": core.delete_namespaced_config_map,
        "PersistentVolumeClaim": core.delete_namespaced_persistent_volume_claim,
    }
    claim = claims.ensure_claim(ctx)
    with helper(ctx, "stage", claim, quiet) as pod:
        pod.wait_ready()
        somebody[kind]({"ConfigMap": ctx.name}.get(kind, claim), namespace.name)
        cluster_of(ctx).delete("Pod", pod.name, grace=0)
        with pytest.raises(RunGoneError, match=r"the run was taken away: somebody (deleted|is deleting)"):
            pod.ask("remove", folder="/tmp/pvc-mount/manycpu/nothing")  # noqa: S108 - in a pod


# launchers


@pytest.mark.parametrize("kind", ["pytorchjob", "mpijob"])
def test_a_launcher_that_was_paused_does_not_create_an_attempt_after_the_next(
    a_context: Open, kind: str
) -> None:
    """The launcher resumes after another process has cancelled its attempt and launched the next one.

    It is paused before the call that creates its job.
    """
    ctx = a_context("paused", launch=kind, queue="nobody-admits")
    paused, wakes = threading.Event(), threading.Event()

    class Pausing(Cluster):
        def call(self, method: str, path: str, **more: Any) -> KubeObject:
            if (method, path) == ("POST", self.path(JOB_KINDS[kind].kind)) and "dryRun" not in more["query"]:
                paused.set()
                wakes.wait(60)
            return super().call(method, path, **more)

    there = Pausing(lambda: connect(ctx.target.connection), ctx.target.namespace)
    found: list[tuple[object, bool]] = []
    late = threading.Thread(
        target=lambda: found.append(launch(reopened(ctx, cluster=there), Staged(), BUILT))
    )
    late.start()
    assert paused.wait(60)
    first, _ = launch(ctx, Staged(), BUILT)
    assert cancel(ctx, by="a person")
    second, _ = launch(ctx, Staged(), BUILT)
    assert isinstance(second, JobHandle)
    assert (first.attempt, second.attempt) == (1, 2)
    wakes.set()
    late.join(60)
    assert found == [(second, True)]
    jobs = cluster_of(ctx).list(JOB_KINDS[kind].kind)
    living = [job["metadata"]["name"] for job in jobs if "deletionTimestamp" not in job["metadata"]]
    assert living == [second.name]
    assert ctx.ledger.read().handle == second


def test_what_another_namespace_refuses_is_named_and_left_to_the_next_clean_up(a_context: Open) -> None:
    ctx = a_context("elsewhere")
    with ctx.ledger.update() as entry:
        entry.elsewhere["kube-system/Pod/builder"] = "build"
    left = remove(ctx)
    assert len(left) == 1
    assert left[0].startswith("kube-system/Pod/builder: ")
    assert "forbidden" in left[0]
    with ctx.ledger.update() as entry:
        entry.elsewhere.clear()  # somebody has deleted the pod
    assert remove(ctx) == []
    assert present(ctx) is None
