"""What is read from a job and its pods."""

from typing import Any

import pytest

from manycpu.pipeline.launchers import JobLauncher, mpijob, pytorchjob
from manycpu.pipeline.spec.state import RunState, Status

BEFORE, ENDED, AFTER = "2026-01-01T10:00:00Z", "2026-01-01T11:00:00Z", "2026-01-01T11:00:05Z"
KINDS: dict[str, JobLauncher] = {"PyTorchJob": pytorchjob, "MPIJob": mpijob}
in_every_kind = pytest.mark.parametrize("kind", KINDS)


def condition(kind: str, *, holds: bool = True, reason: str = "", message: str = "") -> dict[str, str]:
    return {"type": kind, "status": str(holds), "reason": reason, "message": message}


def job(
    *conditions: dict[str, str],
    ended: str | None = None,
    suspend: bool = False,
    elastic: dict[str, int] | None = None,
) -> dict[str, Any]:
    return {
        "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team-a"}},
        "spec": {"runPolicy": {"suspend": suspend}} | ({"elasticPolicy": elastic} if elastic else {}),
        "status": {"conditions": list(conditions), "completionTime": ended},
    }


def pod(
    name: str, phase: str, started: str | None = None, container: str = "pytorch", before: int | None = None
) -> dict[str, Any]:
    inner = {"running": {"startedAt": started}} if started else {"waiting": {"reason": "CrashLoopBackOff"}}
    last = {} if before is None else {"terminated": {"exitCode": before}}
    seen = {"name": container, "state": inner, "lastState": last}
    return {"metadata": {"name": name}, "status": {"phase": phase, "containerStatuses": [seen]}}


def state(kind: str, job: dict[str, Any] | None, *pods: dict[str, Any]) -> Status:
    return KINDS[kind].state(job, list(pods))


SUCCEEDED = job(condition("Running", holds=False), condition("Succeeded"), ended=ENDED)


@in_every_kind
def test_a_job_without_a_status_has_not_begun(kind: str) -> None:
    fresh = {name: value for name, value in job().items() if name != "status"}
    assert state(kind, fresh) == Status(state=RunState.PENDING)


@in_every_kind
@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ([condition("Created")], RunState.PENDING),
        ([condition("Created"), condition("Running")], RunState.RUNNING),
        ([condition("Running", holds=False), condition("Restarting")], RunState.RUNNING),
        ([condition("Running", holds=False), condition("Failed")], RunState.FAILED),
        ([condition("Created"), condition("Failed", holds=False)], RunState.PENDING),
    ],
)
def test_only_conditions_that_hold_count(
    kind: str, conditions: list[dict[str, str]], expected: RunState
) -> None:
    assert state(kind, job(*conditions)).state is expected


@in_every_kind
def test_a_failure_has_the_operators_words(kind: str) -> None:
    failed = condition("Failed", reason="BackoffLimitExceeded", message="Job has reached its limit")
    reason = state(kind, job(failed, ended=ENDED)).reason
    assert reason == f"the {kind} has failed: BackoffLimitExceeded: Job has reached its limit"


def test_an_mpijob_whose_worker_was_evicted_has_failed_though_it_never_completes() -> None:
    evicted = condition("Failed", reason="MPIJobEvicted", message="1/2 workers are evicted")
    seen = state("MPIJob", job(condition("Running"), evicted))
    assert seen.state is RunState.FAILED
    assert "1/2 workers are evicted" in seen.reason


def test_a_worker_evicted_after_the_launcher_ended_well_changes_nothing() -> None:
    both = job(condition("Succeeded"), condition("Failed", reason="MPIJobEvicted"), ended=ENDED)
    assert state("MPIJob", both).state is RunState.SUCCEEDED


@in_every_kind
def test_a_suspended_job_has_not_begun(kind: str) -> None:
    for held in (job(condition("Suspended"), suspend=True), job(suspend=True)):
        assert state(kind, held).state is RunState.PENDING
    resumed = job(condition("Suspended", holds=False), condition("Running"))
    assert state(kind, resumed).state is RunState.RUNNING


@in_every_kind
def test_a_job_that_is_gone_has_failed(kind: str) -> None:
    assert state(kind, None).state is RunState.FAILED
    assert kind in state(kind, None).reason


def test_a_pytorchjob_succeeds_when_no_pod_works_any_more() -> None:
    ended, writing = pod("a-worker-0", "Succeeded"), pod("a-worker-1", "Running", BEFORE)
    seen = state("PyTorchJob", SUCCEEDED, ended, writing)
    assert seen.state is RunState.RUNNING
    assert "a-worker-1" in seen.reason
    assert state("PyTorchJob", SUCCEEDED, ended, pod("a-worker-1", "Succeeded")).state is RunState.SUCCEEDED


@pytest.mark.parametrize(
    "late",
    [
        pod("a-worker-1", "Pending"),
        pod("a-worker-1", "Running", AFTER),
        pod("a-worker-1", "Running"),  # its container waits to be restarted
        pod("a-worker-1", "Running", BEFORE, container="sidecar"),
        {"metadata": {"name": "a-worker-1"}},
    ],
)
def test_pods_that_start_too_late_are_not_waited_for(late: dict[str, Any]) -> None:
    assert state("PyTorchJob", SUCCEEDED, pod("a-worker-0", "Succeeded"), late).state is RunState.SUCCEEDED


def test_sshd_that_still_runs_does_not_hold_up_an_mpijob() -> None:
    assert state("MPIJob", SUCCEEDED, pod("a-worker-0", "Running", BEFORE)).state is RunState.SUCCEEDED


@pytest.mark.parametrize(
    "failed",
    [
        pod("a-worker-1", "Failed"),
        pod("a-worker-1", "Running", before=1),
        pod("a-worker-1", "Running", AFTER, before=1),
    ],
)
def test_one_pod_that_failed_is_a_failure_unless_the_run_may_shrink(failed: dict[str, Any]) -> None:
    well = pod("a-worker-0", "Succeeded", before=137)  # killed once, and restarted
    exact = job(condition("Succeeded"), ended=ENDED, elastic={"minReplicas": 2, "maxReplicas": 2})
    seen = state("PyTorchJob", exact, well, failed)
    assert seen.state is RunState.FAILED
    assert "a-worker-1" in seen.reason
    shrinking = job(condition("Succeeded"), ended=ENDED, elastic={"minReplicas": 1, "maxReplicas": 2})
    assert state("PyTorchJob", shrinking, well, failed).state is RunState.SUCCEEDED
