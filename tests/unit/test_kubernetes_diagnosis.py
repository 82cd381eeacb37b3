"""Why a job on Kubernetes waits, and how it failed: read off what the cluster says."""

from typing import Any

import pytest
from support.api_objects import Object, at, container, event, job, pod, snapshot, with_sidecar

from manycpu.pipeline.targets.kubernetes.following import diagnosis
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot

FULL = "0/2 nodes are available: 2 Insufficient cpu."
NO_NODE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": FULL}


def waiting(name: str, reason: str, message: str = "", **more: Any) -> Object:
    state: Any = {"waiting": {"reason": reason, "message": message}}
    return pod(name, containerStatuses=[container(**state, **more)])


def unplaced(name: str) -> Object:
    return pod(name, placed=None, conditions=[NO_NODE])


def in_queue(found: Object, queue: str) -> Object:
    labels = {"kueue.x-k8s.io/queue-name": queue}
    return found | {"metadata": found["metadata"] | {"labels": labels}}


PULLED = "Back-off pulling image"
MAKING = waiting("qa-1-worker-0", "ContainerCreating")
INIT = pod(
    "qa-1-worker-0",
    initContainerStatuses=[container("fetch", running={"startedAt": at(3)})],
    containerStatuses=[container(waiting={"reason": "PodInitializing"})],
)
INIT["spec"]["initContainers"] = [{"name": "fetch", "image": "reg/fetch:1"}]
CLAIM = ("PersistentVolumeClaim", "data")

