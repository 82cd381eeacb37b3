"""Manifests of jobs, word by word, and the traps of the operators that run them.

After a change that is meant: ``MANYCPU_GOLDEN=write pytest tests/unit/test_kubernetes_manifests.py``, and
read the diff.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.killable_programs import Program

from manycpu.pipeline.launchers import JOB_LAUNCHERS, mpijob, pytorchjob, refusals
from manycpu.pipeline.launchers.ranks import Ranks, rank_template
from manycpu.pipeline.render import as_yaml
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.job_kinds import JOB_KINDS
from manycpu.pipeline.spec.kube_object import KubeObject
from manycpu.pipeline.spec.placement import CODE, Placement
from manycpu.pipeline.spec.targets import Kubernetes
from manycpu.pipeline.spec.training_run import TrainingRun
from manycpu.pipeline.targets.kubernetes.preflight import granted, rights_to

GOLDEN = Path(__file__).parent / "golden"
OWNER = {"apiVersion": "v1", "kind": "ConfigMap", "name": "train-0123456789", "uid": "0b1c"}
MPIS = ("intel", "openmpi", "mpich")
KINDS = tuple(JOB_KINDS)


def run(**fields: Any) -> TrainingRun:
    known = {
        "program": "train.py",
        "args": ["--data", "{data}", "--out", "{output}", "--keep", "{x}"],
        "output": "/models/qa",
        "nnodes": 2,
        "nproc_per_node": 2,
        "resources": {"cpu": 4, "memory": "8Gi"},
    }
    return TrainingRun(**known | fields)


def target(launch: str = "pytorchjob", **fields: Any) -> Kubernetes:
    return Kubernetes.model_validate({"launch": launch, "namespace": "ml"} | fields)


def place(mount: str = "/tmp/pvc-mount", **fields: Any) -> Placement:  # noqa: S108 - a pod's
    home = f"{mount}/manycpu"
    known = {
        "name": "train-0123456789",
        "attempt": 1,
        "python": "python3",
        "code": CODE,
        "program": ("train.py",),
        "data": f"{home}/data/ab12",
        "output": f"{home}/runs/train-0123456789/attempts/1/output",
        "checkpoints": f"{home}/runs/train-0123456789/checkpoints",
        "caches": f"{home}/caches",
        "attempt_directory": f"{home}/runs/train-0123456789/attempts/1",
        "image": "registry.example/ml/train@sha256:0123",
        "claim": "training-data",
        "owners": (OWNER,),
    }
    return Placement.model_validate(known | fields)


def manifest(launch: str = "pytorchjob", on: KubeObject | None = None, **fields: Any) -> KubeObject:
    where = target(launch, **(on or {}))
    return JOB_LAUNCHERS[launch].objects(run(**fields), where, place(where.mount_path))[-1]


def replicas(made: KubeObject) -> KubeObject:
    spec = made["spec"]
    return dict(spec.get("pytorchReplicaSpecs") or spec["mpiReplicaSpecs"])


def pod(made: KubeObject, role: str = "Worker") -> KubeObject:
    return dict(replicas(made)[role]["template"]["spec"])


def container(made: KubeObject, role: str = "Worker") -> KubeObject:
    (found,) = pod(made, role)["containers"]
    return dict(found)


def variables(made: KubeObject, role: str = "Worker") -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container(made, role)["env"] if "value" in entry}


def command(made: KubeObject, role: str = "Worker") -> list[str]:
    return list(container(made, role)["command"])


def annotation(made: KubeObject, role: str, name: str) -> str:
    return str(replicas(made)[role]["template"]["metadata"]["annotations"][f"manycpu/{name}"])


def every_pod() -> Iterator[Any]:
    for launch in KINDS:
        for role in replicas(manifest(launch)):
            yield pytest.param(launch, role, id=f"{launch}-{role}")


in_every_pod = pytest.mark.parametrize(("launch", "role"), list(every_pod()))
in_every_kind = pytest.mark.parametrize("launch", KINDS)


def check(name: str, made: KubeObject) -> None:
    path = GOLDEN / f"{name}.yaml"
    text = as_yaml(made)
    if os.environ.get("MANYCPU_GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


# a run of many settings, as a user would give them

SEED_RUN: KubeObject = {
    "program": "question_answering",
    "args": ["--model_name_or_path", "{model}", "--per_device_train_batch_size", "12", "--bf16"],
    "nnodes": "1:4",
    "nproc_per_node": 1,
    "max_restarts": 10,
    "backend": "ccl",
    "dtype": "bf16",
    "resources": {"cpu": 200, "memory": "128Gi"},
    "env": {
        "LD_PRELOAD": "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4:/usr/local/lib/libiomp5.so",
        "OMP_NUM_THREADS": "56",
        "CCL_WORKER_COUNT": "1",
        "LOGLEVEL": "INFO",
    },
    "env_from": ["hub-token"],
}
SEED_TARGET: KubeObject = {
    "claim": "training-data",
    "restart_policy": "OnFailure",
    "pull_policy": "IfNotPresent",
    "node_selector": {"node.kubernetes.io/instance-type": "m7i.metal-48xl"},
}
MANY_FIELDS: KubeObject = {
    "node_selector": {"pool": "training"},
    "tolerations": [{"key": "training", "operator": "Exists", "effect": "NoSchedule"}],
    "priority_class": "batch",
    "queue": "team-a",
    "service_account": "trainer",
    "pull_secret": "registry-login",
    "pull_policy": "Always",
    "mount_path": "/data",
}


def test_golden_elastic_pytorchjob_of_the_bert_recipe() -> None:
    recipe = ("-m", "manycpu.pipeline.recipes.question_answering")
    placement = place(program=recipe, model="/tmp/pvc-mount/manycpu/model/cd34")  # noqa: S108 - a pod's
    [made] = pytorchjob.objects(run(**SEED_RUN), target(**SEED_TARGET), placement)
    check("pytorchjob-elastic", made)
    worker, elastic = replicas(made)["Worker"], made["spec"]["elasticPolicy"]
    assert (worker["replicas"], worker["restartPolicy"]) == (4, "OnFailure")
    assert (elastic["minReplicas"], elastic["maxReplicas"], elastic["maxRestarts"]) == (1, 4, 10)
    assert elastic["rdzvBackend"] == "c10d"
    amounts = {"cpu": "200", "memory": "128Gi"}
    assert container(made)["resources"] == {"requests": amounts, "limits": amounts}
    assert container(made)["imagePullPolicy"] == "IfNotPresent"
    assert command(made)[:3] == ["python3", "-m", "torch.distributed.run"]
    assert pod(made)["nodeSelector"] == SEED_TARGET["node_selector"]
    volumes = {volume["name"]: volume for volume in pod(made)["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    mounts = {mount["mountPath"]: mount["name"] for mount in container(made)["volumeMounts"]}
    assert (mounts["/tmp/pvc-mount"], mounts["/dev/shm"]) == ("volume", "shm")  # noqa: S108 - a pod's
    given = variables(made)
    assert given.items() >= SEED_RUN["env"].items()
    assert given["HF_HOME"] == "/tmp/pvc-mount/manycpu/caches/huggingface"  # noqa: S108 - a pod's
    assert given["HF_DATASETS_CACHE"] == "/tmp/pvc-mount/manycpu/caches/datasets"  # noqa: S108 - a pod's


def test_golden_static_pytorchjob_with_every_field_of_the_target() -> None:
    check("pytorchjob-static", manifest("pytorchjob", MANY_FIELDS, spread="require", env_from=["hub", "s3"]))


@pytest.mark.parametrize("mpi", MPIS)
def test_golden_mpijob(mpi: str) -> None:
    check(f"mpijob-{mpi}", manifest("mpijob", MANY_FIELDS | {"mpi": mpi}, env={"GREETING": "good morning"}))


# every pod


@in_every_pod
def test_pods_are_allowed_by_pod_security_restricted(launch: str, role: str) -> None:
    made = manifest(launch)
    security = pod(made, role)["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] != 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    inner = container(made, role)["securityContext"]
    assert inner == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    kinds = {next(key for key in volume if key != "name") for volume in pod(made, role)["volumes"]}
    assert kinds <= {"persistentVolumeClaim", "emptyDir", "downwardAPI"}


@in_every_pod
def test_no_pod_gets_an_api_token(launch: str, role: str) -> None:
    assert (
        pod(manifest(launch, {"service_account": "trainer"}), role)["automountServiceAccountToken"] is False
    )


@in_every_pod
def test_requests_equal_limits(launch: str, role: str) -> None:
    given = container(manifest(launch), role)["resources"]
    assert given["requests"] == given["limits"]
    assert set(given["limits"]) == {"cpu", "memory"}


@in_every_pod
def test_any_image_knows_the_user(launch: str, role: str) -> None:
    made = manifest(launch)
    uid = pod(made, role)["securityContext"]["runAsUser"]
    assert re.search(rf"^\w+:x:{uid}:{uid}:.*:/bin/sh$", annotation(made, role, "passwd"), re.MULTILINE)
    (mount,) = [m for m in container(made, role)["volumeMounts"] if m["mountPath"] == "/etc/passwd"]
    (item,) = [i for i in pod(made, role)["volumes"][0]["downwardAPI"]["items"] if i["path"] == "passwd"]
    assert mount["subPath"] == item["path"]
    assert item["fieldRef"] == {"fieldPath": "metadata.annotations['manycpu/passwd']"}


@in_every_pod
def test_everything_is_found_by_its_run(launch: str, role: str) -> None:
    made = manifest(launch)
    known = {"manycpu/run": "train-0123456789", "app.kubernetes.io/managed-by": "manycpu"}
    assert made["metadata"]["labels"].items() >= known.items()
    assert made["metadata"]["ownerReferences"] == [OWNER]
    labels = replicas(made)[role]["template"]["metadata"]["labels"]
    assert labels.items() >= (known | {"manycpu/attempt": "1", "manycpu/verb": "launch"}).items()


@in_every_pod
def test_the_targets_fields_reach_every_pod(launch: str, role: str) -> None:
    made = manifest(launch, MANY_FIELDS)
    spec, inner = pod(made, role), container(made, role)
    assert spec["nodeSelector"] == {"pool": "training"}
    assert spec["tolerations"] == MANY_FIELDS["tolerations"]
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("batch", "trainer")
    assert spec["imagePullSecrets"] == [{"name": "registry-login"}]
    assert (inner["imagePullPolicy"], inner["image"]) == ("Always", "registry.example/ml/train@sha256:0123")


@in_every_pod
def test_what_is_not_asked_for_is_left_to_kubernetes(launch: str, role: str) -> None:
    made = manifest(launch, resources={})
    assert not set(pod(made, role)) & {"nodeSelector", "tolerations", "priorityClassName", "imagePullSecrets"}
    inner = container(made, role)
    assert inner["resources"] == {}
    assert not set(inner) & {"imagePullPolicy", "envFrom"}
    assert "suspend" not in made["spec"]["runPolicy"]


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
    made = manifest(launch, spread=spread)
    ((name, (entry,)),) = pod(made)["affinity"]["podAntiAffinity"].items()
    term = entry.get("podAffinityTerm", entry)
    assert (name, term["topologyKey"]) == (rule, "kubernetes.io/hostname")
    labels = replicas(made)["Worker"]["template"]["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()


def test_the_mpi_launcher_needs_no_machine_of_its_own() -> None:
    made = manifest("mpijob", spread="require")
    labels = replicas(made)["Launcher"]["template"]["metadata"]["labels"]
    (term,) = pod(made)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert not term["labelSelector"]["matchLabels"].items() <= labels.items()
    assert "affinity" not in pod(made, "Launcher")


@in_every_kind
def test_a_rank_is_told_the_name_of_its_machine(launch: str) -> None:
    (host,) = [entry for entry in container(manifest(launch))["env"] if entry["name"] == "MANYCPU_HOST"]
    assert host["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


@in_every_kind
def test_secrets_are_taken_by_name(launch: str) -> None:
    made = manifest(launch, env_from=["hub", "s3"])
    assert container(made)["envFrom"] == [{"secretRef": {"name": name}} for name in ("hub", "s3")]


@in_every_kind
@pytest.mark.parametrize(
    ("memory", "size"), [("128Gi", "64Gi"), ("3Gi", "1536Mi"), ("500M", "250000000"), ("1.5Gi", "768Mi")]
)
def test_shared_memory_is_half_of_the_limit(launch: str, memory: str, size: str) -> None:
    made = manifest(launch, resources={"memory": memory})
    (shm,) = [volume["emptyDir"] for volume in pod(made)["volumes"] if volume["name"] == "shm"]
    assert shm == {"medium": "Memory", "sizeLimit": size}


@in_every_kind
def test_the_cpu_plan_is_in_the_environment_and_the_users_wins(launch: str) -> None:
    assert variables(manifest(launch))["OMP_NUM_THREADS"] == "2"
    assert variables(manifest(launch))["MKL_NUM_THREADS"] == "2"
    mine = variables(manifest(launch, env={"OMP_NUM_THREADS": "3"}))
    assert (mine["OMP_NUM_THREADS"], mine["MANYCPU_USER_ENV"]) == ("3", "OMP_NUM_THREADS")
    assert variables(manifest(launch, resources={"cpu": 0.5}))["OMP_NUM_THREADS"] == "1"


@in_every_kind
def test_manycpu_itself_comes_before_the_users_python_path(launch: str) -> None:
    assert "PYTHONPATH" not in variables(manifest(launch))  # the image has it
    mine = variables(manifest(launch, env={"PYTHONPATH": "/opt/mine"}))
    assert mine["PYTHONPATH"] == "/opt/manycpu/lib:/opt/mine"


@in_every_kind
def test_dollar_signs_of_the_user_stay_as_they_are(launch: str) -> None:
    made = manifest(launch, args=["$(HOSTNAME)", "$5"], env={"PRICE": "$(RANK) $"})
    role = "Launcher" if launch == "mpijob" else "Worker"
    assert variables(made, role)["PRICE"] == "$$(RANK) $$"
    assert command(made, role)[-2:] == ["$$(HOSTNAME)", "$$5"]


@in_every_kind
def test_names_fit_into_dns_labels(launch: str) -> None:
    where = target(launch)
    long = place().model_copy(update={"name": "a" * 40, "attempt": 99})
    [made] = JOB_LAUNCHERS[launch].objects(run(nnodes=99999), where, long)
    last = f"{made['metadata']['name']}-worker-99998"
    assert len(last) <= 63
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", last)


@in_every_kind
def test_a_queue_holds_the_job_until_it_is_admitted(launch: str) -> None:
    made = manifest(launch, {"queue": "team-a"})
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert made["spec"]["runPolicy"]["suspend"] is True


@in_every_kind
def test_no_time_to_live_deletes_the_job_before_it_was_looked_at(launch: str) -> None:
    assert "ttlSecondsAfterFinished" not in manifest(launch)["spec"]["runPolicy"]


@in_every_pod
def test_the_server_ends_what_nobody_waits_for_any_more(launch: str, role: str) -> None:
    """The job's own deadline is not enough: the training-operator does not look at it by itself."""
    made = manifest(launch, queue_timeout=100, start_timeout=20, run_timeout=3000)
    latest = 100 + 20 + 3000 + 3600
    assert made["spec"]["runPolicy"]["activeDeadlineSeconds"] == latest
    assert pod(made, role)["activeDeadlineSeconds"] == latest
    endless = manifest(launch, run_timeout=10**12)
    assert pod(endless, role)["activeDeadlineSeconds"] == 2**31 - 1  # Kubernetes takes no more


