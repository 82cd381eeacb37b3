"""Sharded training on CPUs by torch's FSDP2: each rank holds a share of parameters, gradients, optimizer.

A script needs five calls, on every rank::

    from manycpu.pipeline.node import sharding

    model = sharding.shard(MyModel(), blocks=[MyBlock])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # after shard(): it takes the shares
    ...
    loss.backward()
    sharding.clip_gradients(model, 1.0)
    optimizer.step()
    ...
    sharding.save(folder, model, optimizer, step=step)
    sharding.export(model, output)
"""

import contextlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_shares
from torch.distributed.checkpoint.state_dict_saver import save as save_shares
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from manycpu.pipeline.node.emit import warn
from manycpu.pipeline.spec.words import first_of

_MAX_FILE_BYTES: Final = 5_000_000_000  # of an exported file, as save_pretrained has it
_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""Type of torch -> its name in safetensors."""
_EXTRA: Final = "extra"
# Flattened, the optimizer's state has names instead of numbers, which fit any number of ranks. Frozen
# parameters come with the base model. Not strict, because the state lacks them; torch's loading itself
# refuses a checkpoint that lacks another parameter.
_OPTIONS: Final = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True, strict=False)

Mode = Literal["full", "hybrid"]


def replicas(mode: Mode) -> int:
    """Count the copies of the model that all ranks hold together: one, or with ``hybrid`` one on each node.

    Raises:
        RuntimeError: With ``hybrid``, the number of all ranks is no multiple of the number on this node.
    """
    if mode == "full":
        return 1
    ranks, node_ranks = _ranks(), ranks_of_node()
    if ranks % node_ranks:
        raise RuntimeError(
            f"hybrid sharding needs as many ranks on each node: {ranks} are no multiple of {node_ranks}"
        )
    return ranks // node_ranks


def ranks_of_node() -> int:
    """Count the ranks of this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", _ranks()))


def spans_nodes() -> bool:
    """Whether the ranks are on more than one node."""
    return ranks_of_node() < _ranks()


