"""Time budgets of a job on Kubernetes, at given times."""

from typing import Any

import pytest
from support.api_objects import T0, Object, at, container, event, job, pod, snapshot

from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import RankActivity
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot
from manycpu.pipeline.targets.kubernetes.following.judgement import budgets, judge, must_be_deleted

NOTHING = RankActivity()
LIMITS = {
    "acknowledge_timeout": 60,
    "queue_timeout": 1000,
    "start_timeout": 300,
    "run_timeout": 5000,
    "stall_timeout": 200,
}


def run(**fields: Any) -> TrainingRun:
    return TrainingRun.model_validate({"program": "a.py", "output": "o", "nnodes": 2, **LIMITS, **fields})


def up(name: str, placed: float = 10, **more: Any) -> Object:
    statuses = [container(running={"startedAt": at(placed + 1)})]
    return pod(name, placed=placed, phase="Running", containerStatuses=statuses, **more)


BOTH = [up("a", 10), up("b", 20)]
MET = RankActivity(met=True, last=T0 + 100.0)
# What is seen, what was heard -> the field that is used up first, and after how many seconds.
CASES: dict[str, tuple[JobSnapshot, RankActivity, str, float]] = {
    "no operator acknowledges it": (snapshot(job()), NOTHING, "acknowledge_timeout", 60),
    "its pods are refused, and that is all that is known": (
        snapshot(job(), [], [event("FailedCreatePod", "exceeded quota", job())]),
        NOTHING,
        "queue_timeout",
        1000,
    ),
    "acknowledged, no pods yet": (snapshot(job("Created")), NOTHING, "queue_timeout", 1000),
    "suspended, from when it was": (
        snapshot(job("Suspended", suspend=True, seconds=500)),
        NOTHING,
        "queue_timeout",
        1500,
    ),
    "suspended before anybody took notice": (
        snapshot(job(suspend=True)),
        NOTHING,
        "queue_timeout",
        1000,
    ),
    "one pod without a node, from when it was made": (
        snapshot(job("Created"), [up("a"), pod("b", placed=None, born=30)]),
        NOTHING,
        "queue_timeout",
        1030,
    ),
    "starting, from when the last pod had its node": (
        snapshot(job("Created"), BOTH),
        NOTHING,
        "stall_timeout",
        220,
    ),
    "running, from the last line": (snapshot(job("Running"), BOTH), MET, "stall_timeout", 300),
    "running, for as long as it may": (
        snapshot(job("Running"), BOTH),
        RankActivity(met=True, last=T0 + 4999.0),
        "run_timeout",
        5020,
    ),
    "a pod was replaced, and the run began before": (
        snapshot(job("Running"), [up("a"), up("b", 4000)]),
        RankActivity(met=True, last=T0 + 4999.0, began=T0 + 20.0),
        "run_timeout",
        5020,
    ),
    "a launcher is no node": (
        snapshot(job("Created", launch="mpijob"), [up("a"), up("l", role="launcher")]),
        NOTHING,
        "queue_timeout",
        1000,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_budget_that_runs(case: str) -> None:
    found, activity, field, seconds = CASES[case]
    first = budgets(run(), found, activity)[0]
    assert (first.field, first.due - T0) == (field, seconds)


def test_starting_ends_with_the_meeting_of_the_ranks() -> None:
    found = snapshot(job("Running"), BOTH)
    due = {budget.field: budget.due - T0 for budget in budgets(run(stall_timeout=None), found, NOTHING)}
    assert due == {"start_timeout": 320, "run_timeout": 5020}
    assert [b.field for b in budgets(run(stall_timeout=None), found, MET)] == ["run_timeout"]


def test_an_elastic_run_starts_with_its_least_number_of_nodes() -> None:
    found = snapshot(job("Running"), [up("a", 15), pod("b", placed=None)])
    fields = [budget.field for budget in budgets(run(nnodes="1:2", stall_timeout=None), found, NOTHING)]
    assert fields == ["start_timeout", "run_timeout"]


@pytest.mark.parametrize("case", CASES)
def test_a_used_up_budget_ends_the_wait_and_says_which_and_why(case: str) -> None:
    found, activity, field, seconds = CASES[case]
    before = judge(run(), found, activity, T0 + seconds - 1)
    assert not before.state.terminal
    seen = judge(run(), found, activity, T0 + seconds)
    assert (seen.state, seen.budget) == (RunState.FAILED, f"run.{field}")
    assert str(LIMITS[field]) in seen.reason
    assert must_be_deleted(run(), found, seen)


def test_without_an_operator_the_message_names_it() -> None:
    seen = judge(run(), snapshot(job(launch="mpijob")), NOTHING, T0 + 60)
    assert "no operator acknowledged MPIJob qa-1 within 60 s: is the mpi-operator running" in seen.reason


def test_an_invalid_mpijob_is_not_waited_for() -> None:
    invalid = job(launch="mpijob")
    seen = judge(
        run(), snapshot(invalid, [], [event("ValidationError", "bad slots", invalid)]), NOTHING, T0 + 1
    )
    assert (seen.state, "bad slots" in seen.reason) == (RunState.FAILED, True)


def test_pods_that_crash_more_often_than_they_may_end_the_wait() -> None:
    looping = container(
        restarts=4, waiting={"reason": "CrashLoopBackOff"}, last={"terminated": {"exitCode": 1}}
    )
    found = snapshot(job("Running"), [up("a"), pod("b", containerStatuses=[looping])])
    assert judge(run(), found, NOTHING, T0 + 30).state is RunState.FAILED
    assert judge(run(max_restarts=4), found, NOTHING, T0 + 30).state is RunState.PENDING


@pytest.mark.parametrize(("max_restarts", "limit"), [(0, 3), (2, 3), (4, 4)])
def test_a_crash_loop_names_the_limit_that_it_passed(max_restarts: int, limit: int) -> None:
    looping = container(
        restarts=limit + 1, waiting={"reason": "CrashLoopBackOff"}, last={"terminated": {"exitCode": 1}}
    )
    found = snapshot(job("Running"), [up("a"), pod("b", containerStatuses=[looping])])
    seen = judge(run(max_restarts=max_restarts), found, NOTHING, T0 + 30)
    assert seen.reason == (
        f"it crashes in a loop: more than {limit} restarts (run.max_restarts is {max_restarts})"
    )


def test_a_failed_job_whose_pods_go_on_is_ended_unless_it_is_kept() -> None:
    found = snapshot(job("Failed"), BOTH)
    seen = judge(run(), found, MET, T0 + 150)
    assert must_be_deleted(run(), found, seen)
    assert not must_be_deleted(run(keep="on_failure"), found, seen)
