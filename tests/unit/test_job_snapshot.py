"""What is known of a job of many pods: nothing is read off it again that has not changed."""

from typing import Any

from support.api_objects import Object, at, container, event, job, pod, snapshot

from manycpu.pipeline.targets.kubernetes.following import diagnosis
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot, cached_until_change

PODS = 512


def large() -> tuple[JobSnapshot, list[Object]]:
    """Make a job whose pods have nodes and are being made, with a warning about each."""
    waiting = container(waiting={"reason": "ContainerCreating"})
    pods = [pod(f"qa-1-worker-{number:03}", containerStatuses=[waiting]) for number in range(PODS)]
    warnings = [event("FailedMount", f"no volume {number}", one) for number, one in enumerate(pods)]
    return snapshot(job("Created"), pods, warnings), pods


def other(one: Object, **status: Any) -> Object:
    return one | {"status": one["status"] | status}


def test_a_warning_may_have_no_message_and_no_reason() -> None:
    started = job("Created")
    warnings = [
        event("FailedMount", "x", pod("a")),
        event("x", "x", started),
        event("x", "x", ("PersistentVolumeClaim", "data")),
    ]
    bare = [{key: one[key] for key in one if key not in ("message", "reason")} for one in warnings]
    made = snapshot(started, [pod("a", containerStatuses=[container(waiting={})])], bare)
    assert diagnosis.explain(made)
    assert made.claim_mounted_elsewhere == ""


def test_of_many_pods_only_the_one_that_changed_is_read_again() -> None:
    made, pods = large()
    read: list[str] = []

    def name(one: Any, _: Any) -> None:
        read.append(one["metadata"]["name"])

    made.derive_from_pods(name)
    assert len(read) == PODS
    made.apply("Pod", [other(pods[7], phase="Running")], [], complete=False)
    made.apply("Event", [event("BackOff", "again", pods[9], 6)], [], complete=False)
    made.derive_from_pods(name)
    assert read[PODS:] == ["qa-1-worker-007", "qa-1-worker-009"]
    assert [one["metadata"]["name"] for one in made.take_changed()[:2]] == [
        "qa-1-worker-000",
        "qa-1-worker-001",
    ]
    made.apply("Pod", [other(pods[3], phase="Running")], [], complete=False)
    assert [one["metadata"]["name"] for one in made.take_changed()] == ["qa-1-worker-003"]


def test_a_list_without_news_changes_nothing() -> None:
    made, pods = large()
    made.take_changed()
    assert not made.apply("Pod", [dict(one) for one in pods], [], complete=True)
    assert made.take_changed() == []


def test_what_nothing_has_changed_is_read_off_a_job_once() -> None:
    made, pods = large()
    count = [0]

    @cached_until_change
    def read(_: JobSnapshot) -> int:
        count[0] += 1
        return count[0]

    assert [read(made), read(made)] == [1, 1]
    made.apply("Pod", [other(pods[0], phase="Running")], [], complete=False)
    assert read(made) == 2


def test_what_is_said_of_many_pods_follows_what_changes() -> None:
    made, pods = large()
    assert len(diagnosis.pending(made)) == PODS
    up = {"name": "pytorch", "restartCount": 0, "state": {"running": {"startedAt": at(3)}}, "lastState": {}}
    running = [other(one, phase="Running", containerStatuses=[up]) for one in pods]
    made.apply("Pod", running[:-1], [], complete=False)
    assert diagnosis.explain(made) == "volume: no volume 511 (qa-1-worker-511)"
    made.apply("Event", [event("FailedMount", "still none", pods[-1], 9)], [], complete=False)
    assert diagnosis.explain(made) == "volume: still none (qa-1-worker-511)"
    made.apply("Pod", running[-1:], [], complete=False)
    assert diagnosis.explain(made) == ""
    made.apply(
        "Pod", [], [pods[0] | {"status": {"reason": "Evicted", "message": "no memory"}}], complete=False
    )
    assert diagnosis.losses(made) == ["pod qa-1-worker-000 was lost (Evicted): no memory"]
