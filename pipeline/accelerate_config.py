"""Configs of Accelerate, as ``accelerate config`` writes them, in the words of a run and its target."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from manycpu.pipeline.runfile import read_mapping
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.words import is_true

__all__ = ["InOurWords", "read_accelerate_config", "translate"]

Fields = Mapping[str, Any]

_CPU_TYPES: Final = ("NO", "MULTI_CPU")
_DEVICE_TYPES: Final = (
    *("MULTI_GPU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_NEURON", "MULTI_NPU", "MULTI_SDAA"),
    *("MULTI_XPU", "XLA"),
)
"""Data parallel as on CPUs, on devices that are not there."""
_SHARDING: Final = ("deepspeed_config", "fsdp_config", "megatron_lm_config", "parallelism_config")
_READ: Final = (
    *("compute_environment", "distributed_type", "use_cpu", "debug", "fp16", "mixed_precision"),
    *("num_machines", "num_processes", "mpirun_config", "dynamo_backend", "dynamo_config"),
)
_NOT_NEEDED: Final = (
    # The ranks are told of each other by what starts them, and of their cores by the CPU plan.
    *("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"),
    *("enable_cpu_affinity", "main_training_function"),
    # These are for devices.
    *("downcast_bf16", "fp8_config", "gpu_ids", "ipex_config", "command_file", "commands"),
    *("tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone"),
)
_SAYS_NOTHING: Final[tuple[object, ...]] = (None, False, "no", {}, [])
_INNER: Final = {
    # oneCCL is driven without workers, whose number mpirun_ccl is.
    "mpirun_config": ("mpirun_hostfile", "mpirun_ccl"),
    "dynamo_config": tuple(
        f"{prefix}{name}"
        for prefix in ("dynamo_", "")
        for name in ("backend", "mode", "use_dynamic", "use_fullgraph", "use_regional_compilation")
    ),
}
_DTYPES: Final = {"no": "fp32", "bf16": "bf16", "fp16": "bf16", "fp8": "bf16"}
"""What Accelerate calls mixed_precision -> ``run.dtype``."""


class InOurWords(NamedTuple):
    """What a config says: fields of a run and of a target, and what of it holds otherwise or not at all."""

    run: dict[str, Any]
    target: dict[str, Any]
    notes: tuple[str, ...]


def read_accelerate_config(path: Path, run: Fields, target: Fields) -> InOurWords:
    """Read a config of Accelerate, YAML or JSON.

    Args:
        path: The file that ``accelerate config`` has written.
        run: Fields of the run that are given beside it, and win over it.
        target: Fields of the target that are given beside it, and win over it.

    Raises:
        BadInputError: There is no such file, or CPUs cannot do what it says.
    """
    written = "a file that `accelerate config` has written"
    is_script = f"Write --accelerate-config FILE {path}" if path.suffix == ".py" else None
    content = read_mapping(path, written, f"Give {written}", is_script)
    return translate(content, run, target)


def translate(config: Fields, run: Fields, target: Fields) -> InOurWords:
    """Say in the words of a run and a target what a config of Accelerate says.

    The meaning of each key is that of ``accelerate launch`` 1.15: num_processes counts those of all machines.

    Args:
        config: The config's content.
        run: Fields of the run that are given beside it, and win over it.
        target: Fields of the target that are given beside it, and win over it.

    Returns:
        The fields that it has for what is not given: without an output, since Accelerate knows none.

    Raises:
        BadInputError: A key is unknown, or CPUs cannot do what it says.
    """
    _refuse_unknown(config)
    _refuse_sharding(config)
    asked = _precision(config)
    scale = _scale(config, run)
    dtype = run.get("dtype", _DTYPES[asked])
    env = {"ACCELERATE_MIXED_PRECISION": "bf16" if dtype == "bf16" else "no"}
    env |= {"ACCELERATE_DEBUG_MODE": "true"} if is_true(str(config.get("debug"))) else {}
    fields = {"output": None, "dtype": dtype, "env": env | _dynamo(config), **scale}
    where = _target(config, scale["nnodes"], target)
    return InOurWords(fields, where, tuple(_notes(config, asked, dtype)))


def _refuse_unknown(config: Fields) -> None:
    _refuse_others(config, (*_READ, *_NOT_NEEDED, *_SHARDING))
    for name, known in _INNER.items():
        section = config.get(name) or {}
        if not isinstance(section, Mapping):
            raise BadInputError(
                f"{section!r} is no section", field=name, fix=f"It may hold {', '.join(known)}"
            )
        _refuse_others(section, known, f"{name}.")


def _refuse_others(section: Fields, known: tuple[str, ...], prefix: str = "") -> None:
    for name in map(str, section):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            fix = f"Did you mean {near[0]!r}?" if near else "Take it out of the file"
            raise BadInputError("configs of Accelerate have no such key", field=prefix + name, fix=fix)


def _refuse_sharding(config: Fields) -> None:
    """Refuse what is not data parallel: its model may not fit into the memory of each process."""
    place = config.get("compute_environment", "LOCAL_MACHINE")
    if place != "LOCAL_MACHINE":
        fix = "Answer `accelerate config` with this machine, and give the target here: --target-kind"
        raise BadInputError(f"{place} starts its own machines", field="compute_environment", fix=fix)
    kind = config.get("distributed_type") or "NO"  # YAML reads NO as false
    if kind not in (*_CPU_TYPES, *_DEVICE_TYPES):
        raise BadInputError(f"{kind} is not for CPUs", field="distributed_type", fix=_data_parallel())
    for name in _SHARDING:
        if config.get(name):
            raise BadInputError("this section is not for CPUs", field=name, fix=_data_parallel())


def _data_parallel() -> str:
    return "On CPUs each process holds the whole model: set `distributed_type: MULTI_CPU`, without a section"


def _precision(config: Fields) -> str:
    asked = str(config.get("mixed_precision") or ("fp16" if config.get("fp16") else "no")).lower()
    if asked not in _DTYPES:
        fix = f"Choose one of: {', '.join(_DTYPES)}"
        raise BadInputError(f"there is no {asked!r}", field="mixed_precision", fix=fix)
    return asked


def _scale(config: Fields, run: Fields) -> dict[str, Any]:
    nnodes = run.get("nnodes", config.get("num_machines", 1))
    if "nproc_per_node" in run:
        return {"nnodes": nnodes, "nproc_per_node": run["nproc_per_node"]}
    total, machines = config.get("num_processes"), _count(nnodes)
    if total in (None, -1):  # as Accelerate writes it where something else is to say
        fix = "Give --nproc-per-node, the processes on each machine"
        raise BadInputError("the config leaves it open", field="num_processes", fix=fix)
    processes = _count(total)
    if not machines or not processes or processes % machines:
        fix = f"Give --nproc-per-node, the processes on each machine, or a multiple of {nnodes}"
        message = f"{total} processes in all cannot be shared evenly by {nnodes} machine(s)"
        raise BadInputError(message, field="num_processes", fix=fix)
    return {"nnodes": nnodes, "nproc_per_node": processes // machines}


def _count(value: object) -> int:
    return int(str(value)) if str(value).isdecimal() else 0


def _target(config: Fields, nnodes: object, target: Fields) -> dict[str, Any]:
    """Choose where it runs, where the options do not: this machine, or the hosts of mpirun's hostfile."""
    hostfile = _hostfile(config)
    if target.get("kind", "baremetal") != "baremetal" or "hostfile" in target:
        return {"kind": target.get("kind", "baremetal")}
    if "kind" not in target and str(nnodes) == "1":
        return {"launch": "mpirun"} if hostfile else {}
    if hostfile is None:
        fix = "Give --target-hostfile FILE, with a host on each line, or --target-kind kubernetes"
        message = f"{nnodes} machines are asked for, and no hostfile names them"
        raise BadInputError(message, field="mpirun_config.mpirun_hostfile", fix=fix)
    return {"kind": "baremetal", "hostfile": hostfile}


