"""What a config of Accelerate says in the words of a run and a target."""

from typing import Any

import pytest
import yaml

from manycpu.pipeline.accelerate_config import Translation, translate
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.validation import read_run, read_target

# As `accelerate config` 1.15 writes it, for two machines on CPUs that mpirun is to start.
WRITTEN = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
main_training_function: main
mixed_precision: bf16
mpirun_config:
  mpirun_hostfile: /shared/hosts
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""
ONE = {"num_machines": 1, "num_processes": 3, "mpirun_config": {}}

FSDP = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}


def told(changes: dict[str, Any], run: dict[str, Any] | None = None, **target: Any) -> Translation:
    return translate(yaml.safe_load(WRITTEN) | changes, run or {}, target)


def test_two_machines_are_hosts_of_the_hostfile_and_share_the_processes() -> None:
    words = told({})
    run = read_run({"program": "train.py", **words.run})
    assert (run.nnodes, run.nproc_per_node, run.dtype, run.output) == (2, 4, "bf16", None)
    assert run.env == {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert read_target(words.target) == read_target({"kind": "baremetal", "hostfile": "/shared/hosts"})


def test_what_is_not_needed_is_told_in_one_line_and_what_says_nothing_is_not() -> None:
    names = "main_process_ip, main_process_port, main_training_function, rdzv_backend, same_network"
    assert told({}).notes == (f"not needed here: {names}",)


@pytest.mark.parametrize(
    ("changes", "target"),
    [(ONE, {}), (ONE | {"mpirun_config": {"mpirun_hostfile": "x"}}, {"launch": "mpirun"})],
)
def test_one_machine_is_this_one(changes: dict[str, Any], target: dict[str, Any]) -> None:
    words = told(ONE | changes)
    assert (words.run["nnodes"], words.run["nproc_per_node"], words.target) == (1, 3, target)
    read_target(words.target)


@pytest.mark.parametrize(
    ("run", "target", "scale", "where"),
    [
        ({"nproc_per_node": 5}, {}, (2, 5), {"kind": "baremetal", "hostfile": "/shared/hosts"}),
        ({"nnodes": "4"}, {}, ("4", 2), {"kind": "baremetal", "hostfile": "/shared/hosts"}),
        ({"nnodes": "1"}, {}, ("1", 8), {"launch": "mpirun"}),
        ({}, {"hostfile": "mine"}, (2, 4), {"kind": "baremetal"}),
        ({}, {"kind": "kubernetes"}, (2, 4), {"kind": "kubernetes"}),
        ({}, {"kind": "baremetal"}, (2, 4), {"kind": "baremetal", "hostfile": "/shared/hosts"}),
    ],
)
def test_what_is_given_beside_it_counts(
    run: dict[str, Any], target: dict[str, Any], scale: tuple[Any, int], where: dict[str, Any]
) -> None:
    words = told({}, run, **target)
    assert (words.run["nnodes"], words.run["nproc_per_node"]) == scale
    assert words.target == where


@pytest.mark.parametrize("asked", ["fp16", "fp8", "FP16"])
def test_what_cpus_have_no_instructions_for_becomes_bf16_aloud(asked: str) -> None:
    words = told({"mixed_precision": asked})
    assert (words.run["dtype"], words.run["env"]) == ("bf16", {"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert words.notes[0] == f"mixed_precision {asked.lower()} becomes bf16: CPUs train in fp32 or bf16"
    words = told({"mixed_precision": asked}, {"dtype": "fp32"})
    assert (words.run["env"], len(words.notes)) == ({"ACCELERATE_MIXED_PRECISION": "no"}, 1)


@pytest.mark.parametrize("off", ["no", False, None])
def test_no_mixed_precision_is_fp32(off: object) -> None:
    words = told({"mixed_precision": off})
    assert (words.run["dtype"], words.run["env"]) == ("fp32", {"ACCELERATE_MIXED_PRECISION": "no"})
    assert told({"mixed_precision": off, "fp16": True}).run["dtype"] == ("fp32" if off == "no" else "bf16")


def test_data_parallel_of_devices_is_that_of_cpus_aloud() -> None:
    words = told(ONE | {"distributed_type": "MULTI_GPU", "gpu_ids": "all", "use_cpu": False})
    assert (words.run["nproc_per_node"], words.target) == (3, {})
    assert words.notes[0] == "distributed_type MULTI_GPU: the processes train on CPUs"
    assert "gpu_ids, main_process_ip" in words.notes[1]


@pytest.mark.parametrize(
    ("dynamo", "env"),
    [
        ({"dynamo_config": {}}, {}),
        ({"dynamo_backend": "NO"}, {}),
        ({"dynamo_backend": "inductor"}, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
        (
            {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": None}},
            {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
        ),
        (
            {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "use_dynamic": False}},
            {
                "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
                "ACCELERATE_DYNAMO_MODE": "default",
                "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
            },
        ),
    ],
)
def test_models_are_compiled_as_accelerate_would(dynamo: dict[str, Any], env: dict[str, str]) -> None:
    run = told(dynamo | {"mixed_precision": "no"}).run
    assert run["env"] == {"ACCELERATE_MIXED_PRECISION": "no", **env}


def test_its_checks_of_operations_are_kept() -> None:
    assert told({"debug": True}).run["env"]["ACCELERATE_DEBUG_MODE"] == "true"


def test_fsdp_becomes_the_variables_that_accelerate_reads() -> None:
    section = {
        "fsdp_version": 2,
        "fsdp_transformer_layer_cls_to_wrap": "Block",
        "fsdp_reshard_after_forward": True,
    }
    assert told({"distributed_type": "FSDP", "fsdp_config": section}).run["env"] == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
    }


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"num_processes": 7}, "num_processes", "7 processes in all cannot be shared evenly by 2 machine(s)"),
        ({"num_processes": -1}, "num_processes", "Give --nproc-per-node"),
        ({"num_processes": "two"}, "num_processes", "two processes in all"),
        ({"mpirun_config": {}}, "mpirun_config.mpirun_hostfile", "Give --target-hostfile FILE"),
        ({"mpirun_config": "hosts"}, "mpirun_config", "It may hold mpirun_hostfile, mpirun_ccl"),
        ({"mpirun_config": {"hostfile": "x"}}, "mpirun_config.hostfile", "Did you mean 'mpirun_hostfile'?"),
        ({"dynamo_config": {"x": 1}}, "dynamo_config.x", "no such key"),
        ({"num_machine": 2}, "num_machine", "Did you mean 'num_machines'?"),
        ({"xyzzy": 2}, "xyzzy", "Take it out of the file"),
        (
            {"compute_environment": "AMAZON_SAGEMAKER", "base_job_name": "x"},
            "compute_environment",
            "AMAZON_SAGEMAKER starts its own machines",
        ),
        ({"mixed_precision": "fp4"}, "mixed_precision", "Choose one of: no, bf16"),
        ({"distributed_type": "DEEPSPEED"}, "distributed_type", "Set `distributed_type: MULTI_CPU`"),
        ({"distributed_type": "FSDP"}, "fsdp_config.fsdp_version", "accelerate to-fsdp2"),
        (
            FSDP | {"fsdp_config": {"fsdp_version": 2, "fsdp_version_": 1}},
            "fsdp_config.fsdp_version_",
            "Did you",
        ),
        (
            FSDP | {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}},
            "fsdp_config.fsdp_offload_params",
            "in the memory of the CPUs already",
        ),
        ({"deepspeed_config": {"zero_stage": 2}}, "deepspeed_config", "this section is not for CPUs"),
        ({"megatron_lm_config": {"tp": 2}}, "megatron_lm_config", "this section is not for CPUs"),
        ({"parallelism_config": {"tp": 2}}, "parallelism_config", "this section is not for CPUs"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment", "--target-kind"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_its_key(changes: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(BadInputError) as raised:
        told(changes)
    assert raised.value.field == field
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        (1, "1 machine is asked for, and no hostfile names it"),
        (2, "2 machines are asked for, and no hostfile names them"),
    ],
)
def test_hosts_that_no_hostfile_names_are_counted(machines: int, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        told({"num_machines": machines, "mpirun_config": {}}, kind="baremetal")
