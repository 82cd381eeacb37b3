"""The recipe causal_lm from end to end, with a tiny random model."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset  # type: ignore[import-untyped]
from safetensors.torch import load_file, save_file
from support.recipe_ranks import WarmNode
from support.tiny_llama import lines, run, sums, tiny_checkpoint, tiny_env
from tokenizers.processors import TemplateProcessing
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from manycpu.pipeline.recipes import checkpoints
from manycpu.pipeline.recipes.causal_lm import inputs, training
from manycpu.pipeline.recipes.causal_lm.inputs import Documents
from manycpu.pipeline.recipes.causal_lm.options import parse
from manycpu.pipeline.recipes.causal_lm.packing import IGNORED
from manycpu.pipeline.spec.errors import BadInputError

pytestmark = [
    # torch's own: its export of a scheduler's state, and the loader's advice on processes.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    # peft asks transformers by a name that is to end with version 6.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]
TALK = [
    {"role": "user", "content": "Say b."},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "Again"},
    {"role": "assistant", "content": "bb"},
]
FULL = ("--method", "full", "--learning_rate", "1e-2")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture
def env(tmp_path: Path, llama: Path) -> dict[str, str]:
    return tiny_env(tmp_path, llama)


def weights(folder: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(torch.tensor([[7, 8, 9, 10, 11]])).logits
    return found


def test_lora_trains_and_leaves_adapter_and_merged_model(env: dict[str, str], llama: Path) -> None:
    env = env | {"MANYCPU_MODEL_NAME": "hf://owner/llama@feature%2Fx"}
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    found = run(env, "--learning_rate", "1e-2", "--num_train_epochs", "6")
    output = Path(env["MANYCPU_OUTPUT"])
    assert found["eval_loss"] < 5.3  # the frozen layers know nothing: it began with 5.6
    assert found["eval_perplexity"] == pytest.approx(torch.tensor(found["eval_loss"]).exp().item(), rel=1e-5)
    names = {str(file.relative_to(output)) for file in output.rglob("*") if file.is_file()}
    assert names == {
        *("README.md", "all_results.json", "samples.jsonl", "config.json", "generation_config.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
        *("adapter/tokenizer.json", "adapter/tokenizer_config.json", "adapter/chat_template.jinja"),
    }
    merged = AutoModelForCausalLM.from_pretrained(output)
    base = AutoModelForCausalLM.from_pretrained(llama)
    untrained = logits(base)
    adapted = PeftModel.from_pretrained(base, output / "adapter")
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-4)
    assert (logits(merged) - untrained).abs().max() > 0.01
    assert "manycpu_documents" not in (output / "config.json").read_text()
    (sample,) = map(json.loads, (output / "samples.jsonl").read_text().splitlines())
    assert sample["prompt"] == sums(1, 100)[0]["prompt"]
    card = (output / "README.md").read_text()
    assert "lora, rank 16, alpha 32, of all-linear" in card
    assert "\nbase_model: owner/llama\n" in card
    described = json.loads((output / "adapter" / "adapter_config.json").read_text())
    assert (described["base_model_name_or_path"], described["revision"]) == ("owner/llama", "feature/x")
    assert "- `train.jsonl`, sha256 " in card


def test_a_full_training_learns_the_answers(env: dict[str, str]) -> None:
    found = run(env, *FULL, "--num_train_epochs", "30")
    assert found["eval_loss"] < 0.5
    (sample,) = map(json.loads, (Path(env["MANYCPU_OUTPUT"]) / "samples.jsonl").read_text().splitlines())
    assert sample["generated"].startswith(" b")
    assert not (Path(env["MANYCPU_OUTPUT"]) / "adapter").exists()


@pytest.mark.parametrize("method", ["dora", "lora"])
def test_bf16_adapters_keep_frozen_weights_as_the_checkpoint_has_them(
    env: dict[str, str], tmp_path: Path, llama: Path, method: str
) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).save_pretrained(tmp_path / "bf16")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / name, tmp_path / "bf16")
    found = run(
        env | {"MANYCPU_MODEL": str(tmp_path / "bf16"), "MANYCPU_DTYPE": "bf16"},
        *("--method", method, "--learning_rate", "1e-2", "--max_steps", "20"),
    )
    assert found["eval_loss"] < 5.5
    assert {tensor.dtype for tensor in weights(env["MANYCPU_OUTPUT"]).values()} == {torch.bfloat16}


def test_merging_takes_no_second_copy_of_the_model(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_checkpoint(tmp_path / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=24)
    half = {name: weight.bfloat16() for name, weight in weights(model).items()}
    save_file(half, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    before = []

    def _no_samples(*_: Any) -> list[Any]:
        before.append(_memory("VmRSS"))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        return []

    monkeypatch.setattr(training, "_samples", _no_samples)  # what comes before the merging
    settings = {"MANYCPU_MODEL": str(model), "MANYCPU_DTYPE": "bf16"}
    shutil.rmtree(env["MANYCPU_DATA"])
    lines(Path(env["MANYCPU_DATA"]) / "train.jsonl", [{"text": "a short text"}])
    run(env | settings, "--max_steps", "1", "--learning_rate", "1e-2", "--max_seq_length", "32")
    size = 2 * sum(weight.numel() for weight in half.values())
    assert _memory("VmHWM") - before[0] < size / 2
    name = "model.layers.5.mlp.up_proj"
    adapter = load_file(Path(env["MANYCPU_OUTPUT"]) / "adapter" / "adapter_model.safetensors")
    lora_a, lora_b = (adapter[f"base_model.model.{name}.lora_{each}.weight"] for each in "AB")
    expected = half[f"{name}.weight"].float() + 2 * (lora_b @ lora_a)  # alpha 32, rank 16
    assert torch.equal(weights(env["MANYCPU_OUTPUT"])[f"{name}.weight"], expected.bfloat16())


def _memory(name: str) -> int:
    """Read a number of bytes from the status of this process."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) * 1024


