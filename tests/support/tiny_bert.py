"""A random BERT of 2 layers x 32, its WordPiece tokenizer, and a small data set, created in milliseconds."""

import json
import string
from pathlib import Path
from typing import Any

_WORDS = ("a", "and", "bridge", "drew", "in", "of", "old", "plans", "river", "the", "town", "who", "year")
NAMES = ("mira", "odo", "pell", "rusk", "tano", "vex")


def tiny_tokenizer() -> Any:
    """Return a tokenizer that knows a few words and splits all others into letters."""
    from transformers import BertTokenizer

    letters = [*string.ascii_lowercase, *string.digits, ".", ",", "?"]
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*specials, *letters, *(f"##{letter}" for letter in letters), *_WORDS, *NAMES]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return BertTokenizer(vocab=vocabulary, do_lower_case=True, model_max_length=512)


def tiny_checkpoint(folder: Path) -> Path:
    """Write a checkpoint of an encoder without a head for question answering; return its folder."""
    from transformers import BertConfig, BertModel, set_seed

    tokenizer = tiny_tokenizer()
    set_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_data(folder: Path, train: int = 24, validation: int = 7, words: int = 0) -> Path:
    """Write train.json and validation.json with so many questions; their texts get ``words`` more words."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("validation", validation)):
        articles = [_article(f"{split}-{i}", NAMES[i % len(NAMES)], 1800 + i, words) for i in range(count)]
        (folder / f"{split}.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    return folder


def _article(key: str, name: str, year: int, words: int) -> dict[str, Any]:
    context = f"In {year} {name} drew the plans of the old bridge.{' town' * words}"
    answer = {"text": name, "answer_start": context.index(name)}
    asked = {"id": key, "question": "Who drew the plans?", "answers": [answer]}
    return {"title": key, "paragraphs": [{"context": context, "qas": [asked]}]}


def tiny_env(folder: Path, model: Path) -> dict[str, str]:
    """Write a tiny data set, and return the environment of a run on it, with all paths in the folder."""
    return {
        "MANYCPU_DATA": str(tiny_data(folder / "data")),
        "MANYCPU_MODEL": str(model),
        "MANYCPU_OUTPUT": str(folder / "output"),
        "MANYCPU_CHECKPOINTS": str(folder / "checkpoints"),
    }


def run(env: dict[str, str], *words: str) -> dict[str, Any]:
    """Run the recipe with more options ``words`` in this process, on short texts; return its metrics."""
    from manycpu.pipeline.recipes.question_answering import training
    from manycpu.pipeline.recipes.question_answering.options import parse

    common = ("--max_seq_length", "48", "--doc_stride", "8", "--per_device_train_batch_size", "4")
    cache = str(Path(env["MANYCPU_OUTPUT"]).with_name("cache"))
    return training.run(parse([*common, "--cache_dir", cache, *words], env), env)
