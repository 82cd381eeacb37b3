"""Train a random transformer for some steps under DDP, or sharded; each rank prints its memory at the peak, as JSON."""

import json
import resource
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForQuestionAnswering

_STEPS = 2  # the second has the optimizer's state from its beginning


def peak() -> int:
    """Return the bytes of this process at its peak."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(folder: str, batch: int, length: int, dtype: str, checkpointing: str, shard: str) -> None:
    config = AutoConfig.from_pretrained(folder)
    causal = config.model_type in ("llama", "gpt2")
    dist.init_process_group("gloo")
    kind = AutoModelForCausalLM if causal else AutoModelForQuestionAnswering
    with torch.device("meta"):  # imports what the model needs, and takes no memory for it
        kind.from_config(config)
    before = peak()
    model = kind.from_config(config).train()
    if checkpointing == "yes":
        model.gradient_checkpointing_enable()
    half = torch.bfloat16 if dtype == "bf16" else None
    if shard == "full":  # blocks and the rest, with their precision, as manycpu shards
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
        for block in [*model.model.layers, model]:
            fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
        wrapped = model
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)
    for _ in range(_STEPS):
        ids = torch.randint(0, config.vocab_size, (batch, length))
        target = (
            {"labels": ids} if causal else {"start_positions": ids[:, 0] % 9, "end_positions": ids[:, 0] % 9}
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16" and shard == "no"):
            loss = wrapped(input_ids=ids, attention_mask=torch.ones_like(ids), **target).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print("peak", json.dumps({"before": before, "peak": peak(), "rank": dist.get_rank()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
