"""What is read off a job that may wait for room, and what becomes of it while it holds nothing."""

from typing import Any

import pytest
from support.api_objects import T0, Object, at, container, event, job, pod, snapshot

from manycpu.pipeline.spec.job_kinds import JOB_KINDS, PYTORCHJOB, JobKind
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.kubernetes.following import diagnosis
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import RankActivity
from manycpu.pipeline.targets.kubernetes.following.judgement import budgets, phase
from manycpu.pipeline.targets.kubernetes.following.turns import (
    Job,
    Note,
    Turns,
    claim_mounted_elsewhere,
    job_of,
    patch,
    read_note,
    waits_for,
)

NOTHING = RankActivity()
RUN = TrainingRun.model_validate(
    {"program": "a.py", "output": "o", "nnodes": 2, "queue_timeout": 1000, "start_timeout": 300}
)
FULL = "0/2 nodes are available: 1 Insufficient cpu, 1 Insufficient memory, 1 node(s) had untolerated taint."


def asking(found: Object, nodes: int = 2, labels: dict[str, str] | None = None, **spec: Any) -> Object:
    """Add to a job what its ranks ask for."""
    inner = {"resources": {"requests": {"cpu": "900m", "memory": "1Gi"}}}
    worker = {"replicas": nodes, "template": {"spec": {"containers": [inner], **spec}}}
    replicas = "mpiReplicaSpecs" if found["kind"] == "MPIJob" else "pytorchReplicaSpecs"
    return found | {
        "metadata": found["metadata"] | {"labels": found["metadata"]["labels"] | (labels or {})},
        "spec": found["spec"] | {replicas: {"Worker": worker}},
    }


def kind_of(found: Object) -> JobKind:
    return JOB_KINDS[found["kind"].lower()]


def noted(found: Object, note: Note) -> Object:
    """Suspend a job with a note, as the API does on a patch."""
    change = patch(kind_of(found), note, "7")
    meta = found["metadata"] | {"annotations": change["metadata"]["annotations"]}
    return found | {"metadata": meta, "spec": found["spec"] | change["spec"]}


def of_run(found: Object, run: str = "qa", claim: str = "") -> Object:
    found["metadata"]["labels"]["manycpu/run"] = run
    if claim:
        found["spec"]["volumes"] = [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]
    return found


def refused(name: str, born: float = 1, message: str = FULL) -> Object:
    no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod(name, born=born, placed=None, conditions=[no])


def read(found: Object, *pods: Object, seconds: float = 5) -> Job:
    read = job_of(found, kind_of(found), pods, T0 + seconds)
    assert read is not None
    return read


def decided(mine: Job, *others: Job, now: float, mounts: dict[str, set[str]] | None = None) -> Note:
    """Return the note with which a job acts on itself."""
    decision = decision_of(mine, *others, now=now, mounts=mounts)
    assert decision is not None
    assert decision[0] is mine
    return decision[1]


def decision_of(
    mine: Job, *others: Job, now: float, mounts: dict[str, set[str]] | None = None
) -> tuple[Job, Note] | None:
    turns = Turns()
    turns.update([mine, *others], mounts or {}, now)
    return turns.decide(mine, now)


@pytest.mark.parametrize("launch", ["mpijob", "pytorchjob"])
def test_a_job_with_a_rank_that_has_no_node_tries_and_is_refused(launch: str) -> None:
    seen = read(asking(job("Created", launch=launch)), pod("a"), refused("b"))
    assert (seen.trying, seen.refused, seen.placed, seen.need) == (True, True, 1, 2)
    assert seen.short == ("cpu", "memory")
    assert waits_for(seen, [], []) == (
        "waits for 0.9 CPUs and 1 GiB of memory; no run of this namespace holds any"
    )


def test_a_job_whose_ranks_are_placed_waits_for_nothing_whatever_became_of_them() -> None:
    assert not read(asking(job("Running")), pod("a"), pod("b", phase="Succeeded")).trying


