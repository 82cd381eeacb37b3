"""What is true of the pods and jobs of every launch kind."""

import re

import pytest
from support.api_objects import T0, at
from support.golden import differences, golden
from support.job_manifests import (
    MANY_FIELDS,
    OWNER,
    annotation,
    command,
    container,
    fields_named,
    manifest,
    objects,
    place,
    pod,
    run,
    target,
    templates,
    variables,
)
from support.third_kind import FITJOB, register

from manycpu.pipeline.cli.spec_commands import as_yaml
from manycpu.pipeline.launchers import JOB_LAUNCHERS, refusals
from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.kubernetes.following.turns import job_of
from manycpu.pipeline.targets.kubernetes.preflight import granted, rights_to

in_every_kind = pytest.mark.parametrize("launch", [*JOB_KINDS, FITJOB.launch])
in_every_pod = pytest.mark.parametrize(
    ("launch", "role"),
    [
        pytest.param(kind.launch, role, id=f"{kind.launch}-{role}")
        for kind in (*JOB_KINDS.values(), FITJOB)
        for role in (("rank", "launcher") if kind.launcher else ("rank",))
    ],
)


@pytest.fixture(autouse=True)
def _fitjob(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the tests' own kind to what all of them do: its launcher is the example for others."""
    if "launch" in request.fixturenames:
        register(monkeypatch)


@in_every_kind
def test_golden_difference_of_a_run_that_asks_for_nothing(launch: str) -> None:
    """What a field adds is absent without it, and nothing else takes its place."""
    bare = TrainingRun(program="train.py", output="/models/qa")
    plain = JOB_LAUNCHERS[launch].objects(bare, target(launch), place())
    other = differences(as_yaml(*objects(launch, MANY_FIELDS)), as_yaml(*plain))
    assert other == golden(f"{launch}-bare.diff", other)


# every pod


@in_every_pod
def test_pods_are_allowed_by_pod_security_restricted(launch: str, role: str) -> None:
    written = objects(launch)
    security = pod(written, role)["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] != 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    inner = container(written, role)["securityContext"]
    assert inner == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert not [name for name in pod(written, role) if name.startswith("host")]
    kinds = {next(key for key in volume if key != "name") for volume in pod(written, role)["volumes"]}
    assert kinds <= {"persistentVolumeClaim", "emptyDir", "downwardAPI"}


@in_every_pod
def test_its_containers_are_told_from_sidecars_by_their_names(launch: str, role: str) -> None:
    assert container(objects(launch), role)["name"] in JOB_KINDS[launch].containers


@in_every_pod
def test_no_pod_gets_an_api_token(launch: str, role: str) -> None:
    assert pod(objects(launch, {"service_account": "trainer"}), role)["automountServiceAccountToken"] is False


@in_every_pod
def test_requests_equal_limits(launch: str, role: str) -> None:
    given = container(objects(launch), role)["resources"]
    assert set(given["limits"]) == {"cpu", "memory"}
    assert given["requests"]["memory"] == given["limits"]["memory"]
    if role == "rank":  # a launcher asks for little, and may use more for a moment
        assert given["requests"] == given["limits"]


@in_every_pod
def test_any_image_knows_the_user(launch: str, role: str) -> None:
    written = objects(launch)
    uid = pod(written, role)["securityContext"]["runAsUser"]
    assert re.search(rf"^\w+:x:{uid}:{uid}:.*:/bin/sh$", annotation(written, role, "passwd"), re.MULTILINE)
    (mount,) = [m for m in container(written, role)["volumeMounts"] if m["mountPath"] == "/etc/passwd"]
    (item,) = [i for i in pod(written, role)["volumes"][0]["downwardAPI"]["items"] if i["path"] == "passwd"]
    assert mount["subPath"] == item["path"]
    assert item["fieldRef"] == {"fieldPath": "metadata.annotations['manycpu/passwd']"}


@in_every_pod
def test_everything_is_found_by_its_run(launch: str, role: str) -> None:
    written = objects(launch)
    common = {"manycpu/run": "train-0123456789", "app.kubernetes.io/managed-by": "manycpu"}
    for one in written:
        assert one["metadata"]["labels"].items() >= common.items()
        assert one["metadata"]["ownerReferences"] == [OWNER]
    labels = templates(written)[role]["metadata"]["labels"]
    assert labels.items() >= (common | {"manycpu/attempt": "1", "manycpu/verb": "launch"}).items()


@in_every_pod
def test_the_targets_fields_reach_every_pod(launch: str, role: str) -> None:
    written = objects(launch, MANY_FIELDS)
    spec, inner = pod(written, role), container(written, role)
    assert spec["nodeSelector"] == {"pool": "training"}
    assert spec["tolerations"] == MANY_FIELDS["tolerations"]
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("batch", "trainer")
    assert spec["imagePullSecrets"] == [{"name": "registry-login"}]
    assert (inner["imagePullPolicy"], inner["image"]) == ("Always", "registry.example/ml/train@sha256:0123")


@in_every_pod
def test_what_is_not_asked_for_is_left_to_kubernetes(launch: str, role: str) -> None:
    written = objects(launch, resources={})
    assert not set(pod(written, role)) & {
        "nodeSelector",
        "tolerations",
        "priorityClassName",
        "imagePullSecrets",
    }
    inner = container(written, role)
    assert inner["resources"] == {}
    assert not set(inner) & {"imagePullPolicy", "envFrom"}
    assert not list(fields_named("suspend", written))


# ranks


@in_every_kind
@pytest.mark.parametrize(
    ("spread", "rule"),
    [
        ("require", "requiredDuringSchedulingIgnoredDuringExecution"),
        ("prefer", "preferredDuringSchedulingIgnoredDuringExecution"),
    ],
)
def test_ranks_are_spread_over_machines(launch: str, spread: str, rule: str) -> None:
    written = objects(launch, spread=spread)
    ((name, (entry,)),) = pod(written)["affinity"]["podAntiAffinity"].items()
    term = entry.get("podAffinityTerm", entry)
    assert (name, term["topologyKey"]) == (rule, "kubernetes.io/hostname")
    labels = templates(written)["rank"]["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()


@in_every_kind
def test_a_rank_is_told_the_name_of_its_machine(launch: str) -> None:
    (host,) = [entry for entry in container(objects(launch))["env"] if entry["name"] == "MANYCPU_HOST"]
    assert host["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


@in_every_kind
def test_secrets_are_taken_by_name(launch: str) -> None:
    written = objects(launch, env_from=["hub", "s3"])
    assert container(written)["envFrom"] == [{"secretRef": {"name": name}} for name in ("hub", "s3")]


@in_every_kind
@pytest.mark.parametrize(
    ("memory", "size"), [("128Gi", "64Gi"), ("3Gi", "1536Mi"), ("500M", "250000000"), ("1.5Gi", "768Mi")]
)
def test_shared_memory_is_half_of_the_limit(launch: str, memory: str, size: str) -> None:
    written = objects(launch, resources={"memory": memory})
    (shm,) = [volume["emptyDir"] for volume in pod(written)["volumes"] if volume["name"] == "shm"]
    assert shm == {"medium": "Memory", "sizeLimit": size}


@in_every_kind
def test_the_cpu_plan_is_in_the_environment_and_the_users_wins(launch: str) -> None:
    assert variables(objects(launch))["OMP_NUM_THREADS"] == "2"
    assert variables(objects(launch))["MKL_NUM_THREADS"] == "2"
    mine = variables(objects(launch, env={"OMP_NUM_THREADS": "3"}))
    assert (mine["OMP_NUM_THREADS"], mine["MANYCPU_USER_ENV"]) == ("3", "OMP_NUM_THREADS")
    assert variables(objects(launch, resources={"cpu": 0.5}))["OMP_NUM_THREADS"] == "1"


@in_every_kind
def test_manycpu_itself_comes_before_the_users_python_path(launch: str) -> None:
    assert "PYTHONPATH" not in variables(objects(launch))  # the image has it
    mine = variables(objects(launch, env={"PYTHONPATH": "/opt/mine"}))
    assert mine["PYTHONPATH"] == "/opt/manycpu/lib:/opt/mine"


@in_every_kind
def test_dollar_signs_of_the_user_stay_as_they_are(launch: str) -> None:
    written = objects(launch, args=["$(HOSTNAME)", "$5"], env={"PRICE": "$(RANK) $"})
    role = JOB_KINDS[launch].speaker
    assert variables(written, role)["PRICE"] == "$$(RANK) $$"
    assert command(written, role)[-2:] == ["$$(HOSTNAME)", "$$5"]


@in_every_kind
def test_names_fit_into_dns_labels(launch: str) -> None:
    long = place().model_copy(update={"name": "a" * 40, "attempt": 99})
    *_, job = JOB_LAUNCHERS[launch].objects(run(nnodes=99999), target(launch), long)
    last = f"{job['metadata']['name']}-worker-99998"
    assert len(last) <= 63
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", last)


@in_every_kind
def test_a_queue_holds_the_job_until_it_is_admitted(launch: str) -> None:
    if "target.queue" in JOB_LAUNCHERS[launch].UNSUPPORTED:
        return
    job = manifest(launch, {"queue": "team-a"})
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert JOB_KINDS[launch].suspended(job)


@in_every_kind
def test_no_time_to_live_deletes_the_job_before_it_was_looked_at(launch: str) -> None:
    assert not list(fields_named("ttlSecondsAfterFinished", objects(launch)))


@in_every_pod
def test_the_server_ends_what_nobody_waits_for_any_more(launch: str, role: str) -> None:
    written = objects(launch, queue_timeout=100, start_timeout=20, run_timeout=3000)
    latest = 100 + 20 + 3000 + 3600
    assert pod(written, role)["activeDeadlineSeconds"] == latest
    endless = objects(launch, run_timeout=10**11)
    assert pod(endless, role)["activeDeadlineSeconds"] == 2**31 - 1  # Kubernetes takes no more


# kinds whose operators have a run policy, and replicas of a role

with_run_policy = pytest.mark.parametrize("launch", ["pytorchjob", "mpijob"])


@with_run_policy
@pytest.mark.parametrize(
    ("asked", "restarts", "policy"),
    [(None, 0, "Never"), (None, 2, "OnFailure"), ("Never", 2, "Never"), ("OnFailure", 0, "OnFailure")],
)
def test_restart_policy(launch: str, asked: str | None, restarts: int, policy: str) -> None:
    (worker,) = fields_named("Worker", manifest(launch, {"restart_policy": asked}, max_restarts=restarts))
    assert worker["restartPolicy"] == policy


@with_run_policy
def test_the_job_has_the_deadline_of_its_pods(launch: str) -> None:
    job = manifest(launch, queue_timeout=100, start_timeout=20, run_timeout=3000)
    assert job["spec"]["runPolicy"]["activeDeadlineSeconds"] == pod(job)["activeDeadlineSeconds"]


# what cannot be expressed


@pytest.mark.parametrize(
    ("launch", "fields", "on", "field"),
    [
        ("mpijob", {"nnodes": "1:2"}, {}, "run.nnodes"),
        ("pytorchjob", {}, {"mpi": "mpich"}, "target.mpi"),
        ("pytorchjob", {}, {"runtime": "own"}, "target.runtime"),
        ("mpijob", {}, {"runtime": "own"}, "target.runtime"),
        ("trainjob", {"nnodes": "1:2"}, {}, "run.nnodes"),
        ("trainjob", {}, {"restart_policy": "OnFailure"}, "target.restart_policy"),
    ],
)
def test_what_a_kind_cannot_express_is_refused(
    launch: str, fields: KubeObject, on: KubeObject, field: str
) -> None:
    (finding,) = refusals(run(**fields), target(launch, **on))
    assert finding.field == field
    assert launch in finding.message
    assert finding.fatal


CHANGED = (
    {"args": ["--fast"]},
    {"nnodes": 3},
    {"nnodes": "1:3"},
    {"nproc_per_node": 3},
    {"subprocesses": 4},
    {"max_restarts": 1},
    {"backend": "ccl"},
    {"device": "xla"},
    {"dtype": "bf16"},
    {"downcast_bf16": True},
    {"spread": "require"},
    {"env": {"GREETING": "hello"}},
    {"env_from": ["hub"]},
    {"resources": {"cpu": 7, "memory": "8Gi"}},
    {"resources": {"cpu": 4, "memory": "9Gi"}},
    {"start_timeout": 77},
    {"run_timeout": 77},
    {"stall_timeout": 77},
)
OF_THE_PLACEMENT = {"program", "code", "data", "model", "output", "checkpoints", "resume_from", "job_name"}
"""What reaches the manifest as a path or a name that was decided before."""
NONE_OF_THE_JOBS = {
    "oversubscribe": "preflight asks for it, and it is of one machine",
    "acknowledge_timeout": "of who waits",
    "queue_timeout": "of who waits",
    "keep": "of cleanup",
    "keep_for": "of cleanup",
    "tracking": "of who waits, and of cleanup",
    "registered_model": "of cleanup",
}


def test_every_field_of_a_run_is_tried_or_said_to_be_none_of_a_job_s() -> None:
    tried = {name for fields in CHANGED for name in fields}
    assert tried | OF_THE_PLACEMENT | set(NONE_OF_THE_JOBS) == set(TrainingRun.model_fields)
    assert not tried & set(NONE_OF_THE_JOBS)


@in_every_kind
@pytest.mark.parametrize(
    ("fields", "on"),
    [
        *((fields, {}) for fields in CHANGED),
        *(({}, {name: value}) for name, value in MANY_FIELDS.items()),
        ({}, {"restart_policy": "OnFailure"}),
        ({}, {"mpi": "mpich"}),
        ({}, {"runtime": "torch-distributed-tuned"}),
    ],
    ids=str,
)
def test_every_field_reaches_the_manifest_or_is_refused(
    launch: str, fields: KubeObject, on: KubeObject
) -> None:
    if not refusals(run(**fields), target(launch, **on)):
        assert objects(launch, on, **fields) != objects(launch)


@in_every_kind
def test_all_of_a_run_can_be_expressed(launch: str) -> None:
    assert refusals(run(max_restarts=1, env_from=["a"]), target(launch)) == []


@in_every_kind
def test_staged_data_is_mounted_to_be_read_only(launch: str) -> None:
    mounts = container(objects(launch))["volumeMounts"]
    on_claim = [mount for mount in mounts if mount["name"] == "volume"]
    assert on_claim == [
        {"name": "volume", "mountPath": "/tmp/pvc-mount"},  # noqa: S108 - a pod's
        {
            "name": "volume",
            "mountPath": "/tmp/pvc-mount/manycpu/data",  # noqa: S108 - a pod's
            "subPath": "manycpu/data",
            "readOnly": True,
        },
        {
            "name": "volume",
            "mountPath": "/tmp/pvc-mount/manycpu/model",  # noqa: S108 - a pod's
            "subPath": "manycpu/model",
            "readOnly": True,
        },
    ]


# what each kind is said to be


def test_every_kind_has_a_launcher_and_can_be_chosen() -> None:
    assert set(JOB_LAUNCHERS) == set(JOB_KINDS)
    assert Kubernetes.model_json_schema()["properties"]["launch"]["enum"] == list(JOB_KINDS)


def test_the_documented_role_has_the_rights_to_every_kind_and_no_other() -> None:
    needed = {right for kind in JOB_KINDS.values() for right in rights_to(kind)}
    groups = {group for _, group, _ in needed}
    assert {right for right in granted() if right[1] in groups} == needed


@in_every_kind
def test_a_job_is_what_its_record_says(launch: str) -> None:
    kind, job = JOB_KINDS[launch], manifest(launch)
    assert (job["kind"], job["apiVersion"]) == (kind.resource.kind, kind.resource.api_version)
    assert not kind.suspended(job)
    assert set(templates(objects(launch))) == ({"rank", "launcher"} if kind.launcher else {"rank"})


@in_every_kind
def test_what_the_ranks_need_is_read_off_the_job(launch: str) -> None:
    written = objects(launch, MANY_FIELDS | {"queue": None}, nnodes=3, spread="require")
    needed = JOB_LAUNCHERS[launch].ranks(written[-1])
    assert needed is not None
    assert needed.nodes == 3
    known = {"creationTimestamp": at(0), "uid": "job"}
    created = written[-1] | {"metadata": written[-1]["metadata"] | known}
    waits = job_of(created, JOB_KINDS[launch], [], float(T0))
    assert (waits is None) is (JOB_KINDS[launch].suspend is None)
    if waits is not None:
        assert (waits.claims, waits.need) == (("training-data",), 3)
    for name in ("nodeSelector", "tolerations", "priorityClassName", "affinity"):
        assert needed.pod[name] == pod(written)[name]
    (asked,) = needed.pod["containers"]
    assert asked["resources"] == container(written)["resources"]
