"""Load a model by shares, if its training is sharded, and choose whether it is."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel

from manycpu.pipeline.node import sharding
from manycpu.pipeline.recipes.reporting import say
from manycpu.pipeline.recipes.trainer import CpuTrainingOptions
from manycpu.pipeline.spec import memory_plan, model_shape
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.machine import Machine
from manycpu.pipeline.spec.memory_estimate import unshardable
from manycpu.pipeline.spec.memory_plan import Nodes, Training, replica
from manycpu.pipeline.spec.words import format_bytes


def loader(
    kind: Any, config: PretrainedConfig, options: CpuTrainingOptions, length: int, **more_fields: Any
) -> Callable[..., PreTrainedModel]:
    """Return a ``from_pretrained`` for this training: if it is sharded, each rank reads only its own share.

    A checkpoint may have two unequal weights that the configuration ties. With ``auto``, such a model is not
    sharded, and the log says so. With ``full`` or ``hybrid``, it is refused.

    Args:
        kind: The Auto class that loads the model.
        config: The model's configuration.
        options: The training's options; if ``shard`` is ``auto``, it is replaced by ``no`` or ``full``.
        length: Tokens of a sample.
        **more_fields: Fields of Training that the options do not have, to estimate the memory of a rank.

    Raises:
        BadInputError: The model cannot be sharded, or the ranks would compute in different formats.
    """
    load_whole: Callable[..., PreTrainedModel] = kind.from_pretrained
    ranks = options.world_size
    is_automatic = options.shard == "auto"
    if is_automatic:
        training = Training(
            batch=options.per_device_train_batch_size,
            evaluated=options.per_device_eval_batch_size,
            length=length,
            bf16=options.bf16,
            checkpointing=bool(options.gradient_checkpointing),
            **more_fields,
        )
        options.shard = _choose_shard(config, options, training)
    if options.shard == "no" or ranks == 1:
        return load_whole
    with torch.device("meta"):  # without memory for weights
        meta_model = kind.from_config(config)
    plan = _sharding_plan(meta_model)
    _check_number_formats(options)
    # Late: transformers has it since 5.20, and what is not sharded needs none.
    from transformers.distributed.configuration_utils import DistributedConfig

    replica_count = sharding.replicas(mode="hybrid" if options.shard == "hybrid" else "full")
    tied = meta_model.all_tied_weights_keys  # name of a tied weight -> of the weight it shares
    if _tied_weights_differ(Path(str(config.name_or_path)), tied):
        untied = "tie_word_embeddings is true, and the checkpoint has a head of its own"
        if is_automatic:
            say(f"{untied}: each rank trains a replica, and may run out of memory")
            options.shard = "no"
            return load_whole
        fix = "Set it to false (config.json, or --config_overrides), or leave out --shard"
        raise BadInputError(untied, field="run.args", fix=fix)
    sharing_ranks = ranks // replica_count
    replicas = f", {replica_count} replicas" if replica_count > 1 else ""
    say(f"the model is sharded over {sharing_ranks} ranks{replicas}")
    model_class = type(meta_model)
    if tied:
        # The same name: the saved configuration names the model by it.
        model_class = type(model_class.__name__, (_Tied, model_class), {})
    shares = DistributedConfig(
        fsdp_plan=plan,
        fsdp_mixed_precision=options.bf16,
        fsdp_size=sharing_ranks,
        dp_replicate_size=replica_count,
    )
    return partial(model_class.from_pretrained, distributed_config=shares)


def _sharding_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan by which transformers shards a model block by block: pattern of modules -> how.

    The models' own plans are not used, because many of them name modules that do not exist. Then the whole
    model would be gathered at once.

    Raises:
        BadInputError: The model does not name its blocks.
    """
    try:
        blocks = sharding.block_names(model)
    except ValueError as error:
        raise BadInputError(
            f"{type(model).__name__} does not name its blocks, so that it cannot be sharded",
            field="run.args",
            fix="Leave out --shard",
        ) from error
    patterns = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in blocks})  # such as layers.*
    return dict.fromkeys(patterns, "free_full_weight")  # a rank keeps only its share after a pass