def test_who_holds_nodes_is_not_said_where_it_is_not_room_that_is_lacking() -> None:
    wanted = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
    seen = read(asking(job("Created")), refused("a", message=wanted), refused("b", message=wanted))
    assert (seen.refused, seen.short, waits_for(seen, [], ["x"])) == (True, (), "")


def test_ranks_whose_launcher_finds_no_node_wait_as_well() -> None:
    launcher = refused("l")
    launcher["metadata"]["labels"]["manycpu/role"] = "launcher"
    found, pods = asking(job("Created", launch="mpijob")), [pod("a"), pod("b")]
    assert not read(found, *pods).trying
    seen = read(found, *pods, launcher)
    assert (seen.trying, seen.refused, seen.placed) == (True, True, 2)
    assert waits_for(seen, [], []).startswith("waits for a node for its launcher")
    waits = snapshot(found, [*pods, launcher])
    assert (phase(RUN, waits, NOTHING), budgets(RUN, waits, NOTHING)[0].field) == (
        "queued",
        "queue_timeout",
    )


def test_an_elastic_job_needs_its_least_number_of_nodes_and_no_more() -> None:
    least = asking(job("Created", elastic={}), nodes=4)
    least["spec"]["elasticPolicy"] = {"minReplicas": 2, "maxReplicas": 4}
    seen = read(least, pod("a"), pod("b"), refused("c"), refused("d"))
    assert (seen.need, seen.trying, seen.refused) == (2, False, False)


def test_a_quota_that_lets_some_pods_be_made_refuses_as_well() -> None:
    found = asking(job("Created"))
    assert not read(found, pod("a"), seconds=5).refused  # the others are being made
    assert read(found, pod("a"), seconds=60).refused


OTHERS: dict[str, tuple[Object, Object]] = {
    "Kueue's queue": (asking(job(suspend=True), labels={"kueue.x-k8s.io/queue-name": "q"}), refused("a")),
    "somebody who suspended it": (asking(job("Suspended", suspend=True)), refused("a")),
    "a scheduler": (asking(job()), refused("a") | {"spec": {"schedulerName": "volcano", "containers": []}}),
    "a gate": (
        asking(job()),
        refused("a") | {"spec": {"schedulingGates": [{"name": "g"}], "containers": []}},
    ),
}


@pytest.mark.parametrize("whom", OTHERS)
def test_what_others_decide_is_left_to_them(whom: str) -> None:
    found, one = OTHERS[whom]
    assert job_of(found, kind_of(found), [one], T0 + 5.0) is None


@pytest.mark.parametrize("end", ["Succeeded", "Failed"])
def test_a_job_that_has_ended_waits_for_nothing(end: str) -> None:
    assert job_of(asking(job(end)), PYTORCHJOB, [refused("a")], T0 + 5.0) is None


def test_a_pod_group_is_left_to_its_scheduler() -> None:
    one = refused("a")
    one["metadata"]["annotations"] = {"scheduling.k8s.io/group-name": "qa-1"}
    assert job_of(asking(job()), PYTORCHJOB, [one], T0 + 5.0) is None


def test_a_job_that_gave_back_says_who_holds_what_it_waits_for_and_who_comes_before() -> None:
    mine = read(asking(job("Created")), refused("qa-1-worker-0"))
    older = mine._replace(run="z", uid="z", age=(0.0, "z"))
    note = decided(mine, older, now=T0 + 20.0)
    assert (note.tries, note.short) == (1, ("cpu", "memory"))
    waiting = read(noted(asking(job("Suspended")), note), seconds=30)
    assert (waiting.given_back, waiting.trying) == (True, False)
    assert waits_for(waiting, [older, waiting], ["x", "y", "qa"]) == (
        "waits for 1.8 CPUs and 2 GiB of memory; held by runs x and y; after run z"
    )
    resumed = decided(waiting, now=T0 + 40.0)
    assert resumed.resumed == T0 + 40.0
    again = read(noted(asking(job("Created")), resumed), refused("b"), seconds=45)
    assert decided(again, older, now=T0 + 50.0).tries == 2


