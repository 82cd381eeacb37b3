"""Translate configs of Accelerate, as ``accelerate config`` writes them, into fields of run and target."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from manycpu.pipeline.runfile import read_mapping
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.words import did_you_mean, is_true

Fields = Mapping[str, Any]

_CPU_TYPES: Final = ("NO", "MULTI_CPU", "FSDP")
_DEVICE_TYPES: Final = (
    *("MULTI_GPU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_NEURON", "MULTI_NPU", "MULTI_SDAA"),
    *("MULTI_XPU", "XLA"),
)
"""Values of ``distributed_type`` for data parallel on devices; here the processes train on CPUs."""
_REFUSED_SECTIONS: Final = ("deepspeed_config", "megatron_lm_config", "parallelism_config")
_TRANSLATED_KEYS: Final = (
    *("compute_environment", "distributed_type", "use_cpu", "debug", "fp16", "mixed_precision"),
    *("num_machines", "num_processes", "mpirun_config", "dynamo_backend", "dynamo_config"),
    "fsdp_config",
)
_UNUSED_KEYS: Final = (
    # The launcher connects the ranks, and the CPU plan gives them cores.
    *("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network"),
    *("enable_cpu_affinity", "main_training_function"),
    # For devices.
    *("downcast_bf16", "fp8_config", "gpu_ids", "ipex_config", "command_file", "commands"),
    *("tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone"),
)
_EMPTY_VALUES: Final[tuple[object, ...]] = (None, False, "no", {}, [])
"""Values by which a key asks for nothing: ``accelerate config`` writes such keys too."""
_SECTION_KEYS: Final = {
    # mpirun_ccl, the number of oneCCL's workers, is not used: oneCCL runs without them.
    "mpirun_config": ("mpirun_hostfile", "mpirun_ccl"),
    "fsdp_config": tuple(
        f"fsdp_{name}"
        for name in (
            *("version", "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap"),
            *("min_num_params", "state_dict_type", "cpu_ram_efficient_loading", "activation_checkpointing"),
            "ignored_modules",
            # Without a use here: the offload is for devices, and the others are of version 1.
            *("offload_params", "sharding_strategy", "backward_prefetch", "forward_prefetch"),
            *("use_orig_params", "sync_module_states", "activation_checkpointing_offload"),
        )
    ),
    "dynamo_config": tuple(
        f"{prefix}{name}"
        for prefix in ("dynamo_", "")
        for name in ("backend", "mode", "use_dynamic", "use_fullgraph", "use_regional_compilation")
    ),
}
_DTYPES: Final = {"no": "fp32", "bf16": "bf16", "fp16": "bf16", "fp8": "bf16"}
"""Accelerate's mixed_precision -> ``run.dtype``."""
_PARALLELISM_FIX: Final = (
    "Set `distributed_type: MULTI_CPU`, without a section, or FSDP with `fsdp_version: 2`"
)


class Translation(NamedTuple):
    """The fields of a run and of a target, translated from a config, and notes for the user.

    The notes say what was changed, and what is not needed.
    """

    run: dict[str, Any]
    target: dict[str, Any]
    notes: tuple[str, ...]


def read_accelerate_config(path: Path, run: Fields, target: Fields) -> Translation:
    """Read a config of Accelerate, YAML or JSON.

    Args:
        path: The file that ``accelerate config`` has written.
        run: Given fields of the run, which win over the config.
        target: Given fields of the target, which win over the config.

    Raises:
        BadInputError: The file cannot be read, or CPUs cannot do what it asks for.
    """
    written = "a file that `accelerate config` has written"
    # A user may give the script in the place of the config.
    script_fix = f"Write --accelerate-config FILE {path}" if path.suffix == ".py" else None
    content = read_mapping(path, written, shape_fix=f"Give {written}", script_fix=script_fix)
    return translate(content, run, target)


