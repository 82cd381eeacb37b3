"""The options of causal_lm, and that `manycpu preflight` makes its checks."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from support.tiny_llama import lines, sums

from manycpu.pipeline.cli import cli
from manycpu.pipeline.recipes import arguments
from manycpu.pipeline.recipes.causal_lm.generate import write_model
from manycpu.pipeline.recipes.causal_lm.options import parse
from manycpu.pipeline.spec.errors import BadInputError

TALK: Final = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
LEFT_OUT: Final = ("pad_token", "chat_template")


def test_early_stopping_evaluates_and_saves_at_the_same_steps(tmp_path: Path) -> None:
    env = {"MANYCPU_OUTPUT": str(tmp_path)}
    words = ["--early_stopping_patience", "2"]
    chosen = parse(words, env).training
    assert (chosen.eval_strategy, chosen.save_strategy) == ("epoch", "epoch")
    assert (chosen.load_best_model_at_end, chosen.metric_for_best_model) == (True, "eval_loss")
    steps = parse([*words, "--eval_strategy=steps", "--eval_steps", "5", "--save_steps", "5"], env).training
    assert (steps.eval_strategy, steps.save_strategy) == ("steps", "steps")


@pytest.mark.parametrize(
    ("flags", "words", "bf16"),
    [({"avx512_bf16"}, [], True), ({"avx512f"}, [], False), ({"avx512_bf16"}, ["--bf16", "false"], False)],
)
def test_a_run_that_names_no_format_trains_in_bf16_where_it_is_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: set[str], words: list[str], bf16: bool
) -> None:
    monkeypatch.setattr(arguments, "processor_flags", lambda: frozenset(flags))
    options = parse(words, {"MANYCPU_OUTPUT": str(tmp_path), "MANYCPU_DTYPE": "auto"})
    assert (options.training.bf16, any("run.dtype" in note for note in options.notes)) == (bf16, bf16)
    assert not parse(words, {"MANYCPU_OUTPUT": str(tmp_path), "MANYCPU_DTYPE": "fp32"}).training.bf16


def test_padded_batches_are_made_by_length_only_if_asked_for(tmp_path: Path) -> None:
    env = {"MANYCPU_OUTPUT": str(tmp_path)}
    asked = ["--packing", "False", "--train_sampling_strategy", "group_by_length"]
    assert parse(asked, env).training.train_sampling_strategy == "group_by_length"
    assert parse(asked[:2], env).training.train_sampling_strategy == "random"


@pytest.mark.parametrize(
    "words",
    [
        ["--lora_r", "0"],
        ["--max_seq_length", "0"],
        ["--validation_split_percentage", "100"],
        ["--method", "qlora"],
        ["--rope_scaling", "dynamic"],
        ["--method", "dora", "--shard", "full"],
        ["--from_scratch", "True", "--merge_adapter", "False"],
        ["--label_smoothing_factor", "0.1"],
    ],
)
def test_values_that_cannot_be_used_are_refused(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(BadInputError, match=words[0].removeprefix("--")) as caught:
        parse(words, {"MANYCPU_OUTPUT": str(tmp_path)})
    assert caught.value.field == "run.args"


@pytest.mark.parametrize(
    ("data", "words", "message"),
    [
        (sums(2), "--from_scratch", None),
        (sums(2), "--from_scratch --packing False", "run.model: the tokenizer has no pad token"),
        ([{"question": "a"}], "--from_scratch", "run.data: "),
        (sums(2), "", "model has no weights"),
        ([TALK], "--from_scratch", "run.model: the tokenizer has no chat template"),
    ],
)
def test_preflight_checks_data_and_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data: list[dict[str, Any]],
    words: str,
    message: str | None,
) -> None:
    folder, model = lines(tmp_path / "data" / "train.jsonl", data), write_model(tmp_path / "model")
    settings = model / "tokenizer_config.json"
    kept = json.loads(settings.read_text())
    settings.write_text(json.dumps({name: kept[name] for name in kept if name not in LEFT_OUT}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    monkeypatch.setenv("MANYCPU_HOME", str(tmp_path / "home"))
    options = ["--program", "causal_lm", "--data", str(folder), "--model", str(model)]
    options += ["--output", str(tmp_path / "out"), "--nproc-per-node", "1", "--args", words]
    done = CliRunner().invoke(cli, ["preflight", *options])
    if message is None:
        assert (done.exit_code, "error" in done.output) == (0, False), done.output
    else:
        assert (done.exit_code, message in done.output) == (2, True), done.output
