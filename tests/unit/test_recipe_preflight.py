"""What preflight says of a recipe's data, model and options: it refuses what the ranks would, and no more."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest
from support.recipe_checks import check_here
from support.tiny_llama import lines, sums, tiny_checkpoint

from manycpu.pipeline import recipes
from manycpu.pipeline.recipes.causal_lm import records
from manycpu.pipeline.recipes.causal_lm.generate import write_model
from manycpu.pipeline.spec.errors import BadInputError, Finding
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.preflight import preflight

ASKED: Final = {"id": "q", "question": "What is it?", "answers": []}
SQUAD_2: Final = {"data": [{"paragraphs": [{"context": "It is a pen.", "qas": [ASKED]}]}]}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYCPU_HOME", str(tmp_path / "home"))
    # A recipe's check is left out when it takes longer, as on a busy machine.
    monkeypatch.setattr("manycpu.pipeline.verbs.preflight._PARSER_TIMEOUT_S", 600.0)


def refused(folder: Path, program: str, kind: str = "local", **run: Any) -> list[Finding]:
    """Return the fatal findings that name a field of the run."""
    fields = {"program": program, "output": str(folder / "out"), "nproc_per_node": 1, **run}
    texts = {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}
    target = {"kind": kind, **({"connection": str(folder / "none")} if kind == "kubernetes" else {})}
    found = preflight(open_context(texts, target, "test", base=folder))
    return [each for each in found if each.fatal and each.field.startswith("run.")]


def said(found: list[Finding], message: str | None) -> bool:
    """Whether there is one finding, with these words; None: there is none."""
    return [message is not None and message in each.message for each in found] == [True] * bool(message)


def written(file: Path, content: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no question has an answer"),
        (["--version_2_with_negative"], None),
        (["--version_2_with_negative", "True"], None),
        (["--version_2_with_negative", "False"], "no question has an answer"),
        (["--train_file", "/data/train.json"], None),
        (["--dataset_name", "rajpurkar/squad"], None),
    ],
)
def test_questions_without_answers_are_refused_as_the_options_say(
    tmp_path: Path, args: list[str], message: str | None
) -> None:
    data = written(tmp_path / "data" / "train.json", SQUAD_2).parent
    options = [*args, "--model_name_or_path", "bert-base-uncased"]
    found = refused(tmp_path, "question_answering", data=data, args=options)
    assert said(found, message), found


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "nothing to train on: by their names, its files are of validation"),
        (["--do_train", "--do_eval"], "nothing to train on"),
        (["--do_eval"], None),
    ],
)
def test_questions_without_a_train_split_are_refused_if_the_recipe_would_train(
    tmp_path: Path, args: list[str], message: str | None
) -> None:
    data = written(tmp_path / "data" / "dev.json", SQUAD_2).parent
    options = [*args, "--version_2_with_negative", "--model_name_or_path", "bert-base-uncased"]
    found = refused(tmp_path, "question_answering", data=data, args=options)
    assert said(found, message), found


@pytest.mark.parametrize(
    ("args", "is_read"),
    [([], True), (["--train_file", "/x.jsonl"], False), (["--validation_file", "/x.jsonl"], False)],
)
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_run_data_is_judged_if_the_recipe_reads_it(
    tmp_path: Path, args: list[str], is_read: bool, prefix: str
) -> None:
    data = lines(tmp_path / "data" / "train.jsonl", [{"question": "a"}])
    model, scratch = write_model(tmp_path / "model"), ["--from_scratch", "True"]
    found = refused(tmp_path, "causal_lm", data=f"{prefix}{data}", model=model, args=[*scratch, *args])
    assert [each.field for each in found] == (["run.data"] if is_read else [])


@pytest.mark.parametrize(("args", "is_read"), [([], True), (["--model_name_or_path", "x/other"], False)])
@pytest.mark.parametrize("prefix", ["", "file://"])
def test_run_model_is_judged_if_the_recipe_reads_it(
    tmp_path: Path, args: list[str], is_read: bool, prefix: str
) -> None:
    data = lines(tmp_path / "data" / "train.jsonl", sums(3))
    model = f"{prefix}{write_model(tmp_path / 'model')}"  # without weights
    found = refused(tmp_path, "causal_lm", data=data, model=model, args=args)
    assert [each.field for each in found] == (["run.model"] if is_read else [])


GOOD: Final = "".join(json.dumps(record) + "\n" for record in sums(6))
EMPTY: Final = '{"prompt": "a", "completion": ""}\n'
TALK: Final = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def of_rows(rows: list[dict[str, Any]], kind: str = "string") -> Any:
    """Return the bytes of a Parquet file."""
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    table = pa.Table.from_pylist(rows) if rows else pa.table({"text": pa.array([], kind)})
    parquet.write_table(table, stream := pa.BufferOutputStream())
    return stream.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("files", "args", "message"),
    [
        ({"train.jsonl": "\ufeff" + GOOD}, [], None),
        ({"train.json": json.dumps(sums(6))}, [], None),
        ({"train.json": json.dumps(sums(6), indent=1)}, [], None),
        ({"train.jsonl": GOOD + EMPTY}, [], "record 7: its completion is empty"),
        ({"train.jsonl": GOOD + EMPTY}, ["--max_train_samples", "6"], None),
        ({"train [final].jsonl": GOOD}, [], None),
        (
            {"devops.jsonl": GOOD},
            [],
            "by its name, devops.jsonl is to evaluate on",
        ),
        ({"train.jsonl": GOOD, ".ipynb_checkpoints/train-checkpoint.jsonl": EMPTY}, [], None),
        ({"train.txt": GOOD}, [], "holds no file that could be a data set"),
        ({"train-1.jsonl": GOOD, "train-2.parquet": of_rows(sums(2))}, [], "both JSON lines and Parquet"),
        ({"train.parquet": of_rows(sums(6))}, [], None),
        ({"train.parquet": of_rows([{"prompt": "a", "completion": ""}])}, [], "its completion is empty"),
        ({"train.parquet": of_rows([{"messages": TALK["messages"][:1]}])}, [], "it has no answer of an"),
        ({"train.parquet": of_rows([{"text": 1}])}, [], "its text is no text"),
        ({"train.parquet": of_rows([])}, [], "holds no record"),
    ],
)
def test_preflight_and_ranks_agree_on_data(
    tmp_path: Path, files: dict[str, Any], args: list[str], message: str | None
) -> None:
    for name, content in files.items():
        file = tmp_path / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    options = ["--from_scratch", "True", "--validation_split_percentage", "0", *args]
    model = write_model(tmp_path / "model")
    found = refused(tmp_path, "causal_lm", data=tmp_path / "data", model=model, args=options)
    assert said(found, message), found
    assert is_refused_by_ranks(tmp_path, options, model) == bool(message)


def is_refused_by_ranks(folder: Path, args: list[str], model: Path) -> bool:
    """Whether the recipe refuses the data when it prepares them."""
    from manycpu.pipeline.recipes.causal_lm import inputs
    from manycpu.pipeline.recipes.causal_lm.options import parse

    env = {"MANYCPU_OUTPUT": str(folder / "out"), "MANYCPU_DATA": str(folder / "data")}
    options = parse(["--cache_dir", str(folder / "cache"), *args], env | {"MANYCPU_MODEL": str(model)})
    try:
        _, tokenizer = inputs.read_config(options.model)
        tables = inputs.read_data(options.model, options.data, env, 0)
        inputs.prepare(tables, options.data, tokenizer, 64)
    except BadInputError:
        return True
    return False


@pytest.mark.parametrize("name", ["devops.jsonl", "train.ndjson"])
def test_one_file_is_trained_on_whatever_its_name(tmp_path: Path, name: str) -> None:
    file, model = written(tmp_path / name, GOOD), write_model(tmp_path / "model")
    found = refused(tmp_path, "causal_lm", data=file, model=model, args=["--from_scratch", "True"])
    expected = [f"{file} is neither JSON lines nor Parquet"] if name.endswith(".ndjson") else []
    assert [each.message for each in found] == expected
    with pytest.raises(BadInputError) if expected else nullcontext():
        assert records.splits(file) == {"train": [file]}


@pytest.mark.parametrize(("program", "content"), [("causal_lm", GOOD), ("question_answering", SQUAD_2)])
def test_data_in_a_linked_folder_is_found_as_staging_copies_it(
    tmp_path: Path, program: str, content: Any
) -> None:
    written(tmp_path / "real" / ("train.jsonl" if program == "causal_lm" else "train.json"), content)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "set").symlink_to(tmp_path / "real")
    args = ["--model_name_or_path", "x/y", *(["--version_2_with_negative"] if content == SQUAD_2 else [])]
    assert refused(tmp_path, program, data=tmp_path / "data", args=args) == []


GENERIC: Final = "PreTrainedTokenizerFast"
CLOSES: Final = (
    "{% for m in messages %}{{ m.role + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token + '' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"tokenizer_class": GENERIC}}, "the tokenizer has no pad token"),
        ({"tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer"}}, None),
        ({"tokenizer_config": {}, "special_tokens_map": {"pad_token": "<|pad|>"}}, None),
        ({"tokenizer_config": {"pad_token": "<|pad|>", "chat_template": None}}, "has no chat template"),
        ({"tokenizer_config": {"pad_token": "<|pad|>", "chat_template": CLOSES}}, None),
        ({"chat_template.jinja": b"\xff\xfe"}, "chat_template.jinja is not UTF-8 text"),
    ],
)
def test_a_tokenizer_is_judged_by_all_its_files(
    tmp_path: Path, files: dict[str, Any], message: str | None
) -> None:
    model = write_model(tmp_path / "model")
    own = json.loads((model / "tokenizer_config.json").read_text())
    defaults = {name: own[name] for name in own if name not in ("pad_token", "eos_token")}
    for name, content in files.items():
        if isinstance(content, bytes):
            (model / name).write_bytes(content)
        else:
            base = defaults if name == "tokenizer_config" else {}
            written(model / f"{name}.json", base | content)
    data = lines(tmp_path / "data" / "train.jsonl", [TALK])
    args = ["--from_scratch", "True", "--packing", "False"]
    found = refused(tmp_path, "causal_lm", data=data, model=model, args=args)
    assert said(found, message), found


def cut(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def scatter(file: Path) -> None:
    """Leave one of two files of weights."""
    file.rename(file.parent / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    written(file.parent / "model.safetensors.index.json", {"metadata": {}, "weight_map": names})


def as_adapter(file: Path) -> None:
    file.with_name("config.json").unlink()
    file.rename(file.with_name("adapter_model.safetensors"))
    written(file.parent / "adapter_config.json", {"peft_type": "LORA"})


@pytest.mark.parametrize(
    ("spoil", "args", "message"),
    [
        (lambda file: file.write_text("version https://git-lfs"), [], "is no safetensors file, but"),
        (lambda file: file.write_bytes(b""), ["--lora_target_modules", "q_proj"], "is no safetensors file"),
        (cut, [], "is cut off"),
        (cut, ["--from_scratch", "True"], None),
        (scatter, [], "model-00002-of-00002.safetensors is missing"),
        (lambda file: file.with_name("tokenizer.json").unlink(), [], "has no tokenizer"),
        (as_adapter, [], "has no config.json"),
        (Path.unlink, ["--from_scratch", "False"], "has no weights"),
        (Path.exists, ["--tokenizer_name", "x/y", "--lora_target_modules", "vproj"], "'vproj'"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft uses it
def test_a_base_checkpoint_that_is_not_whole_is_refused_here_and_by_the_ranks(
    tmp_path: Path, spoil: Callable[[Path], Any], args: list[str], message: str | None
) -> None:
    from manycpu.pipeline.recipes.causal_lm import inputs
    from manycpu.pipeline.recipes.causal_lm.options import parse

    model = tiny_checkpoint(tmp_path / "model")
    spoil(model / "model.safetensors")
    data = lines(tmp_path / "data" / "train.jsonl", sums(3))
    found = refused(tmp_path, "causal_lm", data=data, model=model, args=args)
    assert said(found, message), found
    given = [word for word in args if word not in ("--tokenizer_name", "x/y")]
    options = parse(given, {"MANYCPU_OUTPUT": str(tmp_path / "out"), "MANYCPU_MODEL": str(model)})
    with pytest.raises(BadInputError) if message else nullcontext():
        config, _ = inputs.read_config(options.model)
        inputs.with_adapter(inputs.load_model(options.model, config, options.training, 64), options.model)


@pytest.mark.parametrize(
    ("program", "args", "words"),
    [
        ("causal_lm", ["--per_device_train_batch_size", "0"], "--per_device_train_batch_size 0 is too small"),
        ("causal_lm", ["--per_device_eval_batch_size", "0"], "--per_device_eval_batch_size 0 is too small"),
        ("question_answering", ["--gradient_accumulation_steps", "0"], "steps 0 is too small"),
        ("question_answering", ["--learning_rate", "nan"], "--learning_rate nan is too small"),
        ("causal_lm", ["--learning_rate", "-1"], "--learning_rate -1.0 is too small"),
        ("causal_lm", ["--lora_dropout", "2"], "--lora_dropout 2 is no probability"),
        ("causal_lm", ["--shard", "hybrid"], "--shard hybrid excludes adapters"),
        ("causal_lm", ["--from_scratch", "--shard", "full"], "--from_scratch excludes --shard full"),
        (
            "causal_lm",
            ["--shard", "full", "--torch_compile", "True"],
            "--shard full excludes --torch_compile",
        ),
        ("question_answering", ["--shard", "full", "--optim", "adafactor"], "excludes --optim adafactor"),
        ("question_answering", ["--shard", "hybrid"], None),
    ],
)
def test_what_ranks_cannot_use_is_refused_by_the_parser(
    tmp_path: Path, program: str, args: list[str], words: str | None
) -> None:
    parse = import_module(f"{recipes.__name__}.{program}.options").parse
    with pytest.raises(BadInputError, match=words) if words else nullcontext():
        parse(args, {"MANYCPU_OUTPUT": str(tmp_path / "out"), "MANYCPU_MODEL": "x/y"})


GPT2: Final = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 128}


@pytest.mark.parametrize(
    ("config", "args", "words"),
    [
        ({}, [], None),
        (GPT2, ["--lora_target_modules", "c_attn"], None),
        (GPT2, ["--lora_target_modules", "wte"], "the model has no layer 'wte'"),
        ({}, ["--lora_target_modules", "vproj"], "the model has no layer 'vproj'"),
        ({}, ["--lora_target_modules", "lm_head"], "shares the weights of its embeddings"),
        ({}, ["--max_seq_length", "2000"], "--max_seq_length 2000 is more than the model's 1024 positions"),
        ({}, ["--pad_token", "<none>"], "'<none>' is no token of the tokenizer"),
        ({"model_type": "of_a_later_transformers"}, ["--lora_target_modules", "vproj"], None),
    ],
)
def test_configuration_and_tokenizer_are_judged_without_weights(
    tmp_path: Path, config: dict[str, Any], args: list[str], words: str | None
) -> None:
    from manycpu.pipeline.recipes.causal_lm import inputs
    from manycpu.pipeline.recipes.causal_lm.options import parse

    model = write_model(tmp_path / "model", **config)
    options = parse(args, {"MANYCPU_OUTPUT": str(tmp_path / "out"), "MANYCPU_MODEL": str(model)})
    with pytest.raises(BadInputError, match=words) if words else nullcontext():
        inputs.check_base(options)


def test_secrets_in_the_url_of_an_output_are_refused_for_pods(tmp_path: Path) -> None:
    output = "s3://KEY:SECRET@bucket/model"
    found = refused(
        tmp_path, "causal_lm", "kubernetes", output=output, data="hf://datasets/x/y", model="hf://x/y"
    )
    assert {each.field for each in found} == {"run.output"}
    messages = " ".join(each.message for each in found)
    assert ("SECRET" in messages, "names a login" in messages) == (False, True)


def test_a_run_on_other_machines_is_judged_before_it_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_here(monkeypatch)
    data, model = lines(tmp_path / "data" / "train.jsonl", sums(3)), tiny_checkpoint(tmp_path / "model")
    for length, words in (("1024", "is more than the model's 128 positions"), ("128", None)):
        args = ["--max_seq_length", length]
        found = refused(tmp_path, "causal_lm", "kubernetes", data=data, model=f"file://{model}", args=args)
        assert said(found, words), found


@pytest.mark.parametrize("name", ["options.json", "of_the_nodes.json"])
def test_options_in_a_file_reach_the_ranks(tmp_path: Path, name: str) -> None:
    written(tmp_path / "options.json", {"max_steps": 1, "lora_target_modules": ["q_proj"]})
    fields = {"program": "causal_lm", "args": [name], "output": "out", "data": "data", "model": "model"}
    expected = ("--max_steps", "1", "--lora_target_modules", "q_proj")
    run = open_context(fields, {"kind": "local"}, "test", base=tmp_path).run
    assert run.args == (expected if name == "options.json" else (name,))


@pytest.mark.parametrize(
    ("program", "names", "args", "words"),
    [
        ("hogwild", ["data/x.txt"], [], "has no file t10k-images-idx3-ubyte"),
        ("image_classification", [], [], "there are no images"),
        ("image_classification", [], ["--data_dir", "/images"], None),
        ("image_classification", ["data/a/1.png", "data/b/1.png"], [], "1 images to train on are too few"),
        ("image_classification", ["data/a/1.png", "data/b/1.png"], ["--batch_size", "1"], None),
        ("image_classification", ["data/a-1.png"], ["--label_pattern", "("], "--label_pattern ("),
        (
            "image_classification",
            ["data/a-1.png"],
            ["--label_pattern", r"(.*)_"],
            "has no class by the pattern",
        ),
        ("image_classification", ["model/x.txt"], ["--data_dir", "/images"], "has no config.json"),
        ("image_classification", ["model/x.txt"], ["--data_dir", "/images", "--model", "resnet18"], None),
    ],
)
def test_files_of_images_and_their_models_are_judged(
    tmp_path: Path, program: str, names: list[str], args: list[str], words: str | None
) -> None:
    for name in names:
        written(tmp_path / name, "x")
    given: dict[str, Any] = {
        name: tmp_path / name for name in ("data", "model") if (tmp_path / name).is_dir()
    }
    found = refused(tmp_path, program, args=args, **given)
    assert said(found, words), found