def translate(config: Fields, run: Fields, target: Fields) -> Translation:
    """Translate the content of a config of Accelerate.

    Each key means what it means to ``accelerate launch`` 1.15: num_processes counts those of all machines.

    Args:
        config: The content of the file.
        run: Given fields of the run, which win over the config.
        target: Given fields of the target, which win over the config.

    Returns:
        Fields of the run, without an output since a config of Accelerate has none; fields of the target that
        the given ones leave open; and notes for the user.

    Raises:
        BadInputError: CPUs cannot do what the config asks for, or it has unknown keys or values.
    """
    _refuse_parallelism(config)  # first: configs for other places have other keys
    _refuse_unknown(config)
    # Configs of older versions have `fp16: true` instead. YAML reads `mixed_precision: no` as false.
    older_precision = "fp16" if config.get("fp16") else "no"
    asked_precision = str(config.get("mixed_precision") or older_precision).lower()
    if asked_precision not in _DTYPES:
        fix = f"Choose one of: {', '.join(_DTYPES)}"
        raise BadInputError(f"there is no {asked_precision!r}", field="mixed_precision", fix=fix)
    scale = _scale(config, run)
    dtype = run.get("dtype", _DTYPES[asked_precision])
    # The variables by which `accelerate launch` hands a config to the script.
    env = {"ACCELERATE_MIXED_PRECISION": "bf16" if dtype == "bf16" else "no"}
    if is_true(str(config.get("debug"))):
        env["ACCELERATE_DEBUG_MODE"] = "true"
    env |= _dynamo(config) | _fsdp(config)
    fields = {"output": None, "dtype": dtype, "env": env, **scale}
    target_fields = _missing_target_fields(config, scale["nnodes"], target)
    return Translation(fields, target_fields, tuple(_notes(config, asked_precision, dtype)))


def _refuse_unknown(config: Fields) -> None:
    """Raise BadInputError for a key that Accelerate does not know, or a section that is no mapping."""
    _refuse_unknown_keys(config, (*_TRANSLATED_KEYS, *_UNUSED_KEYS, *_REFUSED_SECTIONS))
    for name, known in _SECTION_KEYS.items():
        section = config.get(name) or {}
        if not isinstance(section, Mapping):
            raise BadInputError(
                f"{section!r} is no section", field=name, fix=f"It may hold {', '.join(known)}"
            )
        _refuse_unknown_keys(section, known, f"{name}.")


def _refuse_unknown_keys(section: Fields, known: tuple[str, ...], prefix: str = "") -> None:
    """Raise BadInputError for the first key that is not ``known``; ``prefix`` names the section, if any."""
    for name in map(str, section):
        if name not in known:
            fix = did_you_mean(name, known) or "Take it out of the file"
            raise BadInputError("configs of Accelerate have no such key", field=prefix + name, fix=fix)


def _refuse_parallelism(config: Fields) -> None:
    """Raise BadInputError if a config is for a cloud service, or for other parallelism than data and FSDP."""
    environment = config.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        fix = "Answer `accelerate config` with this machine, and give the target here: --target-kind"
        raise BadInputError(f"{environment} starts its own machines", field="compute_environment", fix=fix)
    kind = config.get("distributed_type") or "NO"  # YAML reads NO as false
    if kind not in (*_CPU_TYPES, *_DEVICE_TYPES):
        raise BadInputError(f"{kind} is not for CPUs", field="distributed_type", fix=_PARALLELISM_FIX)
    for name in _REFUSED_SECTIONS:
        if config.get(name):
            raise BadInputError("this section is not for CPUs", field=name, fix=_PARALLELISM_FIX)