@in_every_kind
@pytest.mark.parametrize(
    ("asked", "restarts", "policy"),
    [(None, 0, "Never"), (None, 2, "OnFailure"), ("Never", 2, "Never"), ("OnFailure", 0, "OnFailure")],
)
def test_restart_policy(launch: str, asked: str | None, restarts: int, policy: str) -> None:
    made = manifest(launch, {"restart_policy": asked}, max_restarts=restarts)
    assert replicas(made)["Worker"]["restartPolicy"] == policy


# PyTorchJob


def test_the_operator_finds_its_container() -> None:
    assert container(manifest())["name"] == "pytorch"


def test_there_is_no_master_so_that_the_operator_adds_no_init_container() -> None:
    assert list(replicas(manifest())) == ["Worker"]
    assert replicas(manifest(nnodes=1))["Worker"]["replicas"] == 1


def test_static_ranks_follow_the_pods() -> None:
    made = manifest(nnodes=3)
    assert replicas(made)["Worker"]["replicas"] == 3
    assert "elasticPolicy" not in made["spec"]
    words = command(made)
    assert {"--nnodes=3", "--nproc-per-node=2", "--node-rank=$(MANYCPU_NODE_RANK)"} <= set(words)
    assert "--master-addr=train-0123456789-1-worker-0" in words
    (rank,) = [entry for entry in container(made)["env"] if entry["name"] == "MANYCPU_NODE_RANK"]
    path = "metadata.labels['training.kubeflow.org/replica-index']"
    assert rank["valueFrom"] == {"fieldRef": {"fieldPath": path}}


