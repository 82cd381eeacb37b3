"""What is read off a job that may wait for room, and what becomes of it while it holds nothing."""

from typing import Any

import pytest
from support.api_objects import T0, Object, at, container, event, job, pod, snapshot

from manycpu.pipeline.spec.job_kinds import JOB_KINDS, PYTORCHJOB, JobKind
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.kubernetes.following import diagnosis
from manycpu.pipeline.targets.kubernetes.following.attempt_recorder import RankActivity
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import Note, read_note
from manycpu.pipeline.targets.kubernetes.following.judgement import budgets, phase
from manycpu.pipeline.targets.kubernetes.following.turns import Job, Turns, job_of, patch

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


def refused(name: str, born: float = 1, message: str = FULL) -> Object:
    no = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod(name, born=born, placed=None, conditions=[no])


def read(found: Object, *pods: Object, seconds: float = 5, stuck_claim: str = "") -> Job:
    read = job_of(found, kind_of(found), pods, T0 + seconds, stuck_claim)
    assert read is not None
    return read


def waits(found: Object, *pods: Object) -> bool:
    return job_of(found, kind_of(found), pods, T0 + 5.0) is not None


def named(found: Object, run: str, born: float = 0) -> Object:
    """Return an object of another run."""
    meta = found["metadata"]
    known = {"uid": f"{run}-{meta['uid']}", "creationTimestamp": at(born)}
    return found | {"metadata": meta | known | {"labels": meta["labels"] | {"manycpu/run": run}}}


def turns(*objects: Object, seconds: float, before: Turns | None = None) -> Turns:
    """Return the turns of jobs and pods that a watch has reported."""
    made, by_kind = before or Turns(), dict[str, list[Object]]()
    for item in objects:
        by_kind.setdefault(item.get("kind", "Pod"), []).append(item)
    made.update(by_kind, T0 + seconds)
    return made


def decided(mine: Job, *others: Object, seconds: float) -> Note:
    """Return the note with which a job acts on itself."""
    decision = turns(*others, seconds=seconds).decide(mine, T0 + seconds)
    assert decision is not None
    assert decision[0] is mine
    return decision[1]


@pytest.mark.parametrize("launch", ["mpijob", "pytorchjob"])
def test_a_job_with_a_rank_that_has_no_node_tries_and_is_refused(launch: str) -> None:
    seen = read(asking(job("Created", launch=launch)), pod("a"), refused("b"))
    assert (seen.given_back, seen.refused, seen.placed, seen.need) == (None, True, 1, 2)
    assert seen.short == ("cpu", "memory")
    assert Turns().waits_for(seen) == (
        "waits for 0.9 CPUs and 1 GiB of memory; no run of this namespace holds any"
    )


def test_a_job_whose_ranks_are_placed_waits_for_nothing_whatever_became_of_them() -> None:
    assert not waits(asking(job("Running")), pod("a"), pod("b", phase="Succeeded"))


def test_a_job_that_holds_nothing_and_lacks_something_else_than_room_waits_for_no_other() -> None:
    wanted = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
    found, none = asking(job("Created")), refused("b", message=wanted)
    assert not waits(found, refused("a", message=wanted), none)
    seen = read(found, pod("a"), none)  # others may need its node
    holder = named(pod("x"), "x")
    assert (seen.refused, seen.short, turns(holder, seconds=5).waits_for(seen)) == (True, (), "")


def test_a_node_with_too_many_pods_lacks_room() -> None:
    seen = read(asking(job("Created")), refused("a", message="0/2 nodes are available: 2 Too many pods."))
    assert Turns().waits_for(seen) == "waits for 2 nodes; no run of this namespace holds any"


def test_ranks_whose_launcher_finds_no_node_wait_as_well() -> None:
    launcher = refused("l")
    launcher["metadata"]["labels"]["manycpu/role"] = "launcher"
    found, pods = asking(job("Created", launch="mpijob")), [pod("a"), pod("b")]
    assert not waits(found, *pods)
    seen = read(found, *pods, launcher)
    assert (seen.refused, seen.placed) == (True, 2)
    assert Turns().waits_for(seen).startswith("waits for a node for its launcher")
    pending = snapshot(found, [*pods, launcher])
    assert (phase(RUN, pending, NOTHING), budgets(RUN, pending, NOTHING)[0].field) == (
        "queued",
        "queue_timeout",
    )


