"""What a job in a queue of Kueue waits for, and what that time counts for."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.api_objects import T0, Object, at, container, job, pod, snapshot

from manycpu.pipeline.spec.errors import ForbiddenError
from manycpu.pipeline.spec.observed import Observed
from manycpu.pipeline.spec.state import RankFailure
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.context import Access
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import AttemptState
from manycpu.pipeline.targets.kubernetes.following.diagnosis import endings, losses, pending
from manycpu.pipeline.targets.kubernetes.following.judgement import budgets, phase
from manycpu.pipeline.targets.kubernetes.following.kueue import (
    describe_position,
    describe_wait,
    describe_wait_once,
    latest_by_job,
)
from manycpu.pipeline.targets.kubernetes.preflight import check_queue

RUN = TrainingRun.model_validate(
    {"program": "a.py", "output": "o", "nnodes": 2, "queue_timeout": 1000, "run_timeout": 5000}
)
LACKING = (
    "couldn't assign flavors to pod set worker: insufficient unused quota for cpu in flavor x, 2 more needed"
)
NEVER = (
    "couldn't assign flavors to pod set node: insufficient quota for cpu in flavor x, previously considered "
    "podsets requests (0) + current podset request (3) > maximum capacity (1)"
)
NOW = T0 + 4010.0
OTHER = LACKING.replace("flavor x", "flavor y")
IN_VAIN = "its queue may never have as much: ask for less, or have its quota raised"
UNSEEN = (
    "Kueue has made no workload of it: see that Kueue runs, and that its configuration has PyTorchJob "
    "among integrations.frameworks"
)
KEPT = "Kueue has admitted it but not resumed it: see its events, and those of workload pytorchjob-qa-1-1"
PREEMPTED = "Preempted to accommodate a workload (UID: 7) due to prioritization in the ClusterQueue"


def workload(*conditions: tuple[str, str, str, str], born: float = 1, **fields: Any) -> Object:
    held = [
        {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": at(born)}
        for kind, status, reason, message in conditions
    ]
    name = f"pytorchjob-qa-1-{born:g}"
    labels = {"kueue.x-k8s.io/job-uid": "job"}
    return {
        "metadata": {"name": name, "namespace": "ml", "creationTimestamp": at(born), "labels": labels},
        "spec": {"queueName": "team-a", **fields.pop("spec", {})},
        "status": {"conditions": held, **fields},
    }


PENDING = ("QuotaReserved", "False", "Pending", LACKING)
RESERVED = ("QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue team")
CASES: dict[str, tuple[Object | None, float, list[str]]] = {
    "nothing yet": (None, 5, []),
    "nothing for long": (
        None,
        60,
        [UNSEEN],
    ),
    "not looked at yet": (workload(), 5, []),
    "quota": (workload(PENDING), 5, [LACKING]),
    "a quota that is too small": (
        workload(("QuotaReserved", "False", "Pending", NEVER)),
        5,
        [NEVER, IN_VAIN],
    ),
    "a quota that is too small, and another that is in use": (
        workload(("QuotaReserved", "False", "Pending", f"{NEVER}, {LACKING}")),
        5,
        [f"{NEVER}, {LACKING}", IN_VAIN],
    ),
    "of two flavors one that is too small": (
        workload(("QuotaReserved", "False", "Pending", f"{NEVER}, {OTHER}")),
        5,
        [f"{NEVER}, {OTHER}"],
    ),
    "a queue that admits nothing": (
        workload(("QuotaReserved", "False", "Inadmissible", "LocalQueue team-a doesn't exist")),
        5,
        ["LocalQueue team-a doesn't exist"],
    ),
    "just preempted": (
        workload(
            ("Evicted", "True", "Preempted", PREEMPTED), ("QuotaReserved", "False", "Pending", PREEMPTED)
        ),
        5,
        [f"it was preempted: {PREEMPTED}"],
    ),
    "preempted, and waits again": (
        workload(("Evicted", "True", "Preempted", PREEMPTED), PENDING),
        5,
        [f"it was preempted: {PREEMPTED}", LACKING],
    ),
    "evicted for another reason": (
        workload(("Evicted", "True", "PodsReadyTimeout", "Exceeded the PodsReady timeout")),
        5,
        ["it was evicted (PodsReadyTimeout): Exceeded the PodsReady timeout"],
    ),
    "deactivated": (
        workload(spec={"active": False}),
        5,
        ["workload pytorchjob-qa-1-1 is deactivated: it waits until its spec.active is set to true"],
    ),
    "a check that has not passed": (
        workload(
            RESERVED,
            admissionChecks=[
                {"name": "budget", "state": "Pending", "message": "asks   finance"},
                {"name": "other", "state": "Ready", "message": ""},
            ],
        ),
        5,
        ["admission check budget is Pending: asks finance"],
    ),
    "admitted": (workload(RESERVED, ("Admitted", "True", "Admitted", "admitted")), 5, []),
    "admitted, and still suspended": (
        workload(RESERVED, ("Admitted", "True", "Admitted", "admitted")),
        60,
        [KEPT],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_it_waits_for_is_said_in_words(case: str) -> None:
    found, seconds, lines = CASES[case]
    assert describe_wait(found, job(suspend=True), T0 + seconds) == lines


def test_a_priority_that_may_not_exist_is_named_where_kueue_makes_no_workload() -> None:
    found = job(suspend=True)
    found["metadata"] = found["metadata"] | {"labels": {"kueue.x-k8s.io/priority-class": "hihg"}}
    (line,) = describe_wait(None, found, T0 + 60)
    assert "see that there is a WorkloadPriorityClass 'hihg' (target.queue_priority), that Kueue runs" in line


def test_what_may_not_be_seen_is_told() -> None:
    def forbidden(*_: object) -> None:
        raise ForbiddenError("no")

    waiting = job(suspend=True)
    waiting["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a"}
    cluster: Any = SimpleNamespace(list=forbidden)
    assert describe_wait_once(cluster, snapshot(waiting), T0).endswith("this account may not list workloads")


def checked(found: Object | None = None, **fields: str) -> list[str]:
    """Look for a queue in a cluster that has this one."""
    target = Kubernetes.model_validate({"namespace": "ml", **fields})
    cluster = SimpleNamespace(path=lambda kind: f"/apis/kueue.x-k8s.io/v1/{kind}", get=lambda *_: found)
    ctx: Any = SimpleNamespace(target=target, access=Access(opened={"ml": cluster}))
    return [f"{one.field}: {one.message}" for one in check_queue(ctx)]


def test_preflight_looks_at_the_queue() -> None:
    condition = {"type": "Active", "status": "False", "reason": "ClusterQueueDoesNotExist", "message": "No."}
    assert checked() == []
    assert checked({"status": {}}, queue="a") == []
    assert checked(queue="a") == ["target.queue: there is no LocalQueue 'a' in namespace ml"]
    assert checked({"status": {"conditions": [condition]}}, queue="a") == [
        "target.queue: LocalQueue 'a' admits nothing at present: No. (ClusterQueueDoesNotExist)"
    ]
    assert checked(queue_priority="high") == [
        "target.queue_priority: it is of a queue, and target.queue is left out"
    ]


def test_of_several_workloads_of_a_job_the_latest_counts() -> None:
    foreign = workload() | {"metadata": workload()["metadata"] | {"labels": {}}}
    assert latest_by_job([workload(born=9), foreign, workload(born=3)])["job"] == workload(born=9)


@pytest.mark.parametrize(
    ("local", "overall", "told"),
    [
        (0, 0, "it is number 1 in queue team-a"),
        (1, 4, "it is number 2 in queue team-a, and 5 of all that wait for its quota"),
    ],
)
def test_its_place_is_told(local: int, overall: int, told: str) -> None:
    places = {"positionInLocalQueue": local, "positionInClusterQueue": overall}
    one = {"metadata": {"name": "pytorchjob-qa-1-1"}, "localQueueName": "team-a", **places}
    assert describe_position(workload(), [{"metadata": {"name": "other"}}, one]) == told
    assert describe_position(workload(), []) == ""


# time


def resumed(suspended: bool, seconds: float) -> Object:
    """Make a job whose operator suspended it, or had it go on, at a time."""
    found = job(suspend=suspended)
    status = str(suspended)
    found["status"] = {
        "conditions": [{"type": "Suspended", "status": status, "lastTransitionTime": at(seconds)}]
    }
    return found


def placed(*seconds: float) -> list[Object]:
    return [pod(f"p{number}", born=when - 1, placed=when) for number, when in enumerate(seconds)]


def trained() -> AttemptState:
    """Give what is known of an attempt that began after 20 s, whose ranks met after 30 s."""
    meeting = {"round": 0, "world_size": 2, "began": T0 + 30.0, "hosts": ["a"], "ranks": [0, 1]}
    return AttemptState(
        attempt=1, began=T0 + 20.0, admitted=T0 + 5.0, spoke=T0 + 2000.0, observed=Observed(rounds=[meeting])
    )


def due(found: Object, pods: list[Object], state: AttemptState) -> dict[str, float]:
    return {one.field: one.due - T0 for one in budgets(RUN, snapshot(found, pods), state.activity)}


def test_a_preempted_run_has_all_of_its_queue_timeout_and_its_run_timeout_stands_still() -> None:
    state = trained()
    just_now = job(suspend=True)  # its operator has not noticed yet: it was made long ago
    state.pause(T0 + 4000.0)
    assert due(just_now, placed(10, 20), state) == {"queue_timeout": 5000}
    assert due(resumed(True, 4001), [], state) == {"queue_timeout": 5000}


def test_the_time_in_which_it_waited_again_is_no_time_of_the_run() -> None:
    state = trained()
    state.pause(T0 + 4000.0)
    state.begin(T0 + 20.0, T0 + 5.0, NOW)  # the pods that it had
    assert state.paused == T0 + 4000
    state.begin(T0 + 4600.0, T0 + 4590.0, NOW)
    assert (state.began - T0, state.paused) == (620, 0)
    assert due(resumed(False, 4590), placed(4595, 4600), state)["run_timeout"] == 5620


def test_pods_that_nobody_took_back_are_the_runs_again() -> None:
    state = trained()
    state.pause(T0 + 4000.0)
    state.begin(T0 + 20.0, T0 + 5.0, T0 + 4100.0)
    assert (state.began - T0, state.paused, state.activity.met) == (20, 0, True)
    assert "run_timeout" in due(job("Running"), placed(10, 20), state)


def test_a_run_older_than_its_queue_timeout_waits_for_its_pods_when_it_goes_on() -> None:
    state = trained()
    state.pause(T0 + 4000.0)
    assert due(resumed(False, 4100), [], state) == {"queue_timeout": 5100}
    assert due(resumed(False, 4100), placed(4101, 4101)[:1], state) == {"queue_timeout": 5100}


def test_pods_that_are_gone_are_waited_for_since_they_were_seen_last() -> None:
    activity = trained().activity._replace(last_placed_or_suspended=T0 + 4999.0)
    found = budgets(RUN, snapshot(job("Running"), placed(10, 20)[:1]), activity)
    assert {one.field: one.due - T0 for one in found}["queue_timeout"] == 5999


def test_pods_that_still_end_are_no_nodes_of_a_run_that_goes_on() -> None:
    old = placed(10, 20)
    for one in old:
        one["metadata"] = one["metadata"] | {"deletionTimestamp": at(4000)}
    new = [pod(name, born=4101, placed=None) for name in ("w-2", "w-3")]
    assert phase(RUN, snapshot(resumed(False, 4100), [*old, *new]), trained().activity) == "queued"


def test_of_a_pod_that_failed_and_is_made_anew_the_new_one_counts() -> None:
    failed, running = placed(10, 20)
    failed["status"]["phase"] = "Failed"
    again = pod("w-0-again", born=600, placed=None)
    assert phase(RUN, snapshot(job("Running"), [failed, running, again]), trained().activity) == "queued"


def test_an_operator_has_all_of_its_time_when_the_queue_lets_a_job_go_on() -> None:
    waited = AttemptState(attempt=1).activity._replace(last_placed_or_suspended=T0 + 3600.0)
    (found,) = budgets(RUN, snapshot(job()), waited)
    assert (found.field, found.due - T0) == ("acknowledge_timeout", 3600 + RUN.acknowledge_timeout)


def test_the_loss_of_a_pod_that_was_made_in_the_second_of_its_admission_is_told() -> None:
    lost = pod("w-0", born=4100, placed=4101, phase="Failed", reason="Evicted", message="low on memory")
    found = snapshot(resumed(False, 4100), [lost])
    found.apply("Pod", [], [lost], complete=False)
    assert any("low on memory" in line for line in losses(found))


def test_a_preemption_that_nobody_saw_begins_the_time_of_the_run_anew() -> None:
    state = trained()
    state.begin(T0 + 4600.0, T0 + 4590.0, NOW)
    assert (state.began - T0, state.preempted - T0, state.activity.met) == (4600, 4590, False)
    state.begin(T0 + 4600.0, T0 + 4590.0, NOW)
    assert state.began == T0 + 4600


def test_a_pod_that_is_made_anew_while_nothing_was_suspended_changes_no_time() -> None:
    state = trained()
    state.begin(T0 + 3000.0, T0 + 5.0, NOW)
    assert (state.began, state.preempted) == (T0 + 20, 0)


def test_ranks_that_had_met_before_it_was_preempted_meet_again() -> None:
    state = trained()
    found, pods = resumed(False, 4590), placed(4595, 4600)
    assert phase(RUN, snapshot(resumed(False, 5), placed(10, 20)), state.activity) == "running"
    state.pause(T0 + 4000.0)
    state.begin(T0 + 4600.0, T0 + 4590.0, NOW)
    assert phase(RUN, snapshot(found, pods), state.activity) == "starting"
    meeting = state.observed.rounds[0] | {"began": T0 + 4610.0}
    state.observed.rounds.append(meeting)
    assert phase(RUN, snapshot(found, pods), state.activity) == "running"


def test_how_ranks_ended_that_were_preempted_is_no_failure() -> None:
    state = trained()
    state.observed.failure = RankFailure(rank=1, host="a", exit_code=-15, last_lines=())
    state.observed.failed_at = T0 + 4001.0
    state.pause(T0 + 4000.0)
    state.begin(T0 + 4600.0, T0 + 4590.0, NOW)
    assert state.observed.failure is None


@pytest.mark.parametrize(("state", "paused"), [(AttemptState(attempt=1), 1.4), (trained(), 4000.4)])
def test_nodes_in_the_very_second_of_its_suspension_end_its_wait(state: AttemptState, paused: float) -> None:
    state.pause(T0 + paused)
    state.begin(float(int(T0 + paused)), float(int(T0 + paused)), NOW)
    assert state.activity.began
    assert not state.activity.paused


def test_a_job_that_waits_for_the_first_time_begins_when_it_has_its_nodes() -> None:
    state = AttemptState(attempt=1)
    state.pause(T0 + 1.0)
    state.begin(T0 + 700.0, T0 + 690.0, NOW)
    assert (state.began, state.preempted, state.activity.met) == (T0 + 700, 0, False)


def test_pods_that_a_suspension_ended_explain_no_failure() -> None:
    ended = container(terminated={"exitCode": 143, "finishedAt": at(4002), "startedAt": at(30)})
    old = pod("w-0", born=10, placed=11, phase="Failed", containerStatuses=[ended])
    found = snapshot(resumed(False, 5), [old])
    assert [one.code for one in endings(found)] == [-15]
    found.apply("Pod", [], [old], complete=False)
    assert [one.code for one in endings(found)] == [-15]
    found.apply("PyTorchJob", [resumed(False, 4590)], [], complete=True)
    assert endings(found) == []


def test_of_a_suspended_job_it_is_the_queue_that_is_waited_for_and_no_pod() -> None:
    found = job(suspend=True)
    found["metadata"] = found["metadata"] | {"labels": found["metadata"]["labels"] | QUEUED}
    texts = [reason.text for reason in pending(snapshot(found, [pod("a", placed=None)]))]
    assert texts == ["it is suspended, until Kueue's queue team-a admits it"]


QUEUED = {"kueue.x-k8s.io/queue-name": "team-a"}
