"""What is wrong with records and model folders, as it is seen without torch and transformers."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.tiny_llama import lines, sums

from manycpu.pipeline.recipes.causal_lm import records
from manycpu.pipeline.recipes.causal_lm.generate import TEMPLATE, write_model
from manycpu.pipeline.recipes.causal_lm.preflight import findings
from manycpu.pipeline.recipes.causal_lm.records import Columns
from manycpu.pipeline.spec import recipe_options
from manycpu.pipeline.spec.errors import BadInputError

TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
]


def found(
    *args: str, data: Path | None = None, model: Path | None = None
) -> list[tuple[str, str, str, bool]]:
    options = recipe_options.read(args)
    listed = findings(data, model, options)
    return [(each.field, each.message, each.fix, each.fatal) for each in listed]


def render(settings: Mapping[str, Any]) -> records.Render:
    made = records.renderer(settings)
    assert made is not None
    return made


@pytest.mark.parametrize("text", ['[{"a": 1}]', '\n \n[{"a": 1}]', '{"a": 1}\n', '\n{"a": 1}\n\n'])
def test_empty_lines_hold_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.json").write_text(text)
    assert [*records.read(tmp_path / "train.json")] == [{"a": 1}]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "a", "answer": "b"}, "has none of the columns text, .*; it has question, answer"),
        ({"text": 5}, "record 2: its text is no text"),
        ({"prompt": "a", "completion": " "}, "record 2: its completion is empty"),
        ({"messages": [{"role": "user", "content": "a"}]}, "record 2: it has no answer of an assistant"),
        ({"messages": [{"role": "user"}]}, "record 2: a message of it has no role or no content"),
    ],
)
def test_a_record_that_cannot_be_trained_on_is_named(tmp_path: Path, record: Any, message: str) -> None:
    kind = Columns().kind(record)
    good = {"messages": {"messages": TALK}, "completion": sums(1)[0], "text": {"text": "a"}, None: record}
    lines(tmp_path / "train.jsonl", [good[kind], record])
    with pytest.raises(BadInputError, match=message) as caught:
        records.check(tmp_path, Columns())
    assert caught.value.field == "run.data"


def test_columns_have_the_names_that_the_options_give(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", [{"input": "a", "output": "b"}])
    assert [field for field, *_ in found(data=tmp_path)] == ["run.data"]
    assert found("--prompt_column", "input", "--completion_column=output", data=tmp_path) == []


def test_renamed_columns_come_before_others() -> None:
    present = ["prompt", "completion", "story"]
    assert (Columns().kind(present), Columns(text="story").kind(present)) == ("completion", "text")


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(BadInputError, match=r"train\.jsonl, line 2 is not JSON"):
        records.check(tmp_path, Columns())


def test_parquet_is_checked_by_its_columns(tmp_path: Path) -> None:
    from datasets import Dataset  # type: ignore[import-untyped]

    Dataset.from_list([{"question": "a"}]).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(BadInputError, match="it has question"):
        records.check(tmp_path, Columns())


def test_splits_are_known_by_their_names(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "train-1.jsonl", "dev.jsonl", "notes.txt"):
        (tmp_path / name).write_text("{}\n")
    assert {split: [file.name for file in files] for split, files in records.splits(tmp_path).items()} == {
        "train": ["train-0.jsonl", "train-1.jsonl"],
        "validation": ["dev.jsonl"],
    }


def test_answers_are_found_in_what_the_template_writes() -> None:
    text, spans = records.answer_spans(TALK, render({"chat_template": TEMPLATE}), "record 1")
    assert [text[begin:end] for begin, end in spans] == ["b<|end|>", "c<|end|>"]


def test_answers_are_found_where_a_template_writes_the_last_turn_in_another_way() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]"
        "{% if loop.last %}(thought){% endif %}{{ m.content }}|{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    text, spans = records.answer_spans(TALK, render({"chat_template": template}), "record 1")
    assert [text[begin:end] for begin, end in spans] == ["b|", "c|"]
    assert spans[0][0] == text.index("[assistant]") + len("[assistant]")


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{{ m.content }}"
    "{% else %}{{ m.content | trim }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("answer", ["a", "is", "Paris", "- x\n", "<|end|>", "assistant"])
def test_an_answer_is_found_where_its_words_stand_in_the_template_too(answer: str) -> None:
    talk = [TALK[0], {"role": "assistant", "content": answer}, *TALK[2:]]
    text, spans = records.answer_spans(talk, render({"chat_template": THINKS}), "record 1")
    assert [text[begin:end] for begin, end in spans] == [
        f"{answer.strip()}<|end|>\n",
        "<think></think>c<|end|>\n",
    ]


@pytest.mark.parametrize(
    ("written", "answer"),
    [("{{ m.content if m.role == 'user' }}", "a"), ("{{ m.content[:3] }}", "assist")],
)
def test_an_answer_that_is_cut_off_is_not_found_in_the_header(written: str, answer: str) -> None:
    template = "{% for m in messages %}[{{ m.role }}]" + written + "|{% endfor %}"
    talk = [TALK[0], {"role": "assistant", "content": answer}]
    with pytest.raises(BadInputError, match="cuts off or changes the answer"):
        records.answer_spans(talk, render({"chat_template": template}), "record 1")


def test_the_header_of_an_answer_that_opens_a_conversation_is_no_part_of_it() -> None:
    text, spans = records.answer_spans(TALK[1:], render({"chat_template": TEMPLATE}), "record 1")
    assert [text[begin:end] for begin, end in spans] == ["b<|end|>", "c<|end|>"]


def test_a_key_that_only_some_messages_of_parquet_have_is_no_part_of_the_others(tmp_path: Path) -> None:
    from datasets import Dataset

    model = write_model(tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    calls = "{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}"
    template = "{% for m in messages %}" + calls + "{{ m.role }}{{ m.content }}|{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    talks = [{"messages": [*TALK[:3], TALK[3] | {"tool_calls": ["f"]}]}, {"messages": TALK}]
    Dataset.from_list(talks).to_parquet(tmp_path / "train.parquet")
    assert found(data=tmp_path / "train.parquet", model=model) == []


def test_what_a_template_refuses_is_named_with_its_words(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}"
        "{{ m.role }}{{ m.content }}{% endfor %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    data = lines(tmp_path / "train.jsonl", [{"messages": [{"role": "system", "content": "x"}, *TALK]}])
    ((field, message, _, fatal),) = found(data=data, model=model)
    assert (field, fatal) == ("run.data", True)
    assert "record 1: the chat template refuses its messages: no system, please" in message


def test_an_answer_that_the_template_cuts_off_is_found(tmp_path: Path) -> None:
    data = lines(tmp_path / "data" / "train.jsonl", [{"messages": TALK}])
    model = write_model(tmp_path / "model")
    assert found(data=data, model=model) == []
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}{{ m.role }}{{ m.content if m.role == 'user' }}{% endfor %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    ((field, message, _, fatal),) = found(data=data, model=model)
    assert (field, fatal) == ("run.model", True)
    assert "cuts off or changes the answer" in message


def test_lora_targets_are_compared_with_the_weights(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    model = write_model(tmp_path / "model")
    names = ("q_proj", "v_proj")
    head = {"lm_head.weight": torch.zeros(2, 2)}
    layers = {f"model.layers.0.self_attn.{name}.weight": torch.zeros(2, 2) for name in names}
    save_file(layers | head | {"model.embed_tokens.weight": torch.zeros(2, 2)}, model / "model.safetensors")
    assert found("--lora_target_modules", "q_proj", "lm_head", model=model) == []
    assert found("--lora_target_modules", "q_proj", "v_proj", model=model) == []
    ((field, message, fix, _),) = found("--lora_target_modules", "q_proj", "vproj", model=model)
    assert field == "run.args"
    assert "no layer 'vproj' for --lora_target_modules; it has lm_head, q_proj, v_proj" in message
    assert fix == "Did you mean 'v_proj'?"
    (tmp_path / "options.json").write_text(json.dumps({"lora_target_modules": ["vproj"]}))
    assert [each[2] for each in found(str(tmp_path / "options.json"), model=model)] == [fix]


def test_a_head_that_shares_its_weights_is_found_if_adapters_are_merged(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    model = write_model(tmp_path / "model")
    save_file({"model.layers.0.q_proj.weight": torch.zeros(2, 2)}, model / "model.safetensors")
    words = ("--lora_target_modules", "q_proj", "lm_head")
    ((field, message, _, _),) = found(*words, model=model)
    assert field == "run.args"
    assert "shares the weights of its embeddings" in message
    assert found(*words, "--merge_adapter", "False", model=model) == []


def test_a_tokenizer_without_a_pad_token_is_found_if_batches_are_padded(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert found(model=model) == []
    assert found("--packing", "False", "--pad_token", "<|end|>", model=model) == []
    ((field, message, fix, _),) = found("--packing", "False", model=model)
    assert field == "run.model"
    assert "has no pad token" in message
    assert "--pad_token '<|end|>'" in fix


def test_the_checks_import_neither_torch_nor_transformers() -> None:
    code = "import sys, manycpu.pipeline.recipes.causal_lm.preflight as _; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "datasets", "pyarrow", "jinja2"} & set(done.stdout.split())
