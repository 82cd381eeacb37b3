"""Find the numbers of parameters of a model in its folder, without torch and without the network.

They are in the headers of its safetensors files (8 bytes of length, then JSON: name -> dtype, shape); of a
folder without weights they follow from config.json, for the architectures that are most in use.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.spec.memory_plan import Family, Layout, Model

_BLOCK: Final = re.compile(r"(.*?\.\d+)\.")  # the name of a block ends with its number in a list
_HEADS: Final = ("lm_head.", "cls.", "score.", "classifier.", "qa_outputs.")
_POOLER: Final = "pooler."
_MAX_HEADER_BYTES: Final = 100 << 20  # what the safetensors library itself accepts
# Names of the same number in config.json: of most models, of GPT-2, of DistilBERT.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "intermediate": ("intermediate_size", "n_inner", "hidden_dim"),
    "vocabulary": ("vocab_size",),
    "head": ("head_dim",),
    "groups": ("num_key_value_heads",),
    "positions": ("max_position_embeddings", "n_positions"),
    "types": ("type_vocab_size",),
    "attention_dropout": ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout"),
    "hidden_dropout": ("hidden_dropout_prob", "resid_pdrop", "dropout"),
}
_GATED: Final = {"gemma", "gemma2", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"}
Config = Mapping[str, Any]


def read(folder: Path, *, causal: bool, overrides: Config | None = None) -> Model | None:
    """Read a model's numbers of parameters, and what its activations depend on.

    Args:
        folder: A folder with config.json, and mostly with weights.
        causal: Whether it is trained to predict tokens; otherwise the head that does so does not count.
        overrides: Values of its configuration that the training changes.

    Returns:
        The model; None: the folder has no weights, and its config.json is not enough to count them. The model
        has no layout if config.json does not say what its activations depend on.
    """
    config = config_of(folder) | dict(overrides or {})
    layout = layout_of(config)
    counts = dict(_element_counts(folder, causal=causal))
    if not counts:
        return of_config(config, causal=causal)
    blocks = Counter[str]()  # name of a block -> its parameters
    for name, count in counts.items():
        if match := _BLOCK.match(name):
            blocks[match[1]] += count
    parameters = sum(counts.values())
    largest = max(blocks.values(), default=parameters)  # without blocks, all of the model is one
    return Model(parameters=parameters, block=largest, outside=parameters - blocks.total(), layout=layout)


def config_of(folder: Path) -> dict[str, Any]:
    """Read a model's config.json; empty: there is none, or it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _element_counts(folder: Path, *, causal: bool) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of elements of each trained tensor in a folder's safetensors files."""
    # Other files beside model*.safetensors may have the same weights in another layout, or an adapter.
    files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            for name, tensor in header(file).items():
                # The training drops poolers and, unless it is causal, the head of the earlier task.
                is_pooler = name.startswith(_POOLER) or f".{_POOLER}" in name
                is_dropped_head = not causal and name.startswith(_HEADS)
                if name != "__metadata__" and not is_pooler and not is_dropped_head:
                    yield name, math.prod(tensor["shape"])
        except (OSError, ValueError, KeyError, TypeError):  # the training itself says what is wrong with it
            continue


def header(file: Path) -> dict[str, Any]:
    """Read the header of a safetensors file: tensor -> dtype, shape; raises ValueError for another file."""
    with file.open("rb") as stream:  # as the top of this file describes
        length = int.from_bytes(stream.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file")
        header: dict[str, Any] = json.loads(stream.read(length))
    return header


def layout_of(config: Config) -> Layout | None:
    """Read what the activations of a transformer depend on; None: its configuration does not say."""
    names = ("layers", "hidden", "heads", "vocabulary")
    layers, hidden, heads, vocabulary = (_number(config, name) for name in names)
    if not (layers and hidden and heads and vocabulary):
        return None
    kind = str(config.get("model_type"))
    family: Family = "encoder"
    if kind in _GATED:
        family = "gated"
    elif kind == "gpt2":
        family = "gpt2"
    intermediate = _number(config, "intermediate") or 4 * hidden  # GPT-2's n_inner is null
    head_size = _number(config, "head") or hidden // heads
    return Layout(
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        queries=heads * head_size,
        keys=(_number(config, "groups") or heads) * head_size,
        vocabulary=vocabulary,
        attention_dropout=_dropout(config, kind, "attention_dropout") > 0,
        hidden_dropout=_dropout(config, kind, "hidden_dropout") > 0,
    )


def _number(config: Config, name: str) -> int | None:
    """Read a whole number above 0 from config.json, by manycpu's name for it; None: there is none.

    If the configuration has a list, with a number for each layer, the largest one counts.
    """
    for name_in_config in _NAMES[name]:
        value = config.get(name_in_config)
        candidates = value if isinstance(value, list) else [value]
        numbers = [each for each in candidates if isinstance(each, int) and each > 0]
        if numbers:
            return max(numbers)
    return None


def _dropout(config: Config, kind: str, name: str) -> float:
    """Read a probability of dropout; if config.json has none: 0 for the kinds in ``_GATED``, else 0.1."""
    values = (config.get(each) for each in _NAMES[name])
    default = 0.0 if kind in _GATED else 0.1
    return next((float(each) for each in values if isinstance(each, int | float)), default)


def length_limit(config: Config) -> int | None:
    """Read how many tokens a model takes at most; None: its configuration does not say."""
    return _number(config, "positions")


def of_config(config: Config, *, causal: bool) -> Model | None:
    """Compute a model's numbers of parameters from its configuration; None: its architecture is not known."""
    count_parameters = _COUNTS.get(str(config.get("model_type")))
    layout = layout_of(config)
    if count_parameters is None or layout is None:
        return None
    block, outside = count_parameters(config, layout, causal)
    return Model(parameters=layout.layers * block + outside, block=block, outside=outside, layout=layout)