def _hostfile(config: Fields) -> str | None:
    named = (config.get("mpirun_config") or {}).get("mpirun_hostfile")
    return str(Path(named).expanduser()) if named else None


def _dynamo(config: Fields) -> dict[str, str]:
    """Name the variables by which Accelerate has models compiled."""
    section = {"backend": config.get("dynamo_backend")} | {
        str(name).removeprefix("dynamo_"): value
        for name, value in (config.get("dynamo_config") or {}).items()
    }
    backend = str(section["backend"] or "NO").upper()
    if backend == "NO":
        return {}
    named = section | {"backend": backend}
    return {f"ACCELERATE_DYNAMO_{name.upper()}": str(value) for name, value in named.items()}


def _notes(config: Fields, asked: str, dtype: str) -> list[str]:
    kind = config.get("distributed_type") or "NO"  # YAML reads NO as false
    unused = [name for name in _NOT_NEEDED if config.get(name) not in _SAYS_NOTHING]
    notes = {
        f"distributed_type {kind}: the processes train on CPUs": kind in _DEVICE_TYPES,
        f"mixed_precision {asked} becomes bf16: CPUs train in fp32 or bf16": asked.startswith("fp")
        and dtype == "bf16",
        f"not needed here: {', '.join(sorted(unused))}": bool(unused),
    }
    return [note for note, holds in notes.items() if holds]
