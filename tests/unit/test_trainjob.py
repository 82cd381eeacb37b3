"""TrainJobs: golden manifests with either runtime, and the traps of Trainer and of its JobSets."""

from typing import Any

import pytest
from support.api_objects import handle
from support.golden import differences, golden
from support.job_manifests import (
    MANY_FIELDS,
    annotation,
    command,
    container,
    fields_named,
    manifest,
    objects,
    pod,
    run,
    target,
    templates,
)

from manycpu.pipeline.cli.spec_commands import as_yaml
from manycpu.pipeline.launchers import refusals, trainjob
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.exit_records import EXIT_CODES
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.naming import labels
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.targets.kubernetes.following.job_snapshot import JobSnapshot

OF_THE_CLUSTER = {"runtime": "torch-distributed"}
OWN = ("priority_class", "pull_policy", "queue")
PATCHABLE = {name: value for name, value in MANY_FIELDS.items() if name not in OWN}


def written(on: KubeObject, **fields: object) -> str:
    return as_yaml(*objects("trainjob", on, spread="require", **fields))


def test_golden_trainjob_with_a_runtime_of_its_own() -> None:
    text = written(MANY_FIELDS, env_from=["hub", "s3"])
    assert text == golden("trainjob-own.yaml", text)


def test_golden_trainjob_with_a_runtime_of_the_clusters() -> None:
    text = written(PATCHABLE | OF_THE_CLUSTER)
    assert text == golden("trainjob.yaml", text)


def test_in_a_queue_the_runtime_is_the_runs_own_since_kueue_would_drop_a_patch() -> None:
    runtime, job = objects("trainjob", OF_THE_CLUSTER | {"queue": "team-a"})
    assert (runtime["kind"], job["spec"]["runtimeRef"]["kind"]) == ("TrainingRuntime", "TrainingRuntime")
    assert "runtimePatches" not in job["spec"]
    with pytest.raises(BadInputError, match="in a queue the runtime is made for the run") as raised:
        objects("trainjob", {"runtime": "ours", "queue": "team-a"})
    assert raised.value.field == "target.runtime"


def test_golden_differences_of_one_that_restarts() -> None:
    other = differences(written({}), written({}, max_restarts=3))
    assert other == golden("trainjob-restarts.diff", other)


