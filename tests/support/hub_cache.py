"""Caches like those of Hugging Face's libraries, with tiny models and data, so that programs need no network.

The official examples of Accelerate and transformers load models and data of these names from the Hub.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from support.tiny_bert import tiny_checkpoint, tiny_tokenizer

_REVISION = "0" * 40
_METRIC = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        number = datasets.Value("int64")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(references)}
"""


def environment(home: Path) -> dict[str, str]:
    """Return the variables that point programs to the cache of :func:`fill`, and turn off network access."""
    return {
        "HF_HOME": str(home),
        "HF_DATASETS_CACHE": str(home / "datasets"),
        "HF_HUB_OFFLINE": "1",
        "HF_EVALUATE_OFFLINE": "1",
    }


def fill(home: Path) -> None:
    """Write models, data sets and metrics into the cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny_checkpoint(_repository(home, "bert-base-cased"))
    causal = _repository(home, "HuggingFaceTB/SmolLM-360M")
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.sep_token
    tokenizer.save_pretrained(causal)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(causal)
    _resnet(home)
    _data(home, "nyu-mll/glue", "mrpc", glue_rows(40), glue_rows(11))
    texts = [{"text": "the old bridge of the town"}] * 512  # an example takes the first 500
    _data(home, "Salesforce/wikitext", "wikitext-2-v1", texts, texts)
    for name in ("glue", "accuracy"):
        _metric(home / "modules" / "evaluate_modules", name)


def glue_rows(count: int) -> list[dict[str, Any]]:
    """Return rows of GLUE's task mrpc: two sentences, and whether they are equal (1) or not (0)."""
    words = ("old", "river", "plans", "town")
    pairs = ((words[n % 4], words[n // 2 % 4]) for n in range(count))
    return [
        {"sentence1": f"the {a} bridge", "sentence2": f"the {b} bridge", "label": int(a == b), "idx": n}
        for n, (a, b) in enumerate(pairs)
    ]


def _repository(home: Path, name: str) -> Path:
    """Create the folder of a model repository with one revision; return the folder of that revision."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(_REVISION)
    snapshot = folder / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    return snapshot


def _resnet(home: Path) -> None:
    """Write random weights of the model resnet50d to where timm looks for the pretrained ones."""
    import timm
    from safetensors.torch import save_file

    kept = timm.get_pretrained_cfg("resnet50d")
    assert kept is not None
    model = timm.create_model("resnet50d", pretrained=False)
    save_file(model.state_dict(), _repository(home, str(kept.hf_hub_id)) / "model.safetensors")


def _data(home: Path, name: str, config: str, train: list[Any], validation: list[Any]) -> None:
    """Write a data set in the format in which ``datasets`` caches it."""
    from datasets import load_dataset  # type: ignore[import-untyped]

    given = {"train": home / "train.json", "validation": home / "validation.json"}
    for path, rows in zip(given.values(), (train, validation), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {split: str(path) for split, path in given.items()}
    load_dataset("json", data_files=files, cache_dir=str(home / "made"))
    (made,) = (info.parent for info in (home / "made").rglob("dataset_info.json"))
    short = name.rpartition("/")[2]
    kept = home / "datasets" / name.replace("/", "___") / config / "0.0.0" / _REVISION
    shutil.copytree(made, kept)
    for arrow in kept.glob("json-*.arrow"):
        arrow.rename(arrow.with_name(arrow.name.replace("json", short, 1)))
    info = json.loads((kept / "dataset_info.json").read_text())
    told = info | {"builder_name": "parquet", "dataset_name": short, "config_name": config}
    (kept / "dataset_info.json").write_text(json.dumps(told))
    shutil.rmtree(home / "made")


def _metric(modules: Path, name: str) -> None:
    """Write a metric in the format in which ``evaluate`` caches downloaded code."""
    folder = modules / "metrics" / f"evaluate-metric--{name}" / ("0" * 64)
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:3]):
        (package / "__init__.py").touch()
    (folder / f"{name}.py").write_text(_METRIC)