def test_an_elastic_job_needs_its_least_number_of_nodes_and_no_more() -> None:
    least = asking(job("Created", elastic={}), nodes=4)
    least["spec"]["elasticPolicy"] = {"minReplicas": 2, "maxReplicas": 4}
    assert not waits(least, pod("a"), pod("b"), refused("c"), refused("d"))
    assert read(least, pod("a"), refused("c"), refused("d")).need == 2


def test_a_quota_that_lets_some_pods_be_made_refuses_as_well() -> None:
    found = asking(job("Created"))
    assert not read(found, pod("a"), seconds=5).refused  # the others are being made
    assert read(found, pod("a"), seconds=60).refused


def test_a_job_whose_pods_no_operator_creates_keeps_no_other_job_waiting() -> None:
    found = asking(job("Created"))
    assert job_of(found, PYTORCHJOB, [], T0 + 15.0) is not None
    assert job_of(found, PYTORCHJOB, [], T0 + 25.0) is None


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
    assert not waits(found, one)


@pytest.mark.parametrize("end", ["Succeeded", "Failed"])
def test_a_job_that_has_ended_waits_for_nothing(end: str) -> None:
    assert not waits(asking(job(end)), refused("a"))


def test_a_pod_group_is_left_to_its_scheduler() -> None:
    one = refused("a")
    one["metadata"]["annotations"] = {"scheduling.k8s.io/group-name": "qa-1"}
    assert not waits(asking(job()), one)


def test_a_job_that_gave_back_says_who_holds_what_it_waits_for_and_who_comes_before() -> None:
    mine = read(asking(job("Created")), refused("qa-1-worker-0"))
    older = [named(asking(job("Created")), "z", born=-1), named(refused("z-1-worker-0"), "z")]
    note = decided(mine, *older, seconds=20)
    assert (note.tries, note.short) == (1, ("cpu", "memory"))
    waiting = read(noted(asking(job("Suspended")), note), seconds=30)
    assert waiting.given_back == note
    holders = [named(pod(run), run) for run in ("x", "y", "qa")]
    assert turns(*older, *holders, seconds=30).waits_for(waiting) == (
        "waits for 1.8 CPUs and 2 GiB of memory; held by run x (and 1 more); after run z"
    )
    resumed = decided(waiting, seconds=40)
    assert resumed.resumed == T0 + 40.0
    again = read(noted(asking(job("Created")), resumed), refused("b"), seconds=45)
    assert decided(again, *older, seconds=50).tries == 2