def test_a_retry_resumes_where_an_unbroken_training_ends_the_same(
    env: dict[str, str], tmp_path: Path
) -> None:
    steps = ("--max_steps", "6", "--save_steps", "3", "--max_seq_length", "96")
    run(env, *steps)
    whole = weights(env["MANYCPU_OUTPUT"])
    folder = Path(env["MANYCPU_CHECKPOINTS"])
    assert checkpoints.fault(folder / "checkpoint-6") is None
    adapter = folder / "checkpoint-6" / "adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-1])
    assert checkpoints.fault(folder / "checkpoint-6") == "adapter_model.safetensors is cut short or damaged"
    found = run(env | {"MANYCPU_OUTPUT": str(tmp_path / "again")}, *steps)
    assert found["resumed_from_step"] == 3
    resumed = weights(tmp_path / "again")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_checkpoint_of_larger_steps_is_resumed_at_its_epoch(env: dict[str, str], tmp_path: Path) -> None:
    """As with another number of ranks: a step takes other samples than before."""
    epochs = (*FULL, "--num_train_epochs", "3", "--save_strategy", "epoch", "--max_seq_length", "96")
    large = run(env, *epochs, "--per_device_train_batch_size", "8")
    first = checkpoints.latest_first(Path(env["MANYCPU_CHECKPOINTS"]))[-1]
    other = {"MANYCPU_OUTPUT": str(tmp_path / "again"), "MANYCPU_CHECKPOINTS": str(tmp_path / "more")}
    small = (*epochs, "--per_device_train_batch_size", "2")
    resumed = run(env | other | {"MANYCPU_RESUME_FROM": str(first)}, *small)
    unbroken = run(env | {name: f"{path}-whole" for name, path in other.items()}, *small)
    assert resumed["train_steps"] == unbroken["train_steps"] > large["train_steps"]
    last, state = tmp_path / "more" / f"checkpoint-{resumed['train_steps']}", "trainer_state.json"
    assert json.loads((last / state).read_text())["epoch"] == 3
    assert torch.load(last / "scheduler.pt")["last_epoch"] == resumed["train_steps"]