def mesh(mode: Mode = "full") -> DeviceMesh:
    """Arrange the ranks for sharding.

    ``full``: the model is sharded over all ranks. ``hybrid``: it is sharded over the ranks of each node, so
    that each node has a replica.

    Raises:
        RuntimeError: There is no process group; or, with ``hybrid``, the nodes have unequal numbers of ranks.
    """
    if not dist.is_initialized():
        raise RuntimeError("shard() needs a process group: call torch.distributed.init_process_group first")
    if mode == "full":
        return init_device_mesh("cpu", (_ranks(),), mesh_dim_names=("shard",))
    copies = replicas(mode)
    return init_device_mesh("cpu", (copies, _ranks() // copies), mesh_dim_names=("replicate", "shard"))


def shard(
    model: nn.Module,
    *,
    blocks: Sequence[type[nn.Module]] = (),
    dtype: torch.dtype | None = None,
    mode: Mode = "full",
    checkpoint_activations: bool = False,
) -> nn.Module:
    """Shard a model over the ranks, in place. Make the optimizer after this call.

    Args:
        model: The same model on every rank, in the precision of the optimizer's state (usually fp32).
        blocks: Classes of the modules that are gathered one at a time; default: the model's own
            ``_no_split_modules``, which models of transformers have.
        dtype: The type in which blocks compute and are gathered, such as torch.bfloat16; None: that of the
            parameters. Gradients stay fp32.
        mode: ``full``: shares over all ranks; ``hybrid``: shares within a node, replicas between nodes.
        checkpoint_activations: Keep only a block's inputs; the backward pass computes the rest again.

    Returns:
        The model, which is now an FSDPModule too.

    Raises:
        ValueError: The model has no module of these classes, or a parameter that no export could hold.
        RuntimeError: There is no process group; or, with ``hybrid``, the nodes have unequal numbers of ranks.
    """
    for name, parameter in model.named_parameters():
        if not _is_exported(parameter):
            raise ValueError(f"parameter {name} is {parameter.dtype}, which safetensors cannot hold")
    block_modules = [model.get_submodule(name) for name in block_names(model, blocks)]
    # Only the model as a whole returns fp32; a block passes on the type that it computes in.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
    block_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    device_mesh = mesh(mode)
    for block in block_modules:
        if checkpoint_activations:
            _recompute_activations(block)
        fully_shard(block, mesh=device_mesh, mp_policy=block_policy)
    fully_shard(model, mesh=device_mesh, mp_policy=policy)
    if spans_nodes():
        overlap(model)
    return model


def block_names(model: nn.Module, classes: Sequence[type[nn.Module]] = ()) -> list[str]:
    """Name the modules that are gathered one at a time, inner ones before outer ones.

    These are the modules of the given classes, by default of the model's ``_no_split_modules``. A module that
    shares a parameter with a module outside of it, such as embeddings with the head, is left out. It is then
    sharded together with the module that contains both.

    Raises:
        ValueError: The model has no module of these classes.
    """
    wanted = {kind.__name__ for kind in classes}
    if not wanted:
        wanted = set(getattr(model, "_no_split_modules", None) or ())  # some models have it, as None
    blocks = {name: module for name, module in model.named_modules() if type(module).__name__ in wanted}
    blocks.pop("", None)  # the model itself
    if not blocks:
        classes_text = ", ".join(sorted(wanted)) or "blocks"
        raise ValueError(
            f"{type(model).__name__} has no module of {classes_text}: name the classes of its blocks"
        )
    owners: defaultdict[nn.Parameter, set[nn.Module]] = defaultdict(set)  # modules that have it themselves
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[parameter].add(module)
    names = []
    # Reversed: torch shards the inner modules first, and an outer one comes before its inner ones here.
    for name, block in reversed(blocks.items()):
        inside = {*block.modules()}
        if all(owners[parameter] <= inside for parameter in block.parameters()):
            names.append(name)
    return names


def overlap(model: nn.Module) -> None:
    """Gather the parameters of the next block while a block computes, by asynchronous collectives.

    It helps only ranks on several nodes: within one node, the cores that gather are those that compute.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module._set_unshard_async_op(True)  # noqa: SLF001 - torch has no public way on CPUs
    blocks = [module for module in modules if module is not model]
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])


def release(model: nn.Module) -> None:
    """Free gathered parameters, so that this rank holds only its shares again.

    After a forward pass without gradients, some parameters stay gathered. An optimizer that is made of
    gathered parameters would not train the shares.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale gradients so that their norm over all ranks is at most ``max_norm``; returns the former norm."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def save(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, **extra: Any) -> None:
    """Write a checkpoint of all ranks' shares, in a folder that they share; each rank writes its own file.

    The file ``.metadata`` is written last: a checkpoint without it is incomplete, and :func:`fault` says so.
    An old checkpoint stays until the new one, which is written beside it, is complete.

    Args:
        folder: A new folder, or one to replace.
        model: A sharded model, or a whole one.
        optimizer: Its optimizer.
        **extra: Values that JSON can hold, such as the step; :func:`load` returns them.

    Raises:
        RuntimeError: The ranks do not share the folder.
        TypeError: A value of ``extra`` cannot be written as JSON.
    """
    extra_json = json.dumps(extra)  # first: if it fails, nothing was written
    final, new_folder = Path(folder), _unfinished(folder)
    if _rank() == 0:
        # An earlier save was killed before its last rename: finish it, or its checkpoint would be deleted.
        if (new_folder / ".metadata").exists() and not final.exists():
            new_folder.rename(final)
        shutil.rmtree(new_folder, ignore_errors=True)
        new_folder.mkdir(parents=True)
    _barrier()  # no rank writes before the folder exists
    release(model)
    with _without_empty_groups(optimizer):
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
    trained = _without_frozen(model, model_state)
    save_shares(
        {"model": trained, "optimizer": optimizer_state, _EXTRA: extra_json}, checkpoint_id=new_folder
    )
    _barrier()  # rank 0 has written .metadata now
    # Each rank tells whether it sees what rank 0 wrote last.
    sees_metadata = (new_folder / ".metadata").exists()
    answers = [sees_metadata] * _ranks()
    if dist.is_initialized():
        dist.all_gather_object(answers, sees_metadata)  # replaces them by those of all ranks
    if not all(answers):
        raise RuntimeError(f"{folder} is not shared by all ranks: a sharded checkpoint needs such a folder")
    if _rank() == 0:
        # A rename does not replace a folder that has files: move the old checkpoint aside first.
        old_folder = final.with_name(f".{final.name}.old")
        shutil.rmtree(old_folder, ignore_errors=True)
        if final.exists():
            final.rename(old_folder)
        new_folder.rename(final)
        shutil.rmtree(old_folder, ignore_errors=True)
    _barrier()  # no rank returns before the checkpoint has its name


def _unfinished(folder: str | Path) -> Path:
    """Name the folder in which a checkpoint is written, before it takes the place of the old one."""
    return Path(folder).with_name(f".{Path(folder).name}.new")


def _complete(folder: str | Path) -> Path:
    """Return the folder to read from: the unfinished one, if its writer was killed before the last rename."""
    unfinished = _unfinished(folder)
    if not Path(folder).exists() and unfinished.exists():
        return unfinished
    return Path(folder)


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Read a checkpoint into a model and its optimizer; returns the ``extra`` values that :func:`save` wrote.

    The model may be whole, or sharded over another number of ranks than the one that was saved.

    Raises:
        RuntimeError: The checkpoint is of another model, or incomplete.
    """
    release(model)
    folder = _complete(folder)
    with _without_empty_groups(optimizer):
        model_state, optimizer_state = get_state_dict(model, optimizer, options=_OPTIONS)
        trained = _without_frozen(model, model_state)
        try:
            metadata = FileSystemReader(folder).read_metadata()
            _make_room_for_extra_state(trained, metadata)
            optimizer_part = _part_in_checkpoint(trained, optimizer_state, metadata.state_dict_metadata)
            state: dict[str, Any] = {"model": trained, "optimizer": optimizer_part, _EXTRA: ""}
            load_shares(state, checkpoint_id=folder)
        except (CheckpointException, OSError, ValueError) as error:
            raise RuntimeError(f"cannot resume from {folder}: {error}") from error
        # The optimizer also gets the state that the checkpoint lacks, which is 0 now.
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=optimizer_state | state["optimizer"],
            options=_OPTIONS,
        )
    extra: dict[str, Any] = json.loads(state[_EXTRA])
    return extra


def _make_room_for_extra_state(model: dict[str, Any], metadata: Metadata) -> None:
    """Replace the extra state of modules by empty values with the structure that the checkpoint has.

    torch reads a value from a checkpoint only into a value of the same structure. ``model`` is the model's
    state dictionary, and is changed in place; ``metadata`` is that of the checkpoint.
    """
    # Name of a value in the checkpoint -> its place, a tuple: "model", the name in the model's state, and
    # further keys, if the extra state of that name is a dictionary.
    stored = {
        name: place
        for name, place in (metadata.planner_data or {}).items()
        if place[0] == "model" and place[1] in model and place[1].split(".")[-1] == "_extra_state"
    }
    for place in stored.values():
        model.pop(place[1], None)  # all of it, since the model's own extra state may have another form
    for name, place in stored.items():
        value = metadata.state_dict_metadata[name]
        if isinstance(value, TensorStorageMetadata):
            set_element(model, place[1:], torch.empty(value.size, dtype=value.properties.dtype))
        else:  # torch reads any other object as a whole
            set_element(model, place[1:], None)


def _part_in_checkpoint(
    model: dict[str, Any], optimizer: dict[str, Any], stored: Collection[str]
) -> dict[str, Any]:
    """Select the part of an optimizer's state that a checkpoint has; set the other state to 0 in place.

    A checkpoint lacks the state of parameters that no batch had used when it was written. ``model`` and
    ``optimizer`` are state dictionaries; ``stored`` are the names in the checkpoint.

    Raises:
        ValueError: The checkpoint is of another model or optimizer.
    """
    # A module's extra state may be a dictionary: its values have names of their own in the checkpoint.
    own, _ = flatten_state_dict({"model": model, "optimizer": optimizer})
    foreign = [name for name in stored if name.startswith(("model.", "optimizer.state.")) and name not in own]
    if foreign:
        raise ValueError(f"it is of another model or optimizer: it has {min(foreign)}")
    of_parameters = {name for name in optimizer if name.startswith("state.")}  # without groups
    unused = {name for name in of_parameters if f"optimizer.{name}" not in stored}
    if unused == of_parameters:
        return optimizer  # no parameter has state in the checkpoint: torch's loading raises an error
    for name in unused:
        optimizer[name].zero_()
    return {name: value for name, value in optimizer.items() if name not in unused}


def _without_frozen(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return a model's state dictionary without any name of a frozen parameter.

    Frozen parameters come with the base model, so a checkpoint has none. torch's ``ignore_frozen_params``
    drops only one name of a parameter; a tied parameter, such as a head, would stay under its second name.
    """
    frozen = {
        name for name, tensor in model.named_parameters(remove_duplicate=False) if not tensor.requires_grad
    }
    return {name: tensor for name, tensor in state.items() if name not in frozen}


@contextlib.contextmanager
def _without_empty_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hide the optimizer's groups without parameters in a ``with`` block: torch cannot read them back.

    With LoRA, for example, the group without weight decay may be empty.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        # The groups with parameters, as they are now: loading replaces the dictionaries in `groups`.
        filled = iter(optimizer.param_groups)
        optimizer.param_groups = [next(filled) if group["params"] else group for group in groups]


def load_weights(folder: str | Path, model: nn.Module) -> None:
    """Read only the trained parameters from a checkpoint into a model; no optimizer is needed."""
    release(model)
    folder = _complete(folder)
    state = {"model": _without_frozen(model, get_model_state_dict(model, options=_OPTIONS))}
    _make_room_for_extra_state(state["model"], FileSystemReader(folder).read_metadata())
    load_shares(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"], options=_OPTIONS)


def fault(folder: str | Path) -> str | None:
    """Explain why a checkpoint that :func:`save` wrote cannot be read; None when it is complete."""
    folder = _complete(folder)
    if not (folder / ".metadata").exists():
        return "it has no .metadata: it was not written to its end"
    try:
        stored = FileSystemReader(folder).read_metadata().storage_data
    except Exception as error:  # noqa: BLE001 - a pickle may fail in any way
        return f".metadata is damaged: {error!r}"
    ends: dict[str, int] = {}  # file -> the bytes that it must have
    for item in (stored or {}).values():
        ends[item.relative_path] = max(ends.get(item.relative_path, 0), item.offset + item.length)
    for name, end in sorted(ends.items()):
        file = Path(folder, name)
        if not file.exists():
            return f"{name} is missing"
        if file.stat().st_size < end:
            return f"{name} is cut short"
    return None


def export(model: nn.Module, folder: str | Path) -> None:
    """Write the whole model as safetensors. Every rank must call this; rank 0 writes.

    ``from_pretrained`` needs ``model.config.save_pretrained(folder)`` too. What safetensors cannot hold is
    left out, with a warning: extra state that is no tensor, and tensors of a type such as complex128.

    Parameters are gathered one at a time: beyond its share, a rank holds one whole parameter.
    """
    release(model)
    target = Path(folder)
    keys_of_files = _divide_among_files(model)
    state = model.state_dict()
    left_out = [name for name, value in state.items() if not _is_exported(value)]
    if left_out and _rank() == 0:
        warn(f"{first_of(left_out)}: no tensor that safetensors can hold, so the exported model lacks it")
    names = [_file_name(number, len(keys_of_files)) for number in range(1, len(keys_of_files) + 1)]
    for file_name, keys in zip(names, keys_of_files, strict=True):
        if _rank() == 0:
            target.mkdir(parents=True, exist_ok=True)
            _write_file(target / file_name, {key: state[key] for key in keys})
        else:
            for key in keys:
                _whole(state[key])  # rank 0 gathers the same tensors in the same order
    if _rank() == 0 and len(keys_of_files) > 1:
        file_of = {key: name for name, keys in zip(names, keys_of_files, strict=True) for key in keys}
        index = {"metadata": {"total_size": sum(_size(state[key]) for key in file_of)}, "weight_map": file_of}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    _barrier()


def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file: the header's length in bytes, the header as JSON, and then the tensors.

    The format: https://github.com/huggingface/safetensors#format. Its library needs all tensors
    in memory at once; here one tensor at a time is gathered from the ranks.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in tensors.items():
        begin, end = end, end + _size(tensor)
        header[key] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of eight bytes
    unfinished = path.with_name(f".{path.name}")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            # As bytes: numpy lacks some of the types, such as bfloat16.
            file.write(_whole(tensor).reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())  # before the rename: a loss of power leaves no cut file under the name
    unfinished.replace(path)


def _recompute_activations(block: nn.Module) -> None:
    """Have a block keep only its inputs: the backward pass computes its activations once more."""
    forward = block.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        """Run the block; drop its activations only in training, and only if gradients are computed."""
        if not (torch.is_grad_enabled() and block.training):
            return forward(*args, **kwargs)
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = checkpointed


def _divide_among_files(model: nn.Module) -> list[list[str]]:
    """Divide the names of a model's tensors among files of at most 5 GB; returns the names in each file.

    A tensor that is the same object as an earlier one (tied) is left out, and so is a value that safetensors
    cannot hold. A tensor above 5 GB has its own file.
    """
    names_of_files: list[list[str]] = [[]]
    file_bytes = 0  # of the last file
    tensor_ids: set[int] = set()
    # keep_vars: the parameters themselves, so that tied ones have one id.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in tensor_ids or not _is_exported(tensor):
            continue
        tensor_ids.add(id(tensor))
        if names_of_files[-1] and file_bytes + _size(tensor) > _MAX_FILE_BYTES:
            names_of_files.append([])
            file_bytes = 0
        names_of_files[-1].append(name)
        file_bytes += _size(tensor)
    return names_of_files


def _is_exported(value: Any) -> bool:
    """Whether a value of a model's state is a tensor that safetensors can hold."""
    return torch.is_tensor(value) and value.dtype in _DTYPES


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a whole tensor."""
    return tensor.numel() * tensor.element_size()


def _file_name(number: int, files: int) -> str:
    return "model.safetensors" if files == 1 else f"model-{number:05d}-of-{files:05d}.safetensors"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor from the shares of all ranks, each of which must call this."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().contiguous()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
