"""The memory of a training, from numbers: parts, nodes that are needed, and what is said of a run."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline.spec import memory_estimate, memory_plan, model_shape
from manycpu.pipeline.spec.errors import Finding
from manycpu.pipeline.spec.memory_estimate import Estimate
from manycpu.pipeline.spec.memory_plan import Layout, Model, Nodes, Training
from manycpu.pipeline.spec.validation import read_run

GIB = 1 << 30
BERT = {
    "model_type": "bert",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}
BLOCK = 4 * 65 * 64 + 2 * 64 * 256 + 256 + 5 * 64
OUTSIDE = (1000 + 128 + 2 + 2) * 64
LAYOUT = Layout(
    family="gated",
    layers=32,
    hidden=4096,
    intermediate=14_336,
    heads=32,
    queries=4096,
    keys=1024,
    vocabulary=128_256,
)
LARGE = Model(parameters=8_000_000_000, block=218_000_000, outside=1_050_000_000, layout=LAYOUT)
STEP = Training(batch=1, length=2048, causal=True, checkpointing=True)


def _write_weights(path: Path, shapes: dict[str, list[int]]) -> None:
    header = json.dumps(
        {"__metadata__": {"format": "pt"}}
        | {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    return tmp_path


def test_a_replica_takes_sixteen_bytes_for_each_parameter() -> None:
    parts = memory_plan.replica(Model(parameters=1000), Training())
    assert (parts.parameters, parts.gradients, parts.optimizer) == (4000, 4000, 8000)
    assert parts.total == 16_000 + memory_plan.PROCESS


def test_bf16_costs_a_replica_copies_of_its_linear_layers() -> None:
    model = Model(parameters=1000, outside=400)
    assert memory_plan.replica(model, Training(bf16=True)).copies == 2 * 600


def test_adapters_leave_the_frozen_weights_without_gradients() -> None:
    lora = Training(bf16=True, trained=0, adapters=10, frozen=memory_plan.HALF)
    parts = memory_plan.replica(Model(parameters=1000), lora)
    assert (parts.parameters, parts.gradients, parts.optimizer) == (2040, 40, 80)


def test_a_sharded_rank_holds_its_part_and_the_blocks_that_it_computes_with() -> None:
    model = Model(parameters=1000, block=100, outside=200)
    parts = memory_plan.sharded(model, Training(bf16=True), ranks=4)
    assert (parts.parameters, parts.gradients, parts.optimizer) == (1000, 1000, 2000)
    # What is outside and two blocks; of the largest unit its buffer, its gradients, and twice what is sent.
    assert parts.copies == int(1.4 * (2 * (200 + 2 * 100 + 200) + (2 + 2 * 4) * 200))
    whole = memory_plan.sharded(model, Training(), ranks=4)
    assert whole.copies == int(1.4 * (4 * (200 + 2 * 100 + 200) + (4 + 2 * 4) * 200))


def test_attention_scores_count_only_where_attention_has_dropout() -> None:
    step = Training(batch=2, length=512)
    without = memory_plan.activations(LARGE, step)
    dropping = replace(LARGE, layout=replace(LAYOUT, attention_dropout=True))
    scores = 3 * 4 * 32 * 512**2 * 2 * 32  # three tensors of fp32, heads, length squared, batch, layers
    assert memory_plan.activations(dropping, step) - without == pytest.approx(1.4 * scores)


def test_checkpointing_keeps_the_input_of_a_layer() -> None:
    kept, again = (
        memory_plan.activations(LARGE, replace(STEP, checkpointing=each)) for each in (False, True)
    )
    assert again < kept / 5


def test_an_evaluation_counts_where_its_batch_takes_more_than_a_step() -> None:
    step = Training(batch=1, length=1024, causal=True)
    assert memory_plan.activations(LARGE, replace(step, evaluated=1)) == memory_plan.activations(LARGE, step)
    large = memory_plan.activations(LARGE, replace(step, evaluated=64))
    # The logits and their log-softmax; embeddings and the last norm.
    assert large == int(1.4 * 64 * 1024 * 4 * (2 * 128_256 + 3 * 4096))


def test_activations_of_a_gpt3_layer_are_those_of_the_paper() -> None:
    """34 bytes for each token and hidden unit: the paper's GELU keeps one tensor, and its masks are bytes."""
    paper = Layout(
        family="encoder",
        layers=1,
        hidden=1024,
        intermediate=4096,
        heads=16,
        queries=1024,
        keys=1024,
        vocabulary=1000,
    )
    one, two = (
        memory_plan.activations(
            Model(parameters=1, layout=replace(paper, layers=layers)), Training(length=1024, bf16=True)
        )
        for layers in (1, 2)
    )
    assert (two - one) / 1.4 / 1024 / 1024 == pytest.approx(34, rel=0.2)