def test_with_max_steps_a_retry_with_smaller_steps_resumes_from_the_last_step(env: dict[str, str]) -> None:
    """As after a resume with fewer ranks: the later checkpoint is of a smaller epoch."""
    steps = (*FULL, "--save_steps", "2", "--max_seq_length", "96", "--per_device_train_batch_size")
    run(env, "--max_steps", "4", *steps, "4")
    assert run(env, "--max_steps", "6", *steps, "1")["resumed_from_step"] == 4
    assert run(env, "--max_steps", "8", *steps, "1")["resumed_from_step"] == 6


def test_options_that_leave_no_step_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(BadInputError, match="no step was trained"):
        run(env, *FULL, "--num_train_epochs", "0")


def test_an_adapter_of_a_stretched_model_has_its_configuration(env: dict[str, str]) -> None:
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    words = ("--rope_scaling", "linear", "--max_seq_length", "400", "--max_steps", "1")
    run(env, *words, "--learning_rate", "1e-2")
    output = Path(env["MANYCPU_OUTPUT"])
    config = AutoConfig.from_pretrained(output / "adapter")
    base = AutoModelForCausalLM.from_pretrained(env["MANYCPU_MODEL"], config=config)
    adapted = logits(PeftModel.from_pretrained(base, output / "adapter"))
    assert torch.allclose(adapted, logits(AutoModelForCausalLM.from_pretrained(output)), atol=1e-5)


def test_packed_and_padded_trainings_of_the_same_steps_agree(env: dict[str, str], tmp_path: Path) -> None:
    """One step over all documents: sequences or padded rows, the gradient is the same."""
    common = (*FULL, "--max_steps", "1", "--optim", "sgd", "--train_sampling_strategy", "sequential")
    packed = run(env, *common, "--per_device_train_batch_size", "24")
    first = weights(env["MANYCPU_OUTPUT"])
    other = env | {"MANYCPU_OUTPUT": str(tmp_path / "padded"), "MANYCPU_CHECKPOINTS": str(tmp_path / "c")}
    accumulated = ("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "6")
    padded = run(other, *common, "--packing", "False", *accumulated)
    assert padded["train_loss"] == pytest.approx(packed["train_loss"], rel=1e-5)
    assert padded["eval_loss"] == pytest.approx(packed["eval_loss"], rel=1e-5)
    second = weights(other["MANYCPU_OUTPUT"])
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-5, atol=1e-6)


def test_activation_checkpointing_changes_no_result(env: dict[str, str], tmp_path: Path) -> None:
    steps = ("--max_steps", "2", "--learning_rate", "1e-2")
    run(env, *steps)
    other = env | {"MANYCPU_OUTPUT": str(tmp_path / "a"), "MANYCPU_CHECKPOINTS": str(tmp_path / "c")}
    run(other, *steps, "--activation_checkpointing", "True")
    first, second = weights(env["MANYCPU_OUTPUT"]), weights(tmp_path / "a")
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