def _scale(config: Fields, run: Fields) -> dict[str, Any]:
    """Return ``nnodes`` and ``nproc_per_node``: as given in ``run``, else from the config.

    The config's ``num_processes`` counts the ranks of all machines together.

    Raises:
        BadInputError: The number of processes is missing, or cannot be shared evenly by the machines.
    """
    nnodes = run.get("nnodes", config.get("num_machines", 1))
    if "nproc_per_node" in run:
        return {"nnodes": nnodes, "nproc_per_node": run["nproc_per_node"]}
    total = config.get("num_processes")
    if total in (None, -1):  # Accelerate leaves the number to its launcher
        fix = "Give --nproc-per-node, the processes on each machine"
        raise BadInputError("the config leaves it open", field="num_processes", fix=fix)
    machines = _count(nnodes)
    processes = _count(total)
    if not machines or not processes or processes % machines:  # 0: it is no number
        fix = f"Give --nproc-per-node, the processes on each machine, or a multiple of {nnodes}"
        message = f"{total} processes in all cannot be shared evenly by {nnodes} machine(s)"
        raise BadInputError(message, field="num_processes", fix=fix)
    return {"nnodes": nnodes, "nproc_per_node": processes // machines}


def _count(value: object) -> int:
    """Read a number of machines or processes; 0: it is no number."""
    return int(str(value)) if str(value).isdecimal() else 0


def _missing_target_fields(config: Fields, nnodes: object, given: Fields) -> dict[str, Any]:
    """Choose the fields of the target that the given ones leave open.

    The first of these that applies:

    1. The given kind is not baremetal, or a hostfile is given: only ``kind``, by default baremetal.
    2. No kind is given, and there is one machine: this machine, so no fields; but ``launch`` is mpirun if the
       config has a hostfile.
    3. The config has no hostfile: BadInputError, since nothing names the machines.
    4. Otherwise: baremetal, with the config's hostfile.
    """
    path = (config.get("mpirun_config") or {}).get("mpirun_hostfile")
    hostfile = str(Path(path).expanduser()) if path else None
    kind = given.get("kind", "baremetal")
    has_one_machine = str(nnodes) == "1"
    if kind != "baremetal" or "hostfile" in given:
        return {"kind": kind}
    if "kind" not in given and has_one_machine:
        return {"launch": "mpirun"} if hostfile else {}
    if hostfile is None:
        fix = "Give --target-hostfile FILE, with a host on each line, or --target-kind kubernetes"
        message = f"{nnodes} machines are asked for, and no hostfile names them"
        if has_one_machine:
            message = "1 machine is asked for, and no hostfile names it"
        raise BadInputError(message, field="mpirun_config.mpirun_hostfile", fix=fix)
    return {"kind": "baremetal", "hostfile": hostfile}


def _dynamo(config: Fields) -> dict[str, str]:
    """Return the environment variables that make Accelerate compile models; empty: the config does not."""
    # A config names the backend at its top or in the section, which wins, and whose keys may have the prefix.
    options = {"backend": config.get("dynamo_backend")} | {
        str(name).removeprefix("dynamo_"): value
        for name, value in (config.get("dynamo_config") or {}).items()
    }
    options["backend"] = str(options["backend"] or "NO").upper()
    if options["backend"] == "NO":
        return {}
    return {
        f"ACCELERATE_DYNAMO_{name.upper()}": str(value)
        for name, value in options.items()
        if value is not None
    }


def _fsdp(config: Fields) -> dict[str, str]:
    """Return the environment variables that make Accelerate shard models; empty: the config is not for FSDP.

    Raises:
        BadInputError: The config asks for FSDP of version 1, or to offload parameters.
    """
    if config.get("distributed_type") != "FSDP":
        return {}
    section = config.get("fsdp_config") or {}
    if str(section.get("fsdp_version", 1)) != "2":  # 1 is Accelerate's default
        fix = "Set `fsdp_version: 2`; `accelerate to-fsdp2` translates the file"
        raise BadInputError("FSDP of version 1 is not for CPUs", field="fsdp_config.fsdp_version", fix=fix)
    if is_true(str(section.get("fsdp_offload_params"))):
        message = "shares are in the memory of the CPUs already"
        raise BadInputError(message, field="fsdp_config.fsdp_offload_params", fix="Set it to false")
    options = {name.removeprefix("fsdp_"): value for name, value in section.items() if value is not None}
    if "transformer_layer_cls_to_wrap" in options:  # the variable has a shorter name than the key
        options["transformer_cls_to_wrap"] = options.pop("transformer_layer_cls_to_wrap")
    # Booleans in lower case, as `accelerate launch` writes them for FSDP.
    variables = {
        f"FSDP_{name.upper()}": str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
    }
    return {"ACCELERATE_USE_FSDP": "true", **variables}


def _notes(config: Fields, asked_precision: str, dtype: str) -> list[str]:
    """List notes for the user: what of the config is replaced by something else, and what is not used."""
    kind = config.get("distributed_type") or "NO"  # YAML reads NO as false
    unused = [name for name in _UNUSED_KEYS if config.get(name) not in _EMPTY_VALUES]
    notes: list[str] = []
    if kind in _DEVICE_TYPES:
        notes.append(f"distributed_type {kind}: the processes train on CPUs")
    if asked_precision in ("fp16", "fp8") and dtype == "bf16":
        notes.append(f"mixed_precision {asked_precision} becomes bf16: CPUs train in fp32 or bf16")
    if unused:
        notes.append(f"not needed here: {', '.join(sorted(unused))}")
    return notes