def _check_number_formats(options: CpuTrainingOptions) -> None:
    """Raise BadInputError unless all ranks compute in the same number format; every rank calls it."""
    formats = [options.bf16] * options.world_size
    if dist.is_initialized():
        dist.all_gather_object(formats, options.bf16)
    if len(set(formats)) > 1:
        raise BadInputError(
            "some ranks would compute in bf16 and others in fp32, since their processors differ",
            field="run.dtype",
            fix="Say fp32 or bf16",
        )


def check_shard(options: CpuTrainingOptions, *, has_adapters: bool = False) -> None:
    """Raise BadInputError if ``--shard`` is full or hybrid, and another option excludes that."""
    reason = _excluding_option(options, has_adapters=has_adapters)
    if reason and options.shard in ("full", "hybrid"):
        message = f"--shard {options.shard} excludes {reason}"
        raise BadInputError(message, field="run.args", fix="Leave one of them out")


def _tied_weights_differ(folder: Path, tied: Mapping[str, str]) -> bool:
    """Whether a checkpoint has two unequal matrices for two weights that the configuration ties.

    False too if it stores only one of them.
    """
    file_of_weight: dict[str, Path] = {}
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as opened:
            file_of_weight |= dict.fromkeys(opened.keys(), file)

    def read(name: str) -> torch.Tensor:
        with safe_open(file_of_weight[name], "pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    stored_pairs = [pair for pair in tied.items() if file_of_weight.keys() >= set(pair)]
    return any(not torch.equal(read(target), read(source)) for target, source in stored_pairs)


def _excluding_option(options: CpuTrainingOptions, *, has_adapters: bool) -> str | None:
    """Name the option that excludes sharding; None: there is none."""
    if has_adapters and options.shard == "hybrid":
        # With hybrid sharding, peft takes the sizes of a share for those of the layer.
        return "adapters: give --method full, or --shard full"
    if options.use_ipex:
        return "--use_ipex"
    values = options.to_dict()  # type: ignore[no-untyped-call]
    # In the form of recipe_options.read, which `unshardable` takes.
    set_options = {name: [str(value)] for name, value in values.items() if value}
    return unshardable(set_options)


class _Tied:
    """Shards a model whose head and embeddings share their weights (tied weights).

    transformers 5.23 gathers the two separately, so that one of them is stale from the second step on. Here
    they are tied before the model is sharded, and no block has them. So they are one parameter.
    """

    @classmethod
    def maybe_distribute_model(cls, model: Any, *given: Any) -> Any:
        """Tie the weights, then shard the model as transformers does."""
        model._fsdp_plan = {}  # noqa: SLF001 - only the plan in the configuration counts
        model.tie_weights(recompute_mapping=False)  # as transformers calls it itself
        return super().maybe_distribute_model(model, *given)  # type: ignore[misc]


def _choose_shard(
    config: PretrainedConfig, options: CpuTrainingOptions, training: Training
) -> Literal["no", "full"]:
    """Choose what ``--shard auto`` means: "full" if some node has too little memory for replicas, else "no".

    It is also "no" if another option excludes sharding, or if the node's memory or the model's size is
    unknown. Every rank makes the same choice. If it is "full", the log says so.
    """
    ranks = options.world_size
    node_bytes = Machine.observe().memory
    model = model_shape.of_config(config.to_dict(), causal=training.causal)
    if ranks == 1 or node_bytes is None or model is None or _excluding_option(options, has_adapters=False):
        return "no"
    node_ranks = sharding.ranks_of_node()
    nodes = Nodes(nodes=max(1, ranks // node_ranks), processes=node_ranks, memory=node_bytes)
    needed_bytes = replica(model, training).total * node_ranks
    # All ranks exchange what they found: a node with less memory decides for all.
    fits = [memory_plan.choose(model, training, nodes) == "no"] * ranks
    if dist.is_initialized():
        dist.all_gather_object(fits, fits[0])
    if all(fits):
        return "no"
    say(
        f"the replicas of a node take about {format_bytes(needed_bytes)}, which do not fit its memory of "
        f"{format_bytes(node_bytes)}, a tenth to spare: the model is sharded (--shard no forbids it)"
    )
    return "full"