def _encoder(config: Config, layout: Layout, causal: bool) -> tuple[int, int]:
    """Count the parameters of BERT, RoBERTa or DistilBERT, without pooler and head.

    Returns the parameters of one block, and those outside of the blocks.
    """
    del causal  # the head is not counted
    hidden = layout.hidden
    # Four matrices of attention and two of the feed-forward network, with biases; and two norms. The 5: the
    # last bias, and the weights and biases of the norms.
    block = 4 * (hidden + 1) * hidden + 2 * hidden * layout.intermediate + layout.intermediate + 5 * hidden
    token_types = 0 if config["model_type"] == "distilbert" else _number(config, "types") or 2
    embedding_rows = layout.vocabulary + (_number(config, "positions") or 512) + token_types
    return block, (embedding_rows + 2) * hidden  # the 2: weights and biases of a norm


def _gpt2(config: Config, layout: Layout, causal: bool) -> tuple[int, int]:
    """Count the parameters of GPT-2: of one block, and outside of the blocks."""
    del causal  # its head is its embedding
    hidden = layout.hidden  # a block is as in `_encoder`
    block = 4 * (hidden + 1) * hidden + 2 * hidden * layout.intermediate + layout.intermediate + 5 * hidden
    embedding_rows = layout.vocabulary + (_number(config, "positions") or 1024)
    return block, (embedding_rows + 2) * hidden  # the 2: weights and biases of the last norm


def _llama(config: Config, layout: Layout, causal: bool) -> tuple[int, int]:
    """Count the parameters of Llama, Mistral or Qwen: of one block, and outside of the blocks."""
    kind = config["model_type"]
    hidden = layout.hidden
    width = layout.queries + 2 * layout.keys  # of queries, keys and values together
    # Attention (queries, keys, values; output), three matrices of the feed-forward network, two norms.
    block = hidden * (width + layout.queries) + 3 * hidden * layout.intermediate + 2 * hidden
    if kind == "qwen2":
        block += width  # biases, but none at the output
    elif config.get("attention_bias"):
        block += width + hidden
    if kind == "qwen3":  # norms of queries and keys
        block += 2 * (layout.queries // layout.heads)
    if config.get("mlp_bias"):
        block += 2 * layout.intermediate + hidden
    # The embeddings; and a causal model's head, of the same size, unless it is tied to the embeddings.
    matrices = 2 if causal and not config.get("tie_word_embeddings") else 1
    return block, matrices * layout.vocabulary * hidden + hidden  # + hidden: the last norm


_COUNTS: Final[Mapping[str, Callable[[Config, Layout, bool], tuple[int, int]]]] = {
    **dict.fromkeys(("bert", "distilbert", "roberta"), _encoder),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama),
    "gpt2": _gpt2,
}
"""Architecture -> function that counts the parameters of a block, and those outside of the blocks."""


def with_head(model: Model, outputs: int) -> Model:
    """Add to a model a linear head with ``outputs`` outputs for each token.

    A model without a layout is returned unchanged: the size of the head is not known.
    """
    if model.layout is None:
        return model
    head = outputs * (model.layout.hidden + 1)  # + 1: the bias
    return replace(model, parameters=model.parameters + head, outside=model.outside + head)