@pytest.mark.parametrize(("memory", "needed"), [(64, 4), (256, 1)])
def test_the_nodes_that_are_needed_are_the_fewest(memory: int, needed: int) -> None:
    nodes = Nodes(nodes=1, processes=1, memory=memory * GIB)
    step = replace(STEP, bf16=True)
    assert memory_plan.nodes_needed(LARGE, step, nodes, "full") == needed
    assert memory_plan.fits(LARGE, step, replace(nodes, nodes=needed), "full")
    assert needed == 1 or not memory_plan.fits(LARGE, step, replace(nodes, nodes=needed - 1), "full")


@pytest.mark.parametrize("shard", ["full", "hybrid"])
def test_a_single_rank_holds_a_replica_and_gathers_nothing(shard: memory_plan.Shard) -> None:
    nodes = Nodes(nodes=1, processes=1, memory=128 * GIB)
    step, replica = replace(STEP, bf16=True), memory_plan.replica(LARGE, replace(STEP, bf16=True))
    assert memory_plan.parts(LARGE, step, nodes, shard) == replica
    exact = replace(nodes, memory=int(replica.total / 0.9) + 1)
    assert memory_plan.nodes_needed(LARGE, step, exact, shard) == 1


def test_no_number_of_nodes_holds_what_a_rank_gathers() -> None:
    assert memory_plan.nodes_needed(LARGE, STEP, Nodes(nodes=1, processes=1, memory=8 * GIB), "full") is None


def test_auto_shards_where_a_replica_does_not_fit() -> None:
    small, large = (Nodes(nodes=4, processes=1, memory=memory * GIB) for memory in (64, 512))
    assert memory_plan.choose(LARGE, STEP, small) == "full"
    assert memory_plan.choose(LARGE, STEP, large) == "no"


def test_headers_count_what_the_training_loads(bert: Path) -> None:
    first = {"bert.embeddings.word_embeddings.weight": [1000, 64], "cls.predictions.bias": [1000]}
    second = {"bert.encoder.layer.0.w": [64, 64], "bert.encoder.layer.1.w": [64, 65], "bert.pooler.w": [64]}
    _write_weights(bert / "model-00001-of-00002.safetensors", first)
    _write_weights(bert / "model-00002-of-00002.safetensors", second)
    (bert / "model.safetensors.index.json").write_text("{}")
    model = model_shape.read(bert, causal=False)
    assert model is not None
    assert (model.parameters, model.block, model.outside) == (64_000 + 64 * 64 + 64 * 65, 64 * 65, 64_000)
    assert model.layout is not None


def test_without_weights_the_configuration_counts(bert: Path) -> None:
    model = model_shape.read(bert, causal=False)
    assert model is not None
    assert (model.parameters, model.block, model.outside) == (2 * BLOCK + OUTSIDE, BLOCK, OUTSIDE)


def test_what_says_nothing_is_not_known(tmp_path: Path) -> None:
    assert model_shape.read(tmp_path, causal=False) is None
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert model_shape.read(tmp_path, causal=False) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": "abc"},
        {"vocab_size": [1000]},
        {"num_attention_heads": None},
        {"intermediate_size": [256, 128]},
        {"attention_probs_dropout_prob": "none", "type_vocab_size": "two", "head_dim": {}, "model_type": []},
    ],
)
def test_a_configuration_of_odd_values_counts_as_far_as_it_has_numbers(
    bert: Path, changes: dict[str, Any]
) -> None:
    (bert / "config.json").write_text(json.dumps(BERT | changes))
    _write_weights(bert / "model.safetensors", {"bert.encoder.layer.0.w": [64, 64]})
    found = model_shape.read(bert, causal=False)
    assert found is not None
    assert found.parameters == 64 * 64
    usual = model_shape.layout_of(BERT)
    assert found.layout == (None if {"num_hidden_layers", "num_attention_heads"} & {*changes} else usual)


def _run(**fields: Any) -> Any:
    return read_run({"program": "question_answering", "output": None, **fields})


def test_the_options_of_a_recipe_count(bert: Path) -> None:
    words = "--per_device_train_batch_size=16 --max-seq-length 96 --gradient_checkpointing --bf16"
    words += " --optim sgd --per_gpu_eval_batch_size 64"
    found = memory_estimate.estimate(_run(model=str(bert), args=words, nproc_per_node=2), bert)
    assert isinstance(found, Estimate)
    assert found.training == Training(
        batch=16, evaluated=64, length=96, bf16=True, checkpointing=True, optimizer=0
    )
    assert found.processes == 2
    assert found.model.parameters == 2 * BLOCK + OUTSIDE + 2 * 65


