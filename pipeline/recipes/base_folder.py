"""Check the folder of a base checkpoint by the standard library alone, so that preflight can."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.model_shape import header
from manycpu.pipeline.spec.recipe_options import Options, is_on, value_of

_PARTS: Final = (
    ("config.json", ("config.json",), "config_name"),
    ("tokenizer", ("tokenizer.*", "vocab*", "tekken.json", "*.model", "*.tiktoken"), "tokenizer_name"),
)
"""A part of a base checkpoint, patterns of its files, and the option that names another source for it."""
_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")  # the first that is there is loaded


def faults(folder: Path, options: Options) -> Iterator[str]:
    """Yield what the folder of a base checkpoint lacks, unless an option replaces that part."""
    for part, patterns, alternative in _PARTS:
        is_replaced = bool(value_of(options, alternative))
        is_there = any(any(folder.glob(pattern)) for pattern in patterns)
        if not (is_replaced or is_there):
            yield f"{folder} has no {part}"
    # The folder of an adapter needs no weights of a model: transformers loads them from the adapter's base.
    if is_on(options, "from_scratch") or (folder / "adapter_config.json").is_file():
        return
    files = _weights(folder)
    if not files:
        yield f"{folder} has no weights"
    for file in files:
        if fault := _fault(file):
            yield f"{file} {fault}"
            return  # one message is enough to refuse the checkpoint


def check_timm(folder: Path) -> None:
    """Raise BadInputError unless a folder has config.json, which names the model of timm to create."""
    if not (folder / "config.json").is_file():
        message = f"{folder} has no config.json that names its model of timm"
        fix = "Name the model of its weights by --model NAME in run.args"
        raise BadInputError(message, field="run.model", fix=fix)


def _weights(folder: Path) -> list[Path]:
    """List the weight files that transformers loads, also missing files that an index names; may be empty."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            weight_map = _object(index).get("weight_map")  # name of a weight -> its file
            if not isinstance(weight_map, dict):
                return []
            return [folder / file for file in sorted({*weight_map.values()})]
    return []


def _fault(file: Path) -> str | None:
    """Explain why a weight file cannot be loaded; None: no fault was found.

    A safetensors file must be whole. Any other file need only exist, because only torch could read it.
    """
    if not file.is_file():
        return "is missing, and the index names it"
    if file.suffix != ".safetensors":
        return None
    try:
        tensors = header(file)
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        # The file has 8 bytes with the header's length, the header, then the tensors' data.
        with file.open("rb") as opened:
            data_start = 8 + int.from_bytes(opened.read(8), "little")
        is_whole = file.stat().st_size == data_start + max(ends, default=0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return "is no safetensors file, but a pointer to one perhaps"
    return None if is_whole else "is cut off"


def has_tied_head(folder: Path) -> bool:
    """Whether a folder's configuration says that the head shares the weights of the embeddings."""
    return _object(folder / "config.json").get("tie_word_embeddings") is True


def layers_of(folder: Path) -> list[str]:
    """List the layers that have a weight matrix, without embeddings, by a folder's safetensors files.

    Empty: the folder has no weights, or a file with weights is damaged or is no safetensors file.
    """
    layers: set[str] = set()
    for file in _weights(folder):
        if file.suffix != ".safetensors" or _fault(file):
            return []
        for name, tensor in header(file).items():
            is_matrix = name.endswith(".weight") and len(tensor.get("shape", ())) > 1
            if is_matrix and "embed" not in name:
                layers.add(name.removesuffix(".weight"))
    return sorted(layers)


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, with special tokens and a chat template that may be in files beside it.

    Returns:
        The settings; empty: there is no such file, or it cannot be read.

    Raises:
        BadInputError: The template is not UTF-8 text.
    """
    settings = _object(folder / "tokenizer_config.json")
    if not settings:
        return {}
    # Where both files name a token, tokenizer_config.json wins.
    settings = _object(folder / "special_tokens_map.json") | settings
    template = folder / "chat_template.jinja"
    if not template.is_file():
        return settings
    try:
        return settings | {"chat_template": template.read_text("utf-8")}
    except UnicodeDecodeError as error:
        message = f"{template} is not UTF-8 text: {error}"
        raise BadInputError(message, field="run.model", fix="Write it as UTF-8") from error


def _object(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty: the file is missing, cannot be read, or holds no object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