def test_early_stopping_keeps_the_best_model(env: dict[str, str], tmp_path: Path) -> None:
    options = (*FULL, "--learning_rate", "10", "--num_train_epochs", "9", "--early_stopping_patience", "1")
    found = run(env, *options)
    state = json.loads(
        max(Path(env["MANYCPU_CHECKPOINTS"]).glob("*/trainer_state.json"), key=os.path.getmtime).read_text()
    )
    assert found["train_steps"] < 9 * found["train_steps"] / state["epoch"]
    assert found["eval_loss"] == pytest.approx(state["best_metric"], rel=1e-5)
    again = run(env | {"MANYCPU_OUTPUT": str(tmp_path / "again")}, *options)  # as after a failed export
    assert again["resumed_from_step"] == again["train_steps"] == found["train_steps"]
    assert again["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-5)
    last = Path(env["MANYCPU_CHECKPOINTS"], f"checkpoint-{found['train_steps']}")
    folders = {"MANYCPU_CHECKPOINTS": str(tmp_path / "own"), "MANYCPU_OUTPUT": str(tmp_path / "of_other")}
    other = run(env | folders | {"MANYCPU_RESUME_FROM": str(last)}, *options)
    assert other["train_steps"] > found["train_steps"]  # it counts its own evaluations alone


def test_early_stopping_begins_to_count_where_a_checkpoint_has_no_count(env: dict[str, str]) -> None:
    epochs = (*FULL, "--save_strategy", "epoch", "--num_train_epochs")
    first = run(env, *epochs, "1")
    found = run(env, *epochs, "2", "--early_stopping_patience", "1")
    assert found["train_steps"] == 2 * first["train_steps"]


def test_conversations_are_trained_on_their_answers_alone(env: dict[str, str], tmp_path: Path) -> None:
    data = lines(tmp_path / "talks" / "train.jsonl", [{"messages": TALK}] * 8)
    found = run(env | {"MANYCPU_DATA": str(data)}, *FULL, "--num_train_epochs", "20")
    # Answers and the ends of turns are easy; the questions would be as easy, but are not counted.
    assert found["eval_loss"] < 0.5
    cached = next(Path(env["MANYCPU_OUTPUT"]).with_name("cache").rglob("*.arrow"), None)
    assert cached is not None


def test_a_conversation_that_an_answer_opens_has_a_sample(env: dict[str, str], tmp_path: Path) -> None:
    data = lines(
        tmp_path / "talks" / "train.jsonl", [{"messages": [{"role": "assistant", "content": "b"}]}] * 4
    )
    run(env | {"MANYCPU_DATA": str(data)}, *FULL, "--max_steps", "1")
    (sample,) = map(json.loads, (Path(env["MANYCPU_OUTPUT"]) / "samples.jsonl").read_text().splitlines())
    assert sample["prompt"] == "<|assistant|>"


def documents(found: list[dict[str, Any]], tokenizer: Any, *words: str) -> Documents:
    """Prepare records without training on them."""
    data = parse(words, {"MANYCPU_MODEL": "model", "MANYCPU_OUTPUT": "output"}).data
    return inputs.prepare({"train": Dataset.from_list(found)}, data, tokenizer, 128)["train"]


def test_records_without_tokens_are_passed_over_as_samples(llama: Path) -> None:
    texts = [{"text": text} for text in ("", "abcd", "", "efgh")]
    tokenizer = AutoTokenizer.from_pretrained(llama)
    assert [text for text, _ in documents(texts, tokenizer).prompts] == ["abc", "efg"]
    answers = [{"prompt": prompt, "completion": " b"} for prompt in ("", "q", "r")]
    assert [text for text, _ in documents(answers, tokenizer, "--samples", "1").prompts] == ["q"]


@pytest.mark.parametrize(("sample_tokens", "kept"), [(28, 100), (127, 64)])
def test_the_end_of_a_long_prompt_is_a_sample(llama: Path, sample_tokens: int, kept: int) -> None:
    records = [{"prompt": "x" * 200 + "y", "completion": " b"}, *sums(2)]
    tokenizer = AutoTokenizer.from_pretrained(llama)
    (_, ids), *_ = documents(records, tokenizer, "--sample_tokens", str(sample_tokens)).prompts
    assert tokenizer.decode(ids) == "x" * (kept - 1) + "y"


@pytest.mark.parametrize("record", [{"messages": TALK}, sums(1)[0], {"text": "abcdefgh"}])
def test_a_sample_begins_as_its_document(llama: Path, record: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    begin = ("<|system|>", tokenizer.convert_tokens_to_ids("<|system|>"))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin[0]} $A", special_tokens=[begin]
    )
    found = documents([record], tokenizer)
    (_, ids), *_ = found.prompts
    assert ids == found.table[0]["input_ids"][: len(ids)]


@pytest.mark.parametrize(
    "others",
    [
        {"prompt": "2020-01-01T00:00:00", "completion": "2020-01-02"},
        {"messages": [{"role": role, "content": "2020-01-01"} for role in ("user", "assistant")]},
        {},
    ],
)
def test_texts_that_are_all_dates_are_texts(
    env: dict[str, str], tmp_path: Path, others: dict[str, Any]
) -> None:
    found = [others or {"text": f"2020-01-0{day}"} for day in range(1, 4)]
    data = lines(tmp_path / "dates" / "train.jsonl", found)
    options = parse(["--validation_split_percentage", "0", "--cache_dir", str(tmp_path / "cache")], env)
    splits = inputs.read_data(options.model, options.data, env | {"MANYCPU_DATA": str(data)}, 1)
    assert splits["train"].to_list() == found