@pytest.mark.parametrize(
    ("fields", "bounds"), [({"nnodes": "1:4"}, (1, 4)), ({"nnodes": 2, "max_restarts": 3}, (2, 2))]
)
def test_ranks_that_restart_or_come_and_go_meet_by_c10d(fields: KubeObject, bounds: tuple[int, int]) -> None:
    made = manifest(**fields)
    elastic = made["spec"]["elasticPolicy"]
    assert (elastic["minReplicas"], elastic["maxReplicas"]) == bounds
    assert replicas(made)["Worker"]["replicas"] == bounds[1]
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=train-0123456789-1-worker-0:23456"} <= set(command(made))
    (address,) = [entry for entry in container(made)["env"] if entry["name"] == "MANYCPU_ADDRESS"]
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert "--local-addr=$(MANYCPU_ADDRESS)" in command(made)
    # Of a lost node the shared store would stay behind.
    assert variables(made)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_restarts_of_pods_have_an_end() -> None:
    assert manifest(max_restarts=3)["spec"]["runPolicy"]["backoffLimit"] == 4  # the fourth is one too many
    assert f"--max-restarts={3}" in command(manifest(max_restarts=3))


@pytest.mark.parametrize("nnodes", [2, "1:2"])
def test_the_first_pod_waits_for_those_that_are_still_queued(nnodes: int | str) -> None:
    made = manifest(nnodes=nnodes, queue_timeout=1000, start_timeout=100)
    (conf,) = [word for word in command(made) if word.startswith("--rdzv-conf=")]
    assert set(re.findall(r"=(\d+)", conf)) == {"1100"}


