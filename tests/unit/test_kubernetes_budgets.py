"""Time budgets of a job on Kubernetes, at given times."""

from typing import Any

import pytest
from kubernetes_objects import T0, Object, at, container, event, gang, job, pod

from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.kubernetes.following.budgets import Heard, budgets
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import Gang
from manycpu.pipeline.targets.kubernetes.following.judgement import judge, to_be_ended

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
MET = Heard(met=True, last=T0 + 100.0)
# What is seen, what was heard -> the field that is used up first, and after how many seconds.
CASES: dict[str, tuple[Gang, Heard, str, float]] = {
    "nobody acknowledges it": (gang(job()), Heard(), "acknowledge_timeout", 60),
    "its pods are refused, and that is all that is known": (
        gang(job(), [], [event("FailedCreatePod", "exceeded quota", job())]),
        Heard(),
        "queue_timeout",
        1000,
    ),
    "acknowledged, no pods yet": (gang(job("Created")), Heard(), "queue_timeout", 1000),
    "suspended, from when it was": (
        gang(job("Suspended", suspend=True, seconds=500)),
        Heard(),
        "queue_timeout",
        1500,
    ),
    "suspended before anybody took notice": (gang(job(suspend=True)), Heard(), "queue_timeout", 1000),
    "one pod without a node, from when it was made": (
        gang(job("Created"), [up("a"), pod("b", placed=None, born=30)]),
        Heard(),
        "queue_timeout",
        1030,
    ),
    "starting, from when the last pod had its node": (
        gang(job("Created"), BOTH),
        Heard(),
        "stall_timeout",
        220,
    ),
    "running, from the last line": (gang(job("Running"), BOTH), MET, "stall_timeout", 300),
    "running, for as long as it may": (
        gang(job("Running"), BOTH),
        Heard(met=True, last=T0 + 4999.0),
        "run_timeout",
        5020,
    ),
    "a pod was replaced, and the run began before": (
        gang(job("Running"), [up("a"), up("b", 4000)]),
        Heard(met=True, last=T0 + 4999.0, began=T0 + 20.0),
        "run_timeout",
        5020,
    ),
    "a launcher is no node": (
        gang(job("Created", launch="mpijob"), [up("a"), up("l", role="launcher")]),
        Heard(),
        "queue_timeout",
        1000,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_budget_that_runs(case: str) -> None:
    found, heard, field, seconds = CASES[case]
    first = budgets(run(), found, heard)[0]
    assert (first.field, first.due - T0) == (field, seconds)


def test_starting_ends_with_the_meeting_of_the_ranks() -> None:
    found = gang(job("Running"), BOTH)
    due = {budget.field: budget.due - T0 for budget in budgets(run(stall_timeout=None), found, Heard())}
    assert due == {"start_timeout": 320, "run_timeout": 5020}
    assert [b.field for b in budgets(run(stall_timeout=None), found, MET)] == ["run_timeout"]


def test_an_elastic_run_starts_with_its_least_number_of_nodes() -> None:
    found = gang(job("Running"), [up("a", 15), pod("b", placed=None)])
    fields = [budget.field for budget in budgets(run(nnodes="1:2", stall_timeout=None), found, Heard())]
    assert fields == ["start_timeout", "run_timeout"]


@pytest.mark.parametrize("case", CASES)
def test_a_used_up_budget_ends_the_wait_and_says_which_and_why(case: str) -> None:
    found, heard, field, seconds = CASES[case]
    before = judge(run(), found, heard, T0 + seconds - 1)
    assert not before.state.terminal
    seen = judge(run(), found, heard, T0 + seconds)
    assert (seen.state, seen.budget) == (RunState.FAILED, f"run.{field}")
    assert str(LIMITS[field]) in seen.reason
    assert to_be_ended(run(), found, seen)


def test_without_an_operator_the_message_names_it() -> None:
    seen = judge(run(), gang(job(launch="mpijob")), Heard(), T0 + 60)
    assert "no operator acknowledged MPIJob qa-1 within 60 s: is the mpi-operator running" in seen.reason


def test_an_invalid_mpijob_is_not_waited_for() -> None:
    invalid = job(launch="mpijob")
    seen = judge(run(), gang(invalid, [], [event("ValidationError", "bad slots", invalid)]), Heard(), T0 + 1)
    assert (seen.state, "bad slots" in seen.reason) == (RunState.FAILED, True)


def test_pods_that_crash_more_often_than_they_may_end_the_wait() -> None:
    looping = container(
        restarts=4, waiting={"reason": "CrashLoopBackOff"}, last={"terminated": {"exitCode": 1}}
    )
    found = gang(job("Running"), [up("a"), pod("b", containerStatuses=[looping])])
    assert judge(run(), found, Heard(), T0 + 30).state is RunState.FAILED
    assert judge(run(max_restarts=4), found, Heard(), T0 + 30).state is RunState.PENDING


def test_a_failed_job_whose_pods_go_on_is_ended_unless_it_is_kept() -> None:
    found = gang(job("Failed"), BOTH)
    seen = judge(run(), found, MET, T0 + 150)
    assert to_be_ended(run(), found, seen)
    assert not to_be_ended(run(keep="on_failure"), found, seen)
