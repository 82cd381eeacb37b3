"""The arithmetic of a training's memory, against trainings of random transformers, under DDP and sharded."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    BertConfig,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
)

from manycpu.pipeline.spec import memory_plan, model_shape
from manycpu.pipeline.spec.memory_plan import Nodes, Training

PROGRAM = Path(__file__).parents[1] / "scripts" / "peak_memory.py"
_BERT: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
}
_LLAMA: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "vocab_size": 16_000,
}
LENGTH = 128


@pytest.mark.parametrize(
    ("config", "ranks", "batch", "length", "dtype", "checkpointing", "shard"),
    [
        # Replicas and shares, fp32 and bf16, with and without checkpointing: the others combine these.
        (BertConfig(**_BERT), 2, 4, LENGTH, "fp32", False, "no"),  # its dropout keeps attention scores
        # Short: bf16 takes minutes where the processor has no instructions for it.
        (LlamaConfig(**_LLAMA), 1, 2, 32, "bf16", False, "no"),
        (LlamaConfig(**_LLAMA), 2, 2, LENGTH, "fp32", True, "full"),
        pytest.param(LlamaConfig(**_LLAMA), 1, 2, LENGTH, "fp32", True, "no", marks=pytest.mark.long),
        pytest.param(LlamaConfig(**_LLAMA), 1, 2, LENGTH, "bf16", False, "no", marks=pytest.mark.long),
        pytest.param(LlamaConfig(**_LLAMA), 2, 2, LENGTH, "bf16", True, "full", marks=pytest.mark.long),
    ],
    ids=[
        *("bert", "llama-bf16-short", "llama-sharded"),
        *("llama-checkpointing", "llama-bf16", "llama-sharded-bf16"),
    ],
)
def test_a_training_takes_what_is_planned(
    tmp_path: Path,
    config: Any,
    ranks: int,
    batch: int,
    length: int,
    dtype: str,
    checkpointing: bool,
    shard: Literal["no", "full"],
) -> None:
    """Of each rank: at most 1.3 times the arithmetic and at least 0.7 of it, without the bare process too."""
    config.save_pretrained(tmp_path)
    causal = config.model_type == "llama"
    model = model_shape.read(tmp_path, causal=causal)
    assert model is not None
    assert 3e7 < model.parameters < 6e7
    training = Training(
        batch=batch, length=length, bf16=dtype == "bf16", checkpointing=checkpointing, causal=causal
    )
    planned = memory_plan.parts(model, training, Nodes(nodes=1, processes=ranks, memory=0), shard)
    start = [sys.executable, "-m", "manycpu.pipeline.node", f"--nproc-per-node={ranks}", str(PROGRAM)]
    words = [str(tmp_path), str(batch), str(length), dtype, "yes" if checkpointing else "no", shard]
    done = subprocess.run([*start, *words], check=False, capture_output=True, text=True, timeout=300)
    seen = [json.loads(found) for found in re.findall(r"peak (\{.*\})", done.stdout)]
    assert len(seen) == ranks, done.stdout + done.stderr
    for each in seen:
        assert 0.7 < each["peak"] / planned.total < 1.3
        assert 0.7 < (each["peak"] - each["before"]) / (planned.total - planned.process) < 1.3
        assert 0.7 < each["before"] / planned.process < 1.3


_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 500,
}
_GROUPED = _SMALL | {"num_key_value_heads": 2, "head_dim": 24}


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**_SMALL),
        RobertaConfig(**_SMALL),
        DistilBertConfig(dim=64, n_layers=3, n_heads=4, hidden_dim=160),
        GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=500, bos_token_id=1, eos_token_id=2),
        LlamaConfig(**_GROUPED),
        LlamaConfig(**_GROUPED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        MistralConfig(**_GROUPED),
        Qwen2Config(**{**_GROUPED, "head_dim": 16}),
        Qwen3Config(**_GROUPED),
    ],
    ids=lambda config: config.model_type,
)
def test_parameters_are_those_of_torch(tmp_path: Path, config: Any) -> None:
    """From the configuration alone, and from the headers of the weights, in two files."""
    encoder = config.model_type in ("bert", "roberta", "distilbert")
    kind: Any = AutoModelForQuestionAnswering if encoder else AutoModelForCausalLM
    model = kind.from_config(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    config.save_pretrained(tmp_path)
    expected = model_shape.read(tmp_path, causal=not encoder)
    assert expected is not None
    with_head = model_shape.with_head(expected, 2) if encoder else expected
    assert with_head.parameters == count
    model.save_pretrained(tmp_path, max_shard_size=int(2.5 * count))
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    assert model_shape.read(tmp_path, causal=not encoder) == expected
    blocks = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList)]
    assert expected.block == sum(parameter.numel() for parameter in blocks[0][0].parameters())