@pytest.mark.parametrize("after", ["", "\n"])
def test_the_token_that_begins_the_next_turn_is_no_part_of_an_answer(llama: Path, after: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", f"<|end|>{after}")
    found = documents([{"messages": TALK}], tokenizer).table[0]["labels"]
    trained_on = tokenizer.decode([label for label in found if label != IGNORED])
    assert trained_on == f"b<|end|>{after}bb<|end|>{after}"


def test_a_token_that_a_template_writes_after_a_turn_ends_it(llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|end|>' if not loop.first }}{{ m.content }}{% endfor %}"
        "{{ '<|end|>' if add_generation_prompt }}"
    )
    found = documents([{"messages": TALK}], tokenizer).table[0]["labels"]
    assert tokenizer.decode([label for label in found if label != IGNORED]) == "b<|end|>bb"


def test_a_model_whose_sampling_flags_lack_do_sample_can_be_saved(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    options = parse([], {"MANYCPU_MODEL": str(tmp_path / "model"), "MANYCPU_OUTPUT": "output"})
    config, _ = inputs.read_config(options.model)
    model: Any = inputs.load_model(options.model, config, options.training, 128)
    model.generation_config.pad_token_id = 0  # as the Trainer aligns it with the tokenizer
    model.save_pretrained(tmp_path / "saved")
    assert (model.generation_config.do_sample, model.generation_config.temperature) == (True, 0.6)


def test_a_sample_that_fails_is_left_out(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = parse([], {"MANYCPU_MODEL": str(llama), "MANYCPU_OUTPUT": "output"})
    tokenizer = AutoTokenizer.from_pretrained(llama)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "n_positions": 8,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
    }
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    with_prompt = Documents(Dataset.from_list([]), [("abc", [7, 8, 9])])
    found = training._samples(  # noqa: SLF001 - all but the training
        options, GPT2LMHeadModel(config), tokenizer, {"train": with_prompt}
    )
    assert found == []
    assert "a sample of 3 tokens is left out: " in capsys.readouterr().err


def test_two_ranks_train_and_evaluate_as_one(env: dict[str, str], tmp_path: Path) -> None:
    """Two processes that meet by gloo, through the command; and this process."""
    from manycpu.pipeline.cli import main

    words = [*FULL, "--optim", "sgd", "--max_steps", "2", "--max_seq_length", "96"]
    words += ["--train_sampling_strategy", "sequential", "--samples", "1", "--sample_tokens", "4"]
    output = tmp_path / "two"
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                main.__module__,
                "run",
                "--program",
                "causal_lm",
                "--nproc-per-node",
                "2",
            ),
            *("--data", env["MANYCPU_DATA"], "--model", env["MANYCPU_MODEL"], "--output", str(output)),
            *("--backend", "gloo", "--oversubscribe", "true", "--dtype", "fp32"),
            *("--args", shlex.join([*words, "--per_device_train_batch_size", "1"])),
        ],
        env=os.environ | {"MANYCPU_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((output / "all_results.json").read_text())
    expected = run(env | {"MANYCPU_DTYPE": "fp32"}, *words, "--per_device_train_batch_size", "2")
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
    one, two = weights(env["MANYCPU_OUTPUT"]), weights(output)
    assert all(torch.allclose(one[name], two[name], rtol=1e-4, atol=1e-6) for name in one)
    report = json.loads((output / "report.json").read_text())
    assert report["world_size"] == 2
    assert sums(1, 100)[0]["prompt"] in report["metrics"]["sample_1"]


def bad(message: str, field: str, *words: str, **changed: Any) -> Any:
    return pytest.param(message, field, words, changed, id=message[:30])


@pytest.mark.parametrize(
    ("message", "field", "words", "changed"),
    [
        bad("has none of the columns", "run.data", data=[{"question": "a", "answer": "b"}]),
        bad(
            "record 2: its completion is empty",
            "run.data",
            data=[*sums(1), {"prompt": "a", "completion": ""}],
        ),
        bad("no layer 'vproj' .*v_proj", "run.args", "--lora_target_modules", "q_proj", "vproj"),
        bad("shares the weights of its emb", "run.args", "--lora_target_modules", "q_proj", "lm_head"),
        bad("--hub_token is written into each checkpoint", "run.args", "--hub_token", "hf_x"),
        bad("no pad token", "run.model", "--packing", "False", settings={"pad_token": None}),
        bad("more than the model's 128 positions", "run.args", "--max_seq_length", "129"),
        bad("no answer begins within 8 tokens in the train split", "run.data", "--max_seq_length", "8"),
        bad(
            "template cuts off or changes the answer 'secret'",
            "run.model",
            data=[
                {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "secret"}]}
            ],
            settings={"chat_template": "{{ messages[0]['content'] }}"},
        ),
        bad(
            "has no chat template",
            "run.model",
            data=[{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
            settings={"chat_template": None},
        ),
        bad("cannot be loaded", "run.model", weights=None),
    ],
)
def test_bad_input_is_found_with_its_field_before_the_training(
    env: dict[str, str], tmp_path: Path, llama: Path, message: str, field: str, words: Any, changed: Any
) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    if "settings" in changed:
        file = model / "tokenizer_config.json"
        settings = json.loads(file.read_text()) | changed["settings"]
        file.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    if "weights" in changed:
        (model / "model.safetensors").unlink()
    if "data" in changed:
        env["MANYCPU_DATA"] = str(lines(tmp_path / "bad" / "train.jsonl", changed["data"] * 2))
    with pytest.raises(BadInputError, match=message) as caught:
        run(env | {"MANYCPU_MODEL": str(model)}, *words, "--overwrite_cache", "True")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (("--method", "full"), "is of a training by --method lora"),
        (("--method", "dora"), "is of a training by --method lora"),
        (("--lora_r", "8"), "has adapters of --lora_r 16"),
        (("--lora_target_modules", "q_proj"), "has adapters of --lora_target_modules down_proj gate_proj"),
    ],
)
def test_other_adapters_do_not_resume(env: dict[str, str], other: tuple[str, ...], message: str) -> None:
    steps = ("--max_steps", "2", "--save_steps", "1")
    run(env, *steps)
    shutil.rmtree(Path(env["MANYCPU_CHECKPOINTS"]) / "checkpoint-2")
    with pytest.raises(BadInputError, match=f"checkpoint-1 {message}"):
        run(env, *steps, *other)