def test_pods_that_still_write_are_not_deleted() -> None:
    assert manifest()["spec"]["runPolicy"]["cleanPodPolicy"] == "None"


# MPIJob


def test_sshd_of_workers_ends_with_the_job() -> None:
    assert manifest("mpijob")["spec"]["runPolicy"]["cleanPodPolicy"] == "Running"


def test_the_launcher_starts_when_sshd_answers() -> None:
    made = manifest("mpijob")
    assert made["spec"]["launcherCreationPolicy"] == "WaitForWorkersReady"
    port = container(made)["startupProbe"]["tcpSocket"]["port"]
    assert f"Port {port}\n" in annotation(made, "Worker", "sshd_config")
    assert port > 1023


def test_the_launcher_itself_awaits_every_worker_of_a_job_that_was_suspended(tmp_path: Path) -> None:
    *words, _, _ = mpijob.await_workers()
    assert command(manifest("mpijob"), "Launcher")[: len(words)] == words
    hostfile = tmp_path / "hostfile"
    with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as second:
        second.bind(("127.0.0.2", first.getsockname()[1]))
        hostfile.write_text("127.0.0.1:2\n127.0.0.2 slots=2\n")
        done = [sys.executable, *words[1:], str(hostfile), str(first.getsockname()[1]), "echo", "all there"]
        with Program(done, stdout=subprocess.PIPE, text=True) as waiting:
            first.accept()[0].close()
            assert waiting.poll() is None
            second.listen()
            said, _ = waiting.communicate(timeout=60)
    assert said == "all there\n"