@pytest.mark.parametrize(("has_bf16", "bf16"), [(True, True), (False, False), (None, False)])
def test_a_recipe_computes_in_bf16_where_processors_have_it(
    bert: Path, bf16: bool, *, has_bf16: bool | None
) -> None:
    found = memory_estimate.estimate(_run(model=str(bert)), bert, has_bf16=has_bf16)
    assert isinstance(found, Estimate)
    assert found.training.bf16 == bf16
    said = memory_estimate.estimate(_run(model=str(bert), dtype="fp32"), bert, has_bf16=True)
    assert isinstance(said, Estimate)
    assert not said.training.bf16


def test_other_files_beside_the_weights_do_not_count(bert: Path) -> None:
    for name in ("model", "consolidated", "adapter_model"):
        _write_weights(bert / f"{name}.safetensors", {f"{name}.weight": [3, 5]})
    found = model_shape.read(bert, causal=False)
    assert found is not None
    assert found.parameters == 15


@pytest.mark.parametrize(
    ("dtype", "frozen"),
    [("bf16", memory_plan.HALF), ("fp32", memory_plan.FLOAT), (None, memory_plan.HALF)],
)
def test_adapters_train_beside_weights_as_they_are_stored(
    tmp_path: Path, dtype: str | None, frozen: int
) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = {"model_type": "llama", "vocab_size": 1000, "dtype": "bfloat16", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = _run(program="causal_lm", model=str(tmp_path), args="--lora_r 4", dtype=dtype)
    found = memory_estimate.estimate(run, tmp_path)
    assert isinstance(found, Estimate)
    at_a_layer = 4 * (4 * (64 + 64) + 3 * (64 + 128))  # q, k, v, o; gate, up, down
    assert (found.training.trained, found.training.adapters) == (0, 2 * at_a_layer)
    assert found.training.frozen == frozen
    full = memory_estimate.estimate(run.model_copy(update={"args": ("--method", "full")}), tmp_path)
    assert isinstance(full, Estimate)
    assert (full.training.trained, full.training.adapters, full.training.frozen) == (None, 0, 4)


def test_options_in_a_file_and_changes_of_the_configuration_count(bert: Path) -> None:
    changes = "attention_probs_dropout_prob=0.0,hidden_dropout_prob=none,num_key_value_heads=2,is_decoder=no"
    (bert / "options.json").write_text(json.dumps({"config_overrides": changes, "max_seq_length": 9999}))
    found = memory_estimate.estimate(_run(model=str(bert), args=["options.json"]), bert)
    assert isinstance(found, Estimate)
    assert found.model.layout is not None
    assert not found.model.layout.attention_dropout
    assert found.model.layout.keys == 2 * 16
    assert found.training.length == 128  # what the model takes


LLAMA = BERT | {"model_type": "llama"}


@pytest.mark.parametrize(
    ("program", "args", "length"),
    [
        ("causal_lm", "--max_seq_length 4096 --rope_scaling yarn", 4096),
        ("causal_lm", "", 128),
        ("causal_lm", "--config_overrides max_position_embeddings=2048", 1024),
        ("question_answering", "", 128),
        ("question_answering", "--config_overrides max_position_embeddings=2048", 384),
    ],
)
def test_tokens_of_a_step_are_those_that_the_recipe_takes(
    tmp_path: Path, program: str, args: str, length: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = memory_estimate.estimate(_run(program=program, model=str(tmp_path), args=args), tmp_path)
    assert isinstance(found, Estimate)
    assert found.training.length == length


@pytest.mark.parametrize(
    ("args", "nodes", "ways", "excluded"),
    [
        ("", 4, ("no", "full"), None),
        ("", 1, ("no",), None),
        ("--shard full", 1, ("no",), None),
        ("--shard hybrid", 4, ("hybrid",), None),
        ("--method dora", 4, ("no",), "--method dora"),
        ("--from_scratch", 4, ("no",), "--from_scratch"),
        ("--from_scratch False", 4, ("no", "full"), None),
        ("--adafactor", 4, ("no",), "--optim adafactor"),
        ("--adafactor no", 4, ("no", "full"), None),
        ("--torch_compile_mode default", 4, ("no",), "--torch_compile"),
        ("--torch_compile False", 4, ("no", "full"), None),
        ("--gradient_compression bf16", 4, ("no",), "--gradient_compression"),
        ("--fsdp full_shard", 4, ("no",), "--fsdp"),
        ("--config_overrides model_type=bloom", 4, ("no",), None),
        ("--config_overrides model_type=bloom --shard full", 4, ("full",), None),
    ],
)
def test_auto_shards_only_what_the_ranks_would(
    tmp_path: Path, args: str, nodes: int, ways: tuple[str, ...], excluded: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    _write_weights(tmp_path / "model.safetensors", {"model.layers.0.w": [64, 64]})
    run = _run(program="causal_lm", model=str(tmp_path), args=args, nnodes=nodes)
    found = memory_estimate.estimate(run, tmp_path)
    assert isinstance(found, Estimate)
    assert (found.ways, found.excluded) == (ways, excluded)


def test_adapters_leave_a_model_of_unknown_layout_frozen(tmp_path: Path) -> None:
    config = {"model_type": "mpt", "d_model": 64, "n_layers": 2, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _write_weights(tmp_path / "model.safetensors", {"transformer.blocks.0.w": [64, 64]})
    found = memory_estimate.estimate(_run(program="causal_lm", model=str(tmp_path), dtype="bf16"), tmp_path)
    assert isinstance(found, Estimate)
    assert (found.training.trained, found.training.frozen) == (0, memory_plan.HALF)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"program": "hogwild"}, "the memory of hogwild is not known"),
        ({"model": "hf://google-bert/bert-base-uncased"}, "is not a folder here"),
        ({}, "there is none"),
    ],
)
def test_what_is_not_known_is_said(tmp_path: Path, fields: dict[str, Any], why: str) -> None:
    found = memory_estimate.estimate(_run(**fields), tmp_path)
    assert isinstance(found, str)
    assert why in found
    assert isinstance(memory_estimate.estimate(_run(**fields), tmp_path, 10**9), Estimate)