def test_positions_are_stretched_for_longer_documents(env: dict[str, str], tmp_path: Path) -> None:
    data = lines(tmp_path / "long" / "train.jsonl", [{"text": "ab" * 150}] * 3)
    steps = ("--max_seq_length", "320", "--rope_scaling", "yarn", "--max_steps", "2")
    run(env | {"MANYCPU_DATA": str(data)}, *steps)
    config = json.loads((Path(env["MANYCPU_OUTPUT"]) / "config.json").read_text())
    assert config["max_position_embeddings"] == 320
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["rope_parameters"]["factor"] == 2.5
    assert config["rope_parameters"]["original_max_position_embeddings"] == 128


@pytest.mark.parametrize(
    ("method", "tied"),
    [("lora", True), *(pytest.param("full", tied, marks=pytest.mark.long) for tied in (True, False))],
)
def test_two_ranks_with_shares_train_what_replicas_train(
    warm: WarmNode, tmp_path: Path, llama: Path, method: str, *, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM

    found = {}
    base = tmp_path / "base"
    shutil.copytree(llama, base)
    AutoModelForCausalLM.from_pretrained(llama, tie_word_embeddings=tied).save_pretrained(base)
    for shard in ("no", "full"):
        env = tiny_env(tmp_path / shard, base)
        options = ["--method", method, "--shard", shard, "--num_train_epochs", "2", "--lora_dropout", "0"]
        # AdamW's first steps are signs of gradients, which noise decides where they are nearly zero.
        options += ["--train_sampling_strategy", "sequential", "--optim", "sgd", "--learning_rate", "0.1"]
        ended = warm.recipe("causal_lm", 2, env, *options)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        found[shard] = json.loads((Path(env["MANYCPU_OUTPUT"]) / "all_results.json").read_text())
    assert "samples of its text are left out" in ended.stdout + ended.stderr
    if method == "full":
        assert found["full"]["eval_loss"] == pytest.approx(found["no"]["eval_loss"], rel=1e-5)
    else:  # adapters begin at random, and another way to load draws other numbers
        assert found["full"]["eval_loss"] < 5.5
    kept = "model.safetensors" if method == "full" else "adapter/adapter_model.safetensors"
    assert (Path(env["MANYCPU_OUTPUT"]) / kept).is_file()
    shares = next(Path(env["MANYCPU_CHECKPOINTS"]).glob("checkpoint-*/sharded"))
    trained = [
        name for name in FileSystemReader(shares).read_metadata().state_dict_metadata if "model." in name
    ]
    assert all(("lora_" in name) == (method == "lora") for name in trained)
    assert (Path(env["MANYCPU_OUTPUT"]) / "model.safetensors").exists() == (method == "full")


def test_a_sharded_model_that_cannot_be_packed_trains_as_a_whole_one(
    warm: WarmNode, tmp_path: Path, llama: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, set_seed

    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    sizes: Any = {"vocab_size": len(tokenizer), "hidden_size": 32, "n_layer": 2, "n_head": 4}
    config = BloomConfig(**sizes, tie_word_embeddings=False)
    model: Any = AutoModelForCausalLM
    model.from_config(config).save_pretrained(tmp_path / "bloom")
    tokenizer.save_pretrained(tmp_path / "bloom")
    losses = []
    for shard in ("no", "full"):
        env = tiny_env(tmp_path / shard, tmp_path / "bloom")
        steps = ("--max_steps", "3", "--optim", "sgd", "--learning_rate", "0.1", "--save_strategy", "no")
        ended = warm.recipe("causal_lm", 2, env, *FULL, *steps, "--shard", shard)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        assert "--packing is left out" in ended.stdout
        losses.append(json.loads((Path(env["MANYCPU_OUTPUT"]) / "all_results.json").read_text())["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_a_head_of_its_own_is_not_tied_by_sharding(warm: WarmNode, tmp_path: Path, llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    shutil.copytree(llama, base)
    model: Any = AutoModelForCausalLM.from_pretrained(llama, tie_word_embeddings=False)
    model.lm_head.weight.data.add_(1.0)
    model.save_pretrained(base)
    words = (*FULL, "--shard", "full", "--config_overrides", "tie_word_embeddings=true")
    ended = warm.recipe("causal_lm", 2, tiny_env(tmp_path, base), *words)
    assert ended.returncode != 0
    assert "tie_word_embeddings is true, and the checkpoint has a head of its own" in ended.stdout


@pytest.mark.parametrize(
    ("words", "excluded"),
    [
        (("--method", "full", "--optim", "adafactor"), "--shard full excludes --optim adafactor"),
        (("--shard", "hybrid", "--method", "lora"), "--shard hybrid excludes adapters"),
    ],
)
def test_what_excludes_sharding_is_refused(
    env: dict[str, str], words: tuple[str, ...], excluded: str
) -> None:
    with pytest.raises(BadInputError, match=excluded):
        run(env, "--shard", "full", *words)


def test_a_retry_after_the_last_step_trains_no_other(env: dict[str, str], tmp_path: Path) -> None:
    steps = (*FULL, "--max_steps", "3", "--per_device_train_batch_size", "1", "--save_steps", "3")
    assert run(env, *steps, "--max_seq_length", "32")["train_steps"] == 3
    found = run(env | {"MANYCPU_OUTPUT": str(tmp_path / "again")}, *steps, "--max_seq_length", "32")
    assert (found["resumed_from_step"], found["train_steps"]) == (3, 3)
    assert not {"train_loss", "train_tokens_per_second"} & found.keys()
    before, after = weights(env["MANYCPU_OUTPUT"]), weights(tmp_path / "again")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
def test_random_weights_on_two_ranks_are_no_shares(warm: WarmNode, tmp_path: Path, llama: Path) -> None:
    env = tiny_env(tmp_path, llama)
    ended = warm.recipe("causal_lm", 2, env, "--from_scratch", "True", "--max_steps", "1")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    names = {path.name for path in Path(env["MANYCPU_OUTPUT"]).iterdir()}
    assert {"model.safetensors", "samples.jsonl", "adapter"} <= names
