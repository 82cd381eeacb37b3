"""PyTorchJobs: golden manifests, and the traps of the training-operator."""

import re

import pytest
from support.golden import differences, golden
from support.job_manifests import (
    MANY_FIELDS,
    command,
    container,
    manifest,
    place,
    pod,
    run,
    target,
    variables,
)

from manycpu.pipeline.cli.spec_commands import as_yaml
from manycpu.pipeline.launchers import pytorchjob
from manycpu.pipeline.spec.kube_object import KubeObject

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


def written(**fields: object) -> str:
    return as_yaml(manifest("pytorchjob", MANY_FIELDS, spread="require", env_from=["hub", "s3"], **fields))


def test_golden_pytorchjob() -> None:
    assert written() == golden("pytorchjob.yaml", written())


def test_golden_differences_of_an_elastic_one() -> None:
    other = differences(written(), written(nnodes="1:4", max_restarts=10))
    assert other == golden("pytorchjob-elastic.diff", other)


def test_an_elastic_run_of_the_bert_recipe_on_large_machines() -> None:
    recipe = ("-m", "manycpu.pipeline.recipes.question_answering")
    placement = place(program=recipe, model="/tmp/pvc-mount/manycpu/model/cd34")  # noqa: S108 - a pod's
    [job] = pytorchjob.objects(run(**SEED_RUN), target(**SEED_TARGET), placement)
    worker, elastic = job["spec"]["pytorchReplicaSpecs"]["Worker"], job["spec"]["elasticPolicy"]
    assert (worker["replicas"], worker["restartPolicy"]) == (4, "OnFailure")
    assert (elastic["minReplicas"], elastic["maxReplicas"], elastic["maxRestarts"]) == (1, 4, 10)
    assert elastic["rdzvBackend"] == "c10d"
    amounts = {"cpu": "200", "memory": "128Gi"}
    assert container(job)["resources"] == {"requests": amounts, "limits": amounts}
    assert container(job)["imagePullPolicy"] == "IfNotPresent"
    assert command(job)[:3] == ["python3", "-m", "manycpu.pipeline.node.torchrun"]
    assert pod(job)["nodeSelector"] == SEED_TARGET["node_selector"]
    volumes = {volume["name"]: volume for volume in pod(job)["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    mounts = {mount["mountPath"]: mount["name"] for mount in container(job)["volumeMounts"]}
    assert (mounts["/tmp/pvc-mount"], mounts["/dev/shm"]) == ("volume", "shm")  # noqa: S108 - a pod's
    given = variables(job)
    assert given.items() >= SEED_RUN["env"].items()
    assert given["HF_HOME"] == "/tmp/pvc-mount/manycpu/caches/huggingface"  # noqa: S108 - a pod's
    assert given["HF_DATASETS_CACHE"] == "/tmp/pvc-mount/manycpu/caches/datasets"  # noqa: S108 - a pod's
    assert (given["MANYCPU_BACKEND"], given["MANYCPU_DTYPE"]) == ("ccl", "bf16")
    assert given["MANYCPU_USER_ENV"] == "CCL_WORKER_COUNT,LD_PRELOAD,LOGLEVEL,OMP_NUM_THREADS"
    assert command(job)[-5:-3] == ["--model_name_or_path", given["MANYCPU_MODEL"]]
    assert command(job)[-3:] == SEED_RUN["args"][-3:]
    assert container(job)["envFrom"] == [{"secretRef": {"name": "hub-token"}}]


def test_the_operator_finds_its_container() -> None:
    assert container(manifest())["name"] == "pytorch"


def test_there_is_no_master_so_that_the_operator_adds_no_init_container() -> None:
    assert list(manifest()["spec"]["pytorchReplicaSpecs"]) == ["Worker"]
    assert manifest(nnodes=1)["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1


def test_static_ranks_follow_the_pods() -> None:
    job = manifest(nnodes=3)
    assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 3
    assert "elasticPolicy" not in job["spec"]
    words = command(job)
    assert {"--nnodes=3", "--nproc-per-node=2", "--node-rank=$(MANYCPU_NODE_RANK)"} <= set(words)
    assert "--master-addr=train-0123456789-1-worker-0" in words
    (rank,) = [entry for entry in container(job)["env"] if entry["name"] == "MANYCPU_NODE_RANK"]
    path = "metadata.labels['training.kubeflow.org/replica-index']"
    assert rank["valueFrom"] == {"fieldRef": {"fieldPath": path}}


@pytest.mark.parametrize(
    ("fields", "bounds"), [({"nnodes": "1:4"}, (1, 4)), ({"nnodes": 2, "max_restarts": 3}, (2, 2))]
)
def test_ranks_that_restart_or_come_and_go_meet_by_c10d(fields: KubeObject, bounds: tuple[int, int]) -> None:
    job = manifest(**fields)
    elastic = job["spec"]["elasticPolicy"]
    assert (elastic["minReplicas"], elastic["maxReplicas"]) == bounds
    assert job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == bounds[1]
    assert {"--rdzv-backend=c10d", "--rdzv-endpoint=train-0123456789-1-worker-0:23456"} <= set(command(job))
    (address,) = [entry for entry in container(job)["env"] if entry["name"] == "MANYCPU_ADDRESS"]
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert "--local-addr=$(MANYCPU_ADDRESS)" in command(job)
    # Of a lost node the shared store would stay behind.
    assert variables(job)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_restarts_of_pods_have_an_end() -> None:
    assert manifest(max_restarts=3)["spec"]["runPolicy"]["backoffLimit"] == 4  # the fourth is one too many
    assert f"--max-restarts={3}" in command(manifest(max_restarts=3))


@pytest.mark.parametrize("nnodes", [2, "1:2"])
def test_the_first_pod_waits_for_those_that_are_still_queued(nnodes: int | str) -> None:
    job = manifest(nnodes=nnodes, queue_timeout=1000, start_timeout=100)
    (conf,) = [word for word in command(job) if word.startswith("--rdzv-conf=")]
    assert set(re.findall(r"=(\d+)", conf)) == {"1100"}


def test_pods_that_still_write_are_not_deleted() -> None:
    assert manifest()["spec"]["runPolicy"]["cleanPodPolicy"] == "None"