def _found(memory: int, **fields: Any) -> list[Finding]:
    estimate = Estimate(model=LARGE, training=STEP, **{"nodes": 1, "processes": 1, "shard": "auto", **fields})
    return [*memory_estimate.findings(estimate, memory * GIB, "run.resources.memory")]


@pytest.mark.parametrize(
    ("memory", "fields", "field", "fix"),
    [
        (64, {}, "run.nnodes", "Set run.nnodes to 4"),
        (64, {"shard": "no"}, "run.nnodes", "Add --shard full to run.args and set run.nnodes to 4"),
        (64, {"shard": "no", "nodes": 8}, "run.args", "Add --shard full to run.args"),
        (200, {"shard": "no", "processes": 2}, "run.args", ", or set run.nproc_per_node to 1"),
        (8, {}, "run.resources.memory", "No number of such nodes fits"),
        (
            64,
            {"shard": "no", "nodes": 8, "excluded": "--method dora"},
            "run.resources.memory",
            ", or leave out --method dora, which excludes sharding",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_what_would(
    memory: int, fields: dict[str, Any], field: str, fix: str
) -> None:
    (found,) = _found(memory, **fields)
    assert found.fatal
    assert found.field == field
    assert fix in found.fix


def test_what_lacks_only_the_spare_part_is_warned_of() -> None:
    needed = memory_plan.replica(LARGE, STEP).total
    estimate = Estimate(model=LARGE, training=STEP, nodes=1, processes=1, shard="no")
    (found,) = memory_estimate.findings(estimate, int(needed * 1.05), "run.resources.memory")
    assert not found.fatal
    assert not [*memory_estimate.findings(estimate, int(needed * 1.12), "run.resources.memory")]


def test_what_fits_is_not_mentioned() -> None:
    assert _found(256) == _found(64, nodes=4) == []


def test_the_table_has_every_part_and_whether_it_fits() -> None:
    estimate = Estimate(model=LARGE, training=STEP, nodes=2, processes=1)
    rows = {row.name: row for row in memory_estimate.rows(estimate, 64 * GIB)}
    assert rows["parameters"].replica == "29.8 GiB"
    assert rows["parameters"].sharded == "14.9 GiB"
    assert rows["fits"].replica == "no, on no number of nodes"
    assert rows["fits"].sharded == "no: 4 nodes would"
    named = replace(estimate, model=replace(LARGE, layout=None, block=0))
    rows = {row.name: row for row in memory_estimate.rows(named, 64 * GIB)}
    assert rows["fits"].sharded.startswith("no: at least ")
    rows = {row.name: row for row in memory_estimate.rows(named, 2048 * GIB)}
    assert rows["fits"].replica == "yes, without what is not counted"
    rows = {row.name: row for row in memory_estimate.rows(replace(estimate, excluded="--fsdp"), 512 * GIB)}
    assert rows["fits"].replica == "yes"
    assert rows["fits"].sharded == "no: --fsdp excludes it"