@pytest.mark.parametrize("runtime", ["own", "torch-distributed"])
def test_trainer_never_counts_cpus_for_processes(runtime: str) -> None:
    trainer = manifest("trainjob", {"runtime": runtime})["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)


def test_ranks_meet_by_host_names_not_by_names_of_pods() -> None:
    job = "train-0123456789-1"
    assert f"--master-addr={job}-node-0-0.{job}" in container(objects("trainjob"))["command"]
    (number,) = [one for one in container(objects("trainjob"))["env"] if one["name"] == "MANYCPU_NODE_RANK"]
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert number["valueFrom"] == {"fieldRef": {"fieldPath": path}}


def test_no_pod_is_made_anew_where_none_is_to_be() -> None:
    (limit,) = fields_named("backoffLimit", objects("trainjob"))
    (more,) = fields_named("backoffLimit", objects("trainjob", max_restarts=2))
    assert (limit, more, pod(objects("trainjob"))["restartPolicy"]) == (0, 2, "Never")


def test_what_was_refused_once_is_not_tried_again() -> None:
    ((rule,),) = fields_named("rules", objects("trainjob", {"mpi": "intel"}, max_restarts=2))
    assert (rule["action"], set(rule["onExitCodes"]["values"])) == ("FailJob", set(EXIT_CODES))


@pytest.mark.parametrize(
    ("fields", "on", "field"),
    [
        ({"env_from": ["hub"]}, {}, "run.env_from"),
        ({}, {"priority_class": "batch"}, "target.priority_class"),
        ({}, {"pull_policy": "Always"}, "target.pull_policy"),
        ({"args": ["x"] * 130}, {}, "run.args"),
    ],
)
def test_what_no_job_may_change_of_a_clusters_runtime_is_refused(
    fields: KubeObject, on: KubeObject, field: str
) -> None:
    with pytest.raises(BadInputError, match=r"TrainJob (may change|has 128)") as raised:
        objects("trainjob", OF_THE_CLUSTER | on, **fields)
    assert raised.value.field == field
    assert refusals(run(**fields), target("trainjob", **on)) == []
    assert objects("trainjob", on, **fields)


def test_with_a_clusters_runtime_ranks_are_what_they_are_with_their_own() -> None:
    """But for what Trainer says itself, of the pods that were described as with an own runtime."""
    own, other = objects("trainjob"), manifest("trainjob", OF_THE_CLUSTER)
    inner, trainer = container(own), other["spec"]["trainer"]
    assert trainer["env"] == inner["env"]
    assert trainer["resourcesPerNode"] == inner["resources"]
    assert trainer["args"] == [inner["workingDir"], *inner["command"]]
    patched = templates(other)["rank"]
    assert patched["metadata"] == templates(own)["rank"]["metadata"]
    for name in ("affinity", "securityContext"):
        assert patched["spec"][name] == pod(own)[name]


def test_no_two_mounts_of_a_patch_are_of_one_volume() -> None:
    """Trainer's own list of mounts has their names for keys: the API server refuses the others."""
    spec = pod(manifest("trainjob", OF_THE_CLUSTER))
    mounts = spec["containers"][0]["volumeMounts"]
    names = [mount["name"] for mount in mounts]
    assert len(names) == len(set(names)) == len(container(objects("trainjob"))["volumeMounts"])
    assert set(names) == {volume["name"] for volume in spec["volumes"]}
    claims = [
        volume["persistentVolumeClaim"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume
    ]
    assert claims == [{"claimName": "training-data"}] * 3


def ended(code: int, *, again: bool, container: str = "node") -> KubeObject:
    terminated = {"terminated": {"exitCode": code}}
    now: dict[str, Any] = (
        {"state": {"running": {}}, "lastState": terminated} if again else {"state": terminated}
    )
    return {"metadata": {"name": "one"}, "status": {"containerStatuses": [{"name": container} | now]}}


@pytest.mark.parametrize("again", [True, False])
def test_the_first_failure_is_the_end_where_the_clusters_runtime_begins_anew(again: bool) -> None:
    job = manifest("trainjob", OF_THE_CLUSTER)
    status = trainjob.state(job, [ended(1, again=again)])
    assert status.state is RunState.FAILED
    assert status.reason == "one failed, and the runtime torch-distributed restarts them"
    assert not trainjob.state(job, [ended(0, again=again)]).state.terminal
    assert not trainjob.state(job, [ended(1, again=again, container="sidecar")]).state.terminal
    held = job | {"spec": job["spec"] | {"suspend": True}}  # its pods are being ended
    assert not trainjob.state(held, [ended(1, again=again)]).state.terminal
    restarting = manifest("trainjob", OF_THE_CLUSTER, max_restarts=1)
    assert not trainjob.state(restarting, [ended(1, again=again)]).state.terminal
    assert not trainjob.state(manifest("trainjob"), [ended(1, again=again)]).state.terminal


@pytest.mark.parametrize("metadata", [{}, {"annotations": None}, {"annotations": {trainjob.RANKS: "{"}}])
def test_of_a_job_that_is_none_of_ours_nothing_is_read(metadata: KubeObject) -> None:
    assert trainjob.ranks(manifest("trainjob") | {"metadata": metadata}) is None


@pytest.mark.parametrize(
    ("condition", "state"),
    [("Complete", RunState.SUCCEEDED), ("Failed", RunState.FAILED), ("Suspended", RunState.PENDING)],
)
def test_conditions_of_a_trainjob(condition: str, state: RunState) -> None:
    holds = [{"type": condition, "status": "True", "reason": "Why", "message": "so"}]
    assert trainjob.state(manifest("trainjob") | {"status": {"conditions": holds}}, []).state is state


# with an MPI


def test_golden_differences_of_one_with_an_mpi() -> None:
    other = differences(written({}), written({"mpi": "openmpi"}))
    assert other == golden("trainjob-openmpi.diff", other)


@pytest.mark.parametrize("mpi", ["intel", "openmpi", "mpich"])
def test_mpirun_reads_a_list_of_hosts_in_its_own_spelling(mpi: str) -> None:
    on = objects("trainjob", {"mpi": mpi}, nnodes=2)
    words = command(on, "launcher")
    assert "/etc/manycpu/hostfile" in words
    lines = annotation(on, "launcher", "hostfile").splitlines()
    end = " slots=2" if mpi == "openmpi" else ":2"
    job = "train-0123456789-1"
    assert lines == [f"{job}-node-0-{number}.{job}.ml.svc{end}" for number in range(2)]


def test_the_end_of_mpirun_is_the_jobs_and_its_launcher_speaks() -> None:
    runtime, job = objects("trainjob", {"mpi": "intel"})
    spec = runtime["spec"]["template"]["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["launcher"]}
    assert [one["name"] for one in spec["replicatedJobs"]] == ["launcher", "node"]
    assert job["metadata"]["labels"]["manycpu/speaker"] == "launcher"
    assert target("trainjob", mpi="intel").has_launcher
    assert not target("trainjob").has_launcher


def test_with_an_mpi_no_runtime_of_the_clusters_is_taken() -> None:
    with pytest.raises(BadInputError, match="made for the run"):
        objects("trainjob", {"mpi": "intel", "runtime": "mine"})
    assert objects("trainjob", {"mpi": "intel", "runtime": "torch-distributed"})


@pytest.mark.parametrize("first", ["Pod", "TrainJob"])
def test_the_launcher_is_heard_in_whatever_order_pods_and_job_are_listed(first: str) -> None:
    job = {
        "metadata": {"name": "qa-1", "uid": "job", "labels": labels("qa", attempt="1", speaker="launcher")}
    }
    pods = [
        {"metadata": {"name": role, "uid": role, "labels": labels("qa", attempt="1", role=role)}}
        for role in ("launcher", "rank")
    ]
    listed: dict[str, list[KubeObject]] = {"TrainJob": [job], "Pod": pods}
    seen = JobSnapshot(handle("trainjob").model_copy(update={"run": "qa", "uid": "job"}))
    looked_at: list[str] = []
    for kind in (first, *(kind for kind in listed if kind != first)):
        seen.apply(kind, listed[kind], [], complete=True)
        looked_at = [pod["metadata"]["name"] for pod in seen.take_changed()] or looked_at
    assert (seen.speaker, looked_at) == ("launcher", ["launcher", "rank"])
