"""A recipe with --shard full: it trains as without, resumes on other numbers of ranks, and exports whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.recipe_ranks import WarmNode
from support.tiny_bert import tiny_checkpoint, tiny_data

OPTIONS = (
    *("--max_seq_length", "48", "--doc_stride", "8", "--per_device_train_batch_size", "2"),
    *("--logging_steps", "1", "--save_steps", "2", "--max_steps", "4", "--seed", "3"),
    *("--evaluate_before", "True", "--config_overrides"),
    "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sharded")
    tiny_data(made / "data", train=32, validation=7)
    # With a head: one that is made at random is another one when it is sharded.
    from transformers import AutoModelForQuestionAnswering, set_seed

    tiny_checkpoint(made / "model")
    set_seed(0)
    AutoModelForQuestionAnswering.from_pretrained(made / "model").save_pretrained(made / "model")
    return made


def train(warm: WarmNode, folder: Path, name: str, ranks: int, *options: str) -> dict[str, Any]:
    """Train on some ranks, into folders of this name; return what it measured."""
    env = {
        "MANYCPU_RUN": name,
        "MANYCPU_DATA": str(folder / "data"),
        "MANYCPU_MODEL": str(folder / "model"),
        "MANYCPU_OUTPUT": str(folder / f"{name}-output"),
        "MANYCPU_CHECKPOINTS": str(folder / f"{name}-checkpoints"),
        "MANYCPU_DTYPE": "fp32",
    }
    ended = warm.recipe("question_answering", ranks, env, *OPTIONS, *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    measured: dict[str, Any] = json.loads((folder / f"{name}-output" / "all_results.json").read_text())
    return measured | {"log": ended.stdout + ended.stderr}


def weights(folder: Path, name: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / f"{name}-output" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(warm: WarmNode, folder: Path) -> dict[str, Any]:
    return train(warm, folder, "whole", 2)


@pytest.fixture(scope="module")
def sharded(warm: WarmNode, folder: Path) -> dict[str, Any]:
    return train(warm, folder, "sharded", 2, "--shard", "full")


def test_it_trains_the_model_that_replicas_train(
    folder: Path, whole: dict[str, Any], sharded: dict[str, Any]
) -> None:
    import torch

    assert sharded["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-5)
    assert sharded["f1"] == whole["f1"]
    expected = weights(folder, "whole")
    for name, tensor in weights(folder, "sharded").items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=1e-4)
    assert "the model is sharded over 2 ranks" in sharded["log"]


@pytest.mark.usefixtures("sharded")
def test_the_export_is_what_from_pretrained_loads(folder: Path, whole: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForQuestionAnswering

    del whole
    _, loaded = AutoModelForQuestionAnswering.from_pretrained(
        folder / "sharded-output", output_loading_info=True
    )
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    config = AutoConfig.from_pretrained(folder / "sharded-output").to_dict()
    assert "distributed_config" not in config
    assert config["architectures"] == ["BertForQuestionAnswering"]
    names = {path.name for path in (folder / "sharded-output").iterdir()}
    assert {path.name for path in (folder / "whole-output").iterdir()} == names


@pytest.mark.usefixtures("sharded")
@pytest.mark.parametrize(("ranks", "shard"), [(4, "full"), (1, "full"), (2, "no")])
def test_another_number_of_ranks_resumes(warm: WarmNode, folder: Path, ranks: int, shard: str) -> None:
    name = f"on-{ranks}-{shard}"
    (folder / f"{name}-checkpoints").mkdir()
    shutil.copytree(
        folder / "sharded-checkpoints" / "checkpoint-2", folder / f"{name}-checkpoints" / "checkpoint-2"
    )
    resumed = train(warm, folder, name, ranks, "--shard", shard)
    assert resumed["resumed_from_step"] == 2
    assert resumed["train_steps"] == 4


@pytest.mark.usefixtures("sharded")
@pytest.mark.parametrize("cut", ["metadata", "share"])
def test_a_checkpoint_that_was_cut_gives_way_to_the_one_before(
    warm: WarmNode, folder: Path, cut: str
) -> None:
    name = f"cut-{cut}"
    shutil.copytree(folder / "sharded-checkpoints", folder / f"{name}-checkpoints")
    last = folder / f"{name}-checkpoints" / "checkpoint-4" / "sharded"
    if cut == "metadata":
        (last / ".metadata").unlink()
    else:
        share = next(last.glob("*.distcp"))
        share.write_bytes(share.read_bytes()[:-10])
    resumed = train(warm, folder, name, 2, "--shard", "full")
    assert resumed["resumed_from_step"] == 2
    assert "checkpoint-4 is skipped" in resumed["log"]


@pytest.mark.usefixtures("whole")
def test_a_checkpoint_of_replicas_is_refused_with_the_way_out(warm: WarmNode, folder: Path) -> None:
    shutil.copytree(folder / "whole-checkpoints", folder / "other-checkpoints")
    with pytest.raises(AssertionError, match="is of a training that was not sharded"):
        train(warm, folder, "other", 2, "--shard", "full", "--max_steps", "6")


def test_gradients_of_several_batches_are_added(warm: WarmNode, folder: Path) -> None:
    accumulated = ("--gradient_accumulation_steps", "2", "--max_steps", "2")
    plain = train(warm, folder, "added", 2, *accumulated)
    shares = train(
        warm, folder, "added-shares", 2, "--shard", "full", "--save_only_model", "True", *accumulated
    )
    assert shares["train_loss"] == pytest.approx(plain["train_loss"], rel=1e-5)
    assert "--save_only_model is left out" in shares["log"]
    assert (folder / "added-shares-checkpoints" / "checkpoint-2" / "sharded" / ".metadata").exists()


@pytest.mark.usefixtures("sharded")
def test_a_step_that_is_done_again_with_replicas_replaces_its_shares(warm: WarmNode, folder: Path) -> None:
    shutil.copytree(folder / "sharded-checkpoints", folder / "again-checkpoints")
    last = folder / "again-checkpoints" / "checkpoint-4"
    (last / "trainer_state.json").unlink()  # as after a kill
    resumed = train(warm, folder, "again", 2, "--shard", "no")
    assert resumed["resumed_from_step"] == 2
    assert not (last / "sharded").exists()
    assert (last / "model.safetensors").exists()
