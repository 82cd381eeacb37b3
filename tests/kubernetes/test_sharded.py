"""A model whose replica is larger than a pod's memory: replicas are killed, two pods with shares train."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cluster.space import Space
from support.cluster_runs import succeeded
from support.tiny_bert import tiny_data, tiny_tokenizer

from manycpu.pipeline import train
from manycpu.pipeline.spec.errors import BadInputError, TrainingFailedError

Fields = dict[str, Any]
RunDag = Callable[..., SimpleNamespace]
MEMORY = "2500Mi"
ARGS = (
    *("--max_seq_length", "48", "--doc_stride", "8", "--per_device_train_batch_size", "2"),
    *("--max_steps", "3", "--save_steps", "2", "--logging_steps", "1", "--evaluate_before", "False"),
)


@pytest.fixture
def large(recipe: Fields, tmp_path: Path) -> Fields:
    """Return a run of 126 million parameters: 2.0 GB with gradients and AdamW, 1.0 GB as two shares."""
    from transformers import BertConfig, BertModel

    tokenizer = tiny_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        num_hidden_layers=10,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    BertModel(config).save_pretrained(tmp_path / "large")
    tokenizer.save_pretrained(tmp_path / "large")
    return recipe | {
        "args": list(ARGS),
        "data": str(tiny_data(tmp_path / "few", train=12)),
        "model": str(tmp_path / "large"),
        "dtype": "fp32",
        "resources": {"cpu": 0.9, "memory": MEMORY},
    }


@pytest.mark.alone
@pytest.mark.long
def test_a_replica_is_killed_for_its_memory_and_shares_train_to_the_exported_model(
    large: Fields, target: Fields, connected: Fields, run_dag: RunDag, namespace: Space, tmp_path: Path
) -> None:
    from transformers import AutoModelForQuestionAnswering

    replicas = large | {"args": [*large["args"], "--shard", "no"]}
    with pytest.raises(BadInputError, match="--shard full"):
        train(replicas, target, run_id="refused")
    # As a module it is a program whose memory preflight does not know.
    unknown = replicas | {"program": "-m manycpu.pipeline.recipes.question_answering"}
    with pytest.raises(TrainingFailedError, match="OOMKilled"):
        train(unknown, target | {"launch": "pytorchjob"}, run_id="replica")
    conf = {name: large[name] for name in ("args", "data", "model", "output", "dtype")}
    conf |= {"resources_cpu": 0.9, "resources_memory": MEMORY}
    conf |= {f"kubernetes_{name}": value for name, value in connected.items() if name != "kind"}
    ran = run_dag("train_on_kubernetes", conf=conf | {"kubernetes_launch": "pytorchjob"})
    assert (ran.state, set(ran.tasks.values())) == ("success", {"success"}), ran.said[-5000:]
    assert "the model is sharded over 2 ranks" in ran.said, "by itself, as a replica does not fit"
    assert succeeded(tmp_path / "out", namespace).metrics["train_steps"] == 3
    _, loaded = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loaded["missing_keys"]
    assert loaded["error_msgs"] == []