def with_cpu(found: Object, cpu: str) -> Object:
    """Let each rank pod of a PyTorchJob request so much CPU."""
    worker = found["spec"]["pytorchReplicaSpecs"]["Worker"]
    requests = {"resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}}
    changed = worker | {"template": {"spec": {"containers": [requests]}}}
    return found | {"spec": found["spec"] | {"pytorchReplicaSpecs": {"Worker": changed}}}


@pytest.mark.parametrize(
    ("older", "tries"),
    [
        (asking(job("Created")), False),
        (asking(job("Created"), nodes=1), False),
        (asking(job("Created"), nodes=3), True),
        (with_cpu(asking(job("Created")), "500m"), False),
        (with_cpu(asking(job("Created")), "2"), True),
        (asking(job("Created"), nodeSelector={"disk": "fast"}), True),
    ],
)
def test_after_a_pause_only_what_asks_for_less_or_for_other_nodes_tries_before_an_older_job(
    older: Object, tries: bool
) -> None:
    note = Note(at=T0, short=("cpu",), due=T0 + 40)
    waiting = read(noted(asking(job("Suspended")), note), seconds=30)
    ahead = [named(older, "z", born=-1), named(refused("z-1-worker-0"), "z")]
    assert turns(*ahead, seconds=39).decide(waiting, T0 + 39.0) is None
    assert (turns(*ahead, seconds=41).decide(waiting, T0 + 41.0) is not None) is tries


@pytest.mark.parametrize(("created_again", "acts"), [(1, True), (200, False)])
def test_a_job_of_a_dead_follower_is_given_back_unless_its_training_had_started(
    created_again: float, acts: bool
) -> None:
    lost = named(asking(job("Created")), "lost", born=-1)
    pods = [named(pod("lost-0"), "lost", 1), named(refused("lost-1"), "lost", created_again)]
    mine = read(noted(asking(job("Suspended")), Note(at=T0, due=T0 + 9000)), seconds=400)
    seen = turns(lost, *pods, seconds=400)
    assert seen.decide(mine, T0 + 400.0) is None  # its follower may act yet
    decision = turns(lost, *pods, seconds=440, before=seen).decide(mine, T0 + 440.0)
    assert (decision is not None) is acts
    if decision is not None:
        job_given_back, note = decision
        assert (job_given_back.run, note.resumed, note.tries) == ("lost", 0, 1)


def test_pods_that_are_still_being_deleted_are_waited_for() -> None:
    given_back = noted(asking(job("Suspended")), Note(at=T0))
    assert turns(seconds=40).decide(read(given_back, pod("a")), T0 + 40.0) is None
    assert decided(read(given_back), seconds=40).resumed == T0 + 40.0


def test_a_claim_that_is_mounted_on_another_node_is_waited_for_without_a_node() -> None:
    claims = [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]
    creating = container(waiting={"reason": "ContainerCreating"})
    made = pod("qa-1-a", containerStatuses=[creating])
    made["spec"]["volumes"] = claims
    text = "Multi-Attach error for volume pvc-1: volume is already used by pod(s) x-0"
    warning = event("FailedAttachVolume", text, made)
    found = asking(job("Created"), nodes=1, volumes=claims)
    assert snapshot(found, [made], [warning]).claim_mounted_elsewhere == "data"
    running = {"containerStatuses": [container(running={"startedAt": at(3)})]}
    started = made | {"status": made["status"] | running}
    assert snapshot(found, [started], [warning]).claim_mounted_elsewhere == ""
    mine = read(found, made, stuck_claim="data")
    assert Turns().waits_for(mine) == "waits for claim data, which is mounted on another node"
    elsewhere = named(pod("x"), "x")
    assert turns(made, elsewhere, seconds=20).decide(mine, T0 + 20.0) is None
    elsewhere["spec"] = elsewhere["spec"] | {"volumes": claims}
    note = decided(mine, made, elsewhere, seconds=20)
    assert (note.claim, note.short) == ("data", ())
    waiting = read(noted(found, note), seconds=25)
    assert turns(elsewhere, seconds=25).decide(waiting, T0 + 25.0) is None
    assert decided(waiting, seconds=25).resumed == T0 + 25.0


def test_time_that_is_given_back_counts_as_queued_from_the_beginning() -> None:
    note = Note(at=T0 + 100.0)
    given_back = snapshot(noted(job("Suspended", seconds=100), note))
    tries = snapshot(
        noted(job("Created"), note.model_copy(update={"resumed": T0 + 200.0})), [refused("a", 201)]
    )
    for found in (given_back, tries):
        assert phase(RUN, found, NOTHING) == "queued"
        assert {one.field: one.due - T0 for one in budgets(RUN, found, NOTHING)} == {"queue_timeout": 1000}
    assert diagnosis.explain(given_back) == "it holds nothing until there is room for all of its ranks"


def test_a_job_that_gave_back_says_why_it_had_no_node() -> None:
    tries = [
        event("FailedScheduling", f"{n}/2 nodes are available", pod("qa-1-worker-0"), 100 + n) for n in (0, 1)
    ]
    bound = "Operation cannot be fulfilled on pods/binding: pod qa-1-worker-1 is being deleted"
    tries.append(event("FailedScheduling", bound, pod("qa-1-worker-1"), 102))
    given_back = snapshot(noted(job("Suspended", seconds=100), Note(at=T0 + 100.0)), [], tries)
    assert diagnosis.explain(given_back).endswith("\nno node when it last tried: 1/2 nodes are available")


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
