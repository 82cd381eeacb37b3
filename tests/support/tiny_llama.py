"""A small Llama whose tokens are bytes, and data of each kind, created in milliseconds."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from manycpu.pipeline.recipes.causal_lm.generate import write_model

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def tiny_checkpoint(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint with random weights; ``changes`` replace fields of its config. Return its folder."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    write_model(folder, **(SMALL | changes))
    set_seed(0)
    model: Any = AutoModelForCausalLM
    model.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def lines(file: Path, records: Iterable[dict[str, Any]]) -> Path:
    """Write records to a file as JSON lines; return the file's folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file.parent


def sums(count: int, first: int = 0) -> list[dict[str, str]]:
    """Return so many prompts of different lengths with their answers, beginning with number ``first``."""
    return [
        {"prompt": "What comes after " + "a, " * (i % 7) + "a?", "completion": " b" * (1 + i % 5)}
        for i in range(first, first + count)
    ]


def tiny_env(folder: Path, model: Path) -> dict[str, str]:
    """Write a tiny data set, and return the environment of a run on it, with all paths in the folder."""
    lines(folder / "data" / "train.jsonl", sums(24))
    lines(folder / "data" / "validation.jsonl", sums(7, 100))
    return {
        "MANYCPU_DATA": str(folder / "data"),
        "MANYCPU_MODEL": str(model),
        "MANYCPU_OUTPUT": str(folder / "output"),
        "MANYCPU_CHECKPOINTS": str(folder / "checkpoints"),
    }


def run(env: dict[str, str], *words: str) -> dict[str, Any]:
    """Run the recipe with more options ``words`` in this process; return its metrics."""
    from manycpu.pipeline.recipes.causal_lm import training
    from manycpu.pipeline.recipes.causal_lm.options import parse

    common = ("--per_device_train_batch_size", "1", "--samples", "1", "--sample_tokens", "4")
    cache = str(Path(env["MANYCPU_OUTPUT"]).with_name("cache"))
    return training.run(parse([*common, "--cache_dir", cache, *words], env), env)