def test_keys_are_where_others_than_root_can_read_them() -> None:
    made = manifest("mpijob")
    folder = made["spec"]["sshAuthMountPath"]
    assert not folder.startswith("/root")
    assert f"AuthorizedKeysFile {folder}/authorized_keys\n" in annotation(made, "Worker", "sshd_config")
    assert f"IdentityFile {folder}/id_rsa\n" in annotation(made, "Launcher", "ssh_config")
    assert pod(made)["securityContext"]["fsGroup"] == pod(made)["securityContext"]["runAsGroup"]


def test_ssh_needs_no_options_that_the_operator_would_overwrite() -> None:
    made = manifest("mpijob", {"mpi": "openmpi"})
    assert variables(made, "Launcher")["OMPI_MCA_plm_rsh_agent"].split()[0] == "ssh"
    paths = {mount["mountPath"] for mount in container(made, "Launcher")["volumeMounts"]}
    assert "/etc/ssh/ssh_config" in paths


def test_a_workers_environment_crosses_ssh() -> None:
    made = manifest("mpijob", env_from=["hub"])
    start = command(made)[-1]
    (saved,) = re.findall(r"export -p >(\S+);", start)
    assert f"ForceCommand . {saved}; " in annotation(made, "Worker", "sshd_config")
    (own,) = [volume for volume in pod(made)["volumes"] if volume["name"] == "own"]
    assert own["emptyDir"]["medium"] == "Memory"
    assert "envFrom" not in container(made, "Launcher")


