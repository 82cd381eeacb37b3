"""Write what the example trains on: ``python -m manycpu.pipeline.recipes.causal_lm.generate FOLDER``.

``texts`` and ``questions`` are the contexts and the questions of question_answering's data set, as JSON
lines. ``model`` is a small Llama without weights: a configuration, and a tokenizer whose tokens are bytes.
Imports the standard library alone, so that a task of Airflow can write them.
"""

import json
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Final

SQUAD: Final = Path(__file__).parents[1] / "question_answering" / "demo_data"
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
SPECIALS: Final = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE: Final = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main(folder: str | Path) -> None:
    """Write the folders ``texts``, ``questions`` and ``model`` into a folder."""
    folder = Path(folder)
    for split in ("train", "validation"):
        document = json.loads((SQUAD / f"{split}.json").read_text(encoding="utf-8"))
        paragraphs = [paragraph for article in document["data"] for paragraph in article["paragraphs"]]
        _write(folder / "texts" / f"{split}.jsonl", ({"text": each["context"]} for each in paragraphs))
        _write(folder / "questions" / f"{split}.jsonl", _questions(paragraphs))
    write_model(folder / "model")


def _questions(paragraphs: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield a record for each question: context and question as the prompt, its answer as the completion."""
    for paragraph in paragraphs:
        for entry in paragraph["qas"]:
            prompt = f"{paragraph['context']}\n{entry['question']}\n"
            yield {"prompt": prompt, "completion": entry["answers"][0]["text"]}


def _write(file: Path, records: Iterator[dict[str, str]]) -> None:
    """Write records as JSON lines, and create the file's folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    file.write_text(text, encoding="utf-8")


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a configuration and a tokenizer, without weights; returns the folder.

    Args:
        folder: Where to write; it is created.
        changes: Fields of the configuration that differ from :data:`CONFIG`.
    """
    # The fields of each special token, but its text and number.
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    vocabulary = {text: number for number, text in enumerate([*SPECIALS, *_symbols()])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": text, **special} for number, text in enumerate(SPECIALS)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    config = CONFIG | {"vocab_size": len(vocabulary)} | changes
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    return folder


def _symbols() -> Iterator[str]:
    """Yield the character that stands for each byte in byte-level BPE, as in GPT-2.

    Bytes that are no visible character get the characters from 256 on.
    """
    substitutes = count(256)
    for byte in range(256):
        is_visible = chr(byte).isprintable() and byte not in (0x20, 0xA0, 0xAD)
        yield chr(byte) if is_visible else chr(next(substitutes))


if __name__ == "__main__":
    main(sys.argv[1])