def test_a_claim_that_is_mounted_on_another_node_is_waited_for_without_a_node() -> None:
    made = of_run(
        pod("a", containerStatuses=[container(waiting={"reason": "ContainerCreating"})]), claim="data"
    )
    text = "Multi-Attach error for volume pvc-1: volume is already used by pod(s) x-0"
    warning = event("FailedAttachVolume", text, made)
    assert claim_mounted_elsewhere([made], [warning]) == "data"
    started = made | {"status": made["status"] | {"containerStatuses": [container(running={})]}}
    assert claim_mounted_elsewhere([started], [warning]) == ""
    claims = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]
    mine = read(asking(job("Created"), nodes=1, volumes=claims), made)._replace(stuck="data")
    assert waits_for(mine, [], []) == "waits for claim data, which is mounted on another node"
    held = {"data": {"x", "qa"}}
    assert decision_of(mine, now=T0 + 20.0, mounts={"data": {"qa"}, "other": {"x"}}) is None
    note = decided(mine, now=T0 + 20.0, mounts=held)
    assert (note.claim, note.short) == ("data", ())
    waiting = mine._replace(stuck="", note=note, given_back=True, pods=0, placed=0)
    assert decision_of(waiting, now=T0 + 25.0, mounts=held) is None
    assert decided(waiting, now=T0 + 25.0).resumed == T0 + 25.0


def test_time_that_is_given_back_counts_as_queued_from_the_beginning() -> None:
    note = Note(at=T0 + 100.0)
    waits = snapshot(noted(job("Suspended", seconds=100), note))
    tries = snapshot(
        noted(job("Created"), note.model_copy(update={"resumed": T0 + 200.0})), [refused("a", 201)]
    )
    for found in (waits, tries):
        assert phase(RUN, found, NOTHING) == "queued"
        assert {one.field: one.due - T0 for one in budgets(RUN, found, NOTHING)} == {"queue_timeout": 1000}
    assert diagnosis.explain(waits) == "it holds nothing until there is room for all of its ranks"


def test_a_job_that_gave_back_says_why_it_had_no_node() -> None:
    tries = [
        event("FailedScheduling", f"{n}/2 nodes are available", pod("qa-1-worker-0"), 100 + n) for n in (0, 1)
    ]
    bound = "Operation cannot be fulfilled on pods/binding: pod qa-1-worker-1 is being deleted"
    tries.append(event("FailedScheduling", bound, pod("qa-1-worker-1"), 102))
    waits = snapshot(noted(job("Suspended", seconds=100), Note(at=T0 + 100.0)), [], tries)
    assert diagnosis.explain(waits).endswith("\nno node when it last tried: 1/2 nodes are available")


def test_pods_that_were_given_back_are_no_losses() -> None:
    failed = {"exitCode": 143, "startedAt": at(3), "finishedAt": at(103)}
    old = pod("a", born=1, phase="Failed", containerStatuses=[container(terminated=failed)])
    new = pod("a", born=201, phase="Failed", containerStatuses=[container(terminated=failed)])
    found = snapshot(noted(job("Suspended"), Note(at=T0 + 100.0)), [old])
    found.apply("Pod", [], [old], complete=False)
    assert diagnosis.endings(found) == []
    found.apply("Pod", [new], [], complete=False)
    found.apply("Pod", [], [new], complete=False)
    assert [one.pod for one in diagnosis.endings(found)] == ["a"]


def test_a_note_of_another_version_is_none() -> None:
    assert read_note({"metadata": {"annotations": {"manycpu/given-back": "{}"}}}) is None
    assert read_note({"metadata": {}}) is None