@pytest.mark.parametrize("mpi", MPIS)
def test_mpirun_speaks_to_all_workers(mpi: str) -> None:
    made = manifest("mpijob", {"mpi": mpi}, nnodes=3)
    words = command(made, "Launcher")
    assert "/etc/mpi/hostfile" in words
    assert words[words.index("-n") + 1] == "6"
    assert made["spec"]["slotsPerWorker"] == 2
    address = variables(made, "Launcher")["MASTER_ADDR"]
    assert address == "train-0123456789-1-worker-0.train-0123456789-1.ml.svc"


@pytest.mark.parametrize("mpi", ["intel", "mpich"])
def test_workers_connect_back_to_an_address(mpi: str) -> None:
    words = command(manifest("mpijob", {"mpi": mpi}), "Launcher")
    assert words[words.index("-iface") + 1] == "eth0"


def test_open_mpi_5_is_told_its_hostfile_and_keeps_names_whole() -> None:
    made = manifest("mpijob", {"mpi": "openmpi"})
    words = command(made, "Launcher")
    assert words[words.index("--hostfile") + 1] == "/etc/mpi/hostfile"
    assert variables(made, "Launcher")["PRTE_MCA_prte_keep_fqdn_hostnames"] == "1"


def test_a_launcher_that_failed_keeps_its_log() -> None:
    made = manifest("mpijob", {"restart_policy": "OnFailure"}, max_restarts=2)
    assert replicas(made)["Launcher"]["restartPolicy"] == "Never"
    assert made["spec"]["runPolicy"]["backoffLimit"] == 2


@pytest.mark.parametrize("mpi", MPIS)
def test_no_value_of_a_variable_is_an_argument(mpi: str) -> None:
    secret = "not-for-ps"  # noqa: S105 - it is none
    made = manifest("mpijob", {"mpi": mpi}, env={"WORD": secret})
    assert variables(made, "Launcher")["WORD"] == secret
    assert not any(secret in word for word in command(made, "Launcher"))


# what cannot be expressed


@pytest.mark.parametrize(
    ("launch", "fields", "on", "field"),
    [
        ("mpijob", {"nnodes": "1:2"}, {}, "run.nnodes"),
        ("pytorchjob", {}, {"mpi": "mpich"}, "target.mpi"),
    ],
)
def test_what_a_kind_cannot_express_is_refused(
    launch: str, fields: KubeObject, on: KubeObject, field: str
) -> None:
    (finding,) = refusals(run(**fields), target(launch, **on))
    assert finding.field == field
    assert launch in finding.message
    assert finding.fatal


def test_an_mpijob_of_a_range_is_no_manifest() -> None:
    with pytest.raises(BadInputError, match=r"run\.nnodes: .*1:2"):
        mpijob.objects(run(nnodes="1:2"), target("mpijob"), place())


@pytest.mark.parametrize("make", [pytorchjob.objects, mpijob.objects])
def test_all_of_a_run_can_be_expressed(make: Callable[..., list[KubeObject]]) -> None:
    launch = str(make.__module__).rsplit(".", 1)[-1]
    assert refusals(run(max_restarts=1, env_from=["a"]), target(launch)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_staged_data_is_mounted_to_be_read_only(kind: str) -> None:
    [made] = JOB_LAUNCHERS[kind].objects(run(), target(kind), place(data="/tmp/pvc-mount/manycpu/data/ab12"))  # noqa: S108 - a pod's
    replicas = made["spec"].get("pytorchReplicaSpecs") or made["spec"]["mpiReplicaSpecs"]
    mounts = replicas["Worker"]["template"]["spec"]["containers"][0]["volumeMounts"]
    on_claim = [mount for mount in mounts if mount["name"] == "volume"]
    assert on_claim == [
        {"name": "volume", "mountPath": "/tmp/pvc-mount"},  # noqa: S108 - a pod's
        {
            "name": "volume",
            "mountPath": "/tmp/pvc-mount/manycpu/data",  # noqa: S108 - a pod's
            "subPath": "manycpu/data",
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
    assert (job["kind"], job["apiVersion"]) == (kind.kind, kind.resource.api_version)
    assert not kind.suspended(job)
    assert kind.suspended(manifest(launch, on={"queue": "team-a"}))
    roles = {one["template"]["metadata"]["labels"]["manycpu/role"] for one in replicas(job).values()}
    assert roles == ({"rank", "launcher"} if kind.launcher else {"rank"})


@in_every_kind
def test_what_the_ranks_need_is_read_off_the_job(launch: str) -> None:
    job = manifest(launch, nnodes=3)
    assert JOB_LAUNCHERS[launch].ranks(job) == Ranks(nodes=3, pod=pod(job))
    assert rank_template([job]) == replicas(job)["Worker"]["template"]