CASES: dict[str, tuple[JobSnapshot, list[str]]] = {
    "no operator takes notice": (snapshot(job()), ["no operator has acknowledged PyTorchJob qa-1"]),
    "every pod without a node, in one line": (
        snapshot(job("Created"), [unplaced("qa-1-worker-0"), unplaced("qa-1-worker-1")]),
        [f"no node: {FULL} (qa-1-worker-0, qa-1-worker-1)"],
    ),
    "pods that wait for different things": (
        snapshot(job("Created"), [unplaced("qa-1-worker-0"), MAKING | {"metadata": pod("b")["metadata"]}]),
        [f"no node: {FULL} (qa-1-worker-0)", "its containers are being made", "(b)"],
    ),
    "an image that cannot be pulled, with the registry's words": (
        snapshot(
            job("Created"),
            [found := waiting("qa-1-worker-0", "ImagePullBackOff", PULLED)],
            [event("Failed", 'Failed to pull image "reg/train:1": not found', found)],
        ),
        ["image reg/train:1 of container pytorch", "ImagePullBackOff", "not found", "(qa-1-worker-0)"],
    ),
    "an image that cannot be pulled, with the kubelet's words": (
        snapshot(job("Created"), [waiting("qa-1-worker-0", "ErrImagePull", "no such host")]),
        ["image reg/train:1", "ErrImagePull", "no such host"],
    ),
    "a volume": (
        snapshot(job("Created"), [MAKING], [event("FailedMount", "timed out waiting for data", MAKING)]),
        ["volume: timed out waiting for data (qa-1-worker-0)"],
    ),
    "a claim without a provisioner": (
        snapshot(job("Created"), [unplaced("a")], [event("ProvisioningFailed", "no class fast", CLAIM)]),
        ["claim data: no class fast", "no node"],
    ),
    "an init container": (snapshot(job("Created"), [INIT]), ["init container fetch has not finished"]),
    "a secret that is not there": (
        snapshot(job("Created"), [waiting("a", "CreateContainerConfigError", 'secret "hub" not found')]),
        ["container pytorch cannot start (CreateContainerConfigError)", 'secret "hub" not found'],
    ),
    "a quota that refuses pods": (
        snapshot(job("Created"), [], [event("FailedCreatePod", "exceeded quota: cpu", job())]),
        ["pods are refused: exceeded quota: cpu"],
    ),
    "the launcher's pods that a quota refuses": (
        snapshot(
            job("Created", launch="mpijob"),
            [],
            [event("FailedCreate", "exceeded quota", ("Job", "qa-1-launcher"))],
        ),
        ["pods are refused: exceeded quota"],
    ),
    "a suspended job": (snapshot(job("Suspended", suspend=True)), ["it is suspended"]),
    "a job in a queue": (
        snapshot(in_queue(job(suspend=True), "team-a")),
        ["it is suspended, until Kueue's queue team-a admits it"],
    ),
    "a job that somebody deleted": (snapshot(None), ["PyTorchJob qa-1 is gone"]),
    "a pod that crashes in a loop": (
        snapshot(
            job("Running"),
            [waiting("a", "CrashLoopBackOff", restarts=4, last={"terminated": {"exitCode": 127}})],
        ),
        ["container pytorch crashes in a loop (a)", "started 5 times: a/pytorch ended with exit code 127"],
    ),
    "a launcher that crashes in a loop while the job runs": (
        snapshot(
            job("Running", launch="mpijob"),
            [pod(f"qa-1-launcher-{n}", role="launcher", phase="Failed") for n in "ab"],
        ),
        ["the launcher crashes in a loop: 2 pods of it have failed (qa-1-launcher-a, qa-1-launcher-b)"],
    ),
    "an evicted pod": (
        snapshot(job("Running"), [pod("a", phase="Failed", reason="Evicted", message="low on memory")]),
        ["pod a was lost (Evicted): low on memory"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said_in_one_message(case: str) -> None:
    found, words = CASES[case]
    said = diagnosis.explain(found)
    assert [word for word in words if word not in said] == []


def test_nothing_is_said_where_nothing_is_wrong() -> None:
    running = pod("a", phase="Running", containerStatuses=[container(running={"startedAt": at(3)})])
    assert diagnosis.explain(snapshot(job("Running"), [running])) == ""


@pytest.mark.parametrize("end", ["Succeeded", "Failed"])
def test_a_job_that_has_ended_needs_no_pods(end: str) -> None:
    assert diagnosis.explain(snapshot(job("Created", end), [])) == ""


def test_an_invalid_mpijob_is_known_by_its_event_alone() -> None:
    invalid = job(launch="mpijob")
    refused = event("ValidationError", "spec.slotsPerWorker: Required value", invalid)
    assert "spec.slotsPerWorker" in diagnosis.fatal_reason(snapshot(invalid, [], [refused]))


@pytest.mark.parametrize(("reason", "never"), [("InvalidImageName", True), ("ImagePullBackOff", False)])
def test_only_what_never_passes_is_hopeless(reason: str, never: bool) -> None:
    assert bool(diagnosis.fatal_reason(snapshot(job("Created"), [waiting("a", reason)]))) is never


@pytest.mark.parametrize("reason", ["InvalidImageName", "ErrImageNeverPull"])
def test_a_sidecar_that_never_starts_is_named_and_is_no_reason_to_end_the_ranks(reason: str) -> None:
    made = pod("a", containerStatuses=[container(running={"startedAt": at(3)})])
    found = snapshot(job("Running"), [with_sidecar(made, waiting={"reason": reason})])
    assert reason in diagnosis.explain(found)
    assert diagnosis.fatal_reason(found) == ""


def test_warnings_of_an_earlier_job_of_the_same_name_do_not_count() -> None:
    old = event("FailedCreatePod", "exceeded quota", ("PyTorchJob", "qa-1"), seconds=-60)
    assert "quota" not in diagnosis.explain(snapshot(job(), [], [old]))


def test_the_first_container_that_failed_comes_first_and_memory_is_named() -> None:
    def ended(name: str, code: int, seconds: float, reason: str = "Error", **more: Any) -> Object:
        how = {"exitCode": code, "finishedAt": at(seconds), "reason": reason}
        return pod(name, phase="Failed", containerStatuses=[container(terminated=how, **more)])

    again = container(running={}, restarts=1, last={"terminated": {"exitCode": 3, "finishedAt": at(20)}})
    found = snapshot(
        job("Failed"),
        [
            ended("a", 1, 31),
            ended("b", 137, 30, "OOMKilled"),
            ended("c", 0, 10),
            pod("d", containerStatuses=[again]),
        ],
    )
    first, second, third = diagnosis.endings(found)
    assert (first.pod, first.previous) == ("d", True)
    assert (second.pod, second.code, "more memory than its limit" in str(second)) == ("b", -9, True)
    assert third.pod == "a"


def test_a_sidecar_that_crashes_is_no_failure_of_the_ranks() -> None:
    killed = {"terminated": {"exitCode": 137, "finishedAt": at(20), "reason": "OOMKilled"}}
    inner = container(running={"startedAt": at(3)})
    found = snapshot(
        job("Running"),
        [with_sidecar(pod("a", containerStatuses=[inner]), restarts=9, running={}, last=killed)],
    )
    assert (diagnosis.restarts(found), diagnosis.crashes(found), diagnosis.endings(found)) == (0, [], [])


def test_a_pod_that_was_evicted_and_is_gone_is_remembered() -> None:
    found = snapshot(job("Running"), [lost := pod("a")])
    target = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "EvictionByEvictionAPI",
        "message": "drain",
    }
    last = lost | {"status": {"phase": "Running", "conditions": [target]}}
    found.apply("Pod", [], [last], complete=False)
    assert found.pods == []
    assert diagnosis.losses(found) == ["pod a was evicted (EvictionByEvictionAPI): drain"]


def test_a_list_that_lacks_a_pod_says_that_it_is_gone() -> None:
    found = snapshot(job("Running"), [pod("a"), pod("b")])
    assert found.apply("Pod", [pod("b")], [], complete=True)
    assert [one["metadata"]["name"] for one in found.pods] == ["b"]
    assert not found.apply("Pod", [pod("b")], [], complete=True)


def test_objects_of_other_jobs_change_nothing() -> None:
    found = snapshot(job("Running"))
    other = pod("qa-11-worker-0")
    other["metadata"]["labels"]["manycpu/attempt"] = "11"
    assert not found.apply("Pod", [other], [], complete=False)
    assert not found.apply("Event", [event("Failed", "x", ("Pod", "qa-11-worker-0"))], [], complete=False)
