"""The recipe from end to end, in this process, with a tiny random model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.tiny_bert import NAMES, run, tiny_data, tiny_tokenizer

from manycpu.pipeline.node.script import translate
from manycpu.pipeline.recipes import checkpoints
from manycpu.pipeline.recipes.question_answering import ask, training
from manycpu.pipeline.recipes.question_answering.ask import Reader
from manycpu.pipeline.recipes.question_answering.options import parse
from manycpu.pipeline.spec.errors import BadInputError

pytestmark = [
    # torch's own: its export of a scheduler's state, and the loader's advice on processes.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


def test_a_run_trains_evaluates_and_leaves_a_model_that_answers(env: dict[str, str]) -> None:
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    found = run(env, "--num_train_epochs", "8", "--learning_rate", "1e-2")
    output = Path(env["MANYCPU_OUTPUT"])
    assert found["train_steps"] == 48
    assert found["exact_match"] > found["exact_match_before"]
    assert json.loads((output / "all_results.json").read_text())["exact_match"] == found["exact_match"]
    predictions = json.loads((output / "eval_predictions.json").read_text())
    assert list(predictions) == [f"validation-{i}" for i in range(7)]
    right = sum(predictions[f"validation-{i}"] == NAMES[i % len(NAMES)] for i in range(7))
    assert found["exact_match"] == pytest.approx(100 * right / 7)
    AutoModelForQuestionAnswering.from_pretrained(output)
    assert AutoTokenizer.from_pretrained(output).is_fast


def test_the_output_holds_the_model_and_nothing_of_the_training(env: dict[str, str]) -> None:
    run(env, "--max_steps", "2")
    assert {file.name for file in Path(env["MANYCPU_OUTPUT"]).rglob("*")} == {
        "all_results.json",
        "config.json",
        "eval_nbest_predictions.json",
        "eval_predictions.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert checkpoints.step(Path(env["MANYCPU_CHECKPOINTS"]) / "checkpoint-2") == 2


def test_a_retry_goes_on_from_the_last_whole_checkpoint(
    env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(env, "--max_steps", "6", "--save_steps", "2")
    folder = Path(env["MANYCPU_CHECKPOINTS"])
    weights = folder / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    shutil.rmtree(env["MANYCPU_OUTPUT"])

    found = run(env, "--max_steps", "8", "--save_steps", "2")
    assert (found["resumed_from_step"], found["train_steps"]) == (4, 8)
    said = capsys.readouterr().err
    assert "checkpoint-6 is skipped: model.safetensors is cut short or damaged" in said
    assert f"resuming from {folder / 'checkpoint-4'}, step 4" in said
    # What is not "before training" is not called so.
    assert "exact_match_before" not in found


def test_with_max_steps_a_retry_with_smaller_steps_resumes_from_the_last_step(env: dict[str, str]) -> None:
    """As after a resume with fewer ranks: the later checkpoint is of a smaller epoch."""
    steps = ("--save_steps", "2", "--evaluate_before", "false", "--per_device_train_batch_size")
    run(env, "--max_steps", "4", *steps, "8")
    assert run(env, "--max_steps", "6", *steps, "2")["resumed_from_step"] == 4
    assert run(env, "--max_steps", "8", *steps, "2")["resumed_from_step"] == 6


def with_old_names(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Return the environment with a base that names its weights as google-bert/bert-base-uncased does."""
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(env["MANYCPU_MODEL"], tmp_path / "old")
    weights = load_file(model / "model.safetensors")
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        weights = {name.replace(new, old): values for name, values in weights.items()}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return env | {"MANYCPU_MODEL": str(model)}


@pytest.mark.parametrize("is_old", [False, True])
def test_a_resumed_training_ends_where_an_unbroken_one_does(
    is_old: bool, env: dict[str, str], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    env = with_old_names(env, tmp_path) if is_old else env
    steps = ("--max_steps", "6", "--save_steps", "3", "--evaluate_before", "false", "--learning_rate", "1e-2")
    run(env, *steps)
    whole = load_file(Path(env["MANYCPU_OUTPUT"]) / "model.safetensors")
    broken = env | {
        "MANYCPU_OUTPUT": str(tmp_path / "again"),
        "MANYCPU_CHECKPOINTS": str(tmp_path / "more"),
        "MANYCPU_RESUME_FROM": str(Path(env["MANYCPU_CHECKPOINTS"]) / "checkpoint-3"),
    }
    assert run(broken, *steps)["resumed_from_step"] == 3
    resumed = load_file(tmp_path / "again" / "model.safetensors")
    assert all((whole[name] == resumed[name]).all() for name in whole)


def test_the_best_model_is_exported_whole_whatever_its_base_calls_the_weights(
    env: dict[str, str], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    # Each step makes the model worse: the first is the best.
    steps = ("--max_steps", "3", "--evaluate_before", "false", "--learning_rate", "1")
    best = ("--load_best_model_at_end", "--save_strategy", "steps", "--eval_strategy", "steps")
    run(with_old_names(env, tmp_path), *steps, *best, "--save_steps", "1", "--eval_steps", "1")
    first = load_file(Path(env["MANYCPU_CHECKPOINTS"]) / "checkpoint-1" / "model.safetensors")
    output = load_file(Path(env["MANYCPU_OUTPUT"]) / "model.safetensors")
    assert all((first[name] == output[name]).all() for name in first)


def test_a_retry_goes_on_from_what_the_run_wrote_after_a_checkpoint_asked_for(
    env: dict[str, str], tmp_path: Path
) -> None:
    steps = ("--save_steps", "2", "--evaluate_before", "false")
    run(env, "--max_steps", "6", *steps)
    folder = Path(env["MANYCPU_CHECKPOINTS"])
    asked = env | {"MANYCPU_RESUME_FROM": str(folder / "checkpoint-2"), "MANYCPU_RUN": "again"}
    asked["MANYCPU_OUTPUT"] = str(tmp_path / "again")
    # The later checkpoints of the run before are not this run's.
    assert run(asked, "--max_steps", "4", *steps)["resumed_from_step"] == 2
    assert run(asked, "--max_steps", "5", *steps)["resumed_from_step"] == 4


def test_a_checkpoint_asked_for_must_be_whole(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        BadInputError, match=r"run\.resume_from: cannot resume from .*no readable trainer_state"
    ):
        run(env | {"MANYCPU_RESUME_FROM": str(tmp_path / "empty")})


def test_the_options_of_the_first_documents_run(env: dict[str, str]) -> None:
    found = training.run(
        parse(
            [
                *(
                    "--per_device_train_batch_size",
                    "12",
                    "--learning_rate",
                    "3e-5",
                    "--num_train_epochs",
                    "2",
                ),
                *("--max_seq_length", "384", "--doc_stride", "128", "--do_train", "--do_eval", "--bf16"),
                *("--no_cuda", "--use_ipex", "--ddp_backend", "ccl", "--pad_to_max_length"),
            ],
            env,
        ),
        env,
    )
    assert found["train_steps"] == 4
    assert set(found) >= {"exact_match", "f1", "eval_loss", "train_loss", "train_samples_per_second"}


def test_answers_are_the_same_if_padding_is_computed_too(env: dict[str, str], tmp_path: Path) -> None:
    # Contexts of 48 and fewer tokens, in one batch.
    tiny_data(tmp_path / "data", validation=4, words=0)
    long = json.loads((tiny_data(tmp_path / "long", validation=8, words=20) / "validation.json").read_text())
    path = tmp_path / "data" / "validation.json"
    document = json.loads(path.read_text())
    document["data"] += long["data"][4:]
    path.write_text(json.dumps(document))
    answers = []
    for unpad in ("true", "false"):
        run(env, "--do_eval", "--per_device_eval_batch_size", "8", "--unpad", unpad)
        answers.append(json.loads((Path(env["MANYCPU_OUTPUT"]) / "eval_predictions.json").read_text()))
    assert answers[0] == answers[1]
    assert len(answers[0]) == 8


def test_a_model_with_more_outputs_than_two_scores_is_evaluated(env: dict[str, str], tmp_path: Path) -> None:
    """BART also returns the states of its encoder."""
    from transformers import BartConfig, BartModel

    tokenizer = tiny_tokenizer()
    names = [f"{part}_{name}" for part in ("encoder", "decoder") for name in ("layers", "attention_heads")]
    sizes: dict[str, Any] = dict.fromkeys(names, 1)
    tokens: dict[str, Any] = {
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "decoder_start_token_id": 3,
    }
    config = BartConfig(vocab_size=len(tokenizer), d_model=16, **sizes, **tokens)
    BartModel(config).save_pretrained(tmp_path / "bart")
    tokenizer.save_pretrained(tmp_path / "bart")
    assert "exact_match" in run(env | {"MANYCPU_MODEL": str(tmp_path / "bart")}, "--do_eval")


def test_a_model_of_few_positions_is_evaluated_and_asked(env: dict[str, str], tmp_path: Path) -> None:
    from transformers import BertConfig, BertForQuestionAnswering

    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    tokenizer, folder = tiny_tokenizer(), tmp_path / "short"
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=44, **sizes)
    BertForQuestionAnswering(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tiny_data(tmp_path / "data", words=30)
    assert "exact_match" in run(env | {"MANYCPU_MODEL": str(folder)}, "--do_eval")
    context = "the old river and the town " * 20
    assert Reader(folder).answer("Who drew the plans?", context).text in context


def test_what_old_options_become_is_read_by_todays_trainer(tmp_path: Path) -> None:
    from transformers import HfArgumentParser, TrainingArguments

    old = f"--output_dir {tmp_path} --ddp_backend ccl --no_cuda --use_ipex --num_train_epochs 2"
    words, _ = translate(old.split(), "gloo")
    parser = HfArgumentParser(TrainingArguments)  # type: ignore[arg-type]
    (training,) = parser.parse_args_into_dataclasses(words)
    assert (training.use_cpu, training.ddp_backend, training.num_train_epochs) == (True, None, 2.0)


def test_a_test_split_is_predicted(env: dict[str, str], tmp_path: Path) -> None:
    run(env, "--max_steps", "1")
    data = tmp_path / "test.json"
    document = json.loads((tmp_path / "data" / "validation.json").read_text())
    for article in document["data"]:
        del article["paragraphs"][0]["qas"][0]["answers"]
    data.write_text(json.dumps(document))
    model = env["MANYCPU_OUTPUT"]
    again = env | {"MANYCPU_MODEL": model, "MANYCPU_OUTPUT": str(tmp_path / "predicted")}
    assert run(again, "--test_file", str(data), "--do_predict") == {}
    predicted = json.loads((tmp_path / "predicted" / "predict_predictions.json").read_text())
    evaluated = json.loads((Path(model) / "eval_predictions.json").read_text())
    assert predicted == evaluated


def test_questions_without_an_answer(env: dict[str, str], tmp_path: Path) -> None:
    for split in ("train", "validation"):
        path = tmp_path / "data" / f"{split}.json"
        document = json.loads(path.read_text())
        for article in document["data"][::2]:
            article["paragraphs"][0]["qas"][0] |= {"answers": [], "is_impossible": True}
        path.write_text(json.dumps(document))
    with pytest.raises(BadInputError, match=r"12 of 24 questions have no answer.*--version_2_with_negative"):
        run(env)
    # Every answer is worse than none by less than this: nothing is answered.
    found = run(env, "--max_steps", "1", "--version_2_with_negative", "--null_score_diff_threshold", "-1000")
    assert (found["no_answer_exact_match"], found["has_answer_exact_match"]) == (100.0, 0.0)
    assert found["exact_match"] == pytest.approx(400 / 7)
    odds = json.loads((Path(env["MANYCPU_OUTPUT"]) / "eval_null_odds.json").read_text())
    assert len(odds) == 7


def test_only_the_samples_asked_for_are_used(env: dict[str, str]) -> None:
    found = run(env, "--max_train_samples", "5", "--max_eval_samples", "3", "--num_train_epochs", "1")
    assert found["train_steps"] == 2
    assert len(json.loads((Path(env["MANYCPU_OUTPUT"]) / "eval_predictions.json").read_text())) == 3


def test_embeddings_that_are_frozen_stay_as_they_are(env: dict[str, str]) -> None:
    from safetensors.torch import load_file

    run(env, "--max_steps", "2", "--learning_rate", "1e-2", "--freeze_embeddings")
    before, after = (
        load_file(Path(env[name]) / "model.safetensors") for name in ("MANYCPU_MODEL", "MANYCPU_OUTPUT")
    )
    same = {
        name
        for name, values in before.items()
        if f"bert.{name}" in after and (values == after[f"bert.{name}"]).all()
    }
    assert same == {"embeddings.word_embeddings.weight"}


def test_a_changed_file_is_read_again(env: dict[str, str], tmp_path: Path) -> None:
    run(env, "--max_steps", "1")
    tiny_data(tmp_path / "data", validation=4)
    run(env, "--max_steps", "1", "--resume_from_checkpoint", str(tmp_path / "checkpoints" / "checkpoint-1"))
    assert len(json.loads((Path(env["MANYCPU_OUTPUT"]) / "eval_predictions.json").read_text())) == 4


def test_a_trained_model_is_asked_about_texts_of_any_length(env: dict[str, str]) -> None:
    run(env, "--max_steps", "2")
    reader = Reader(env["MANYCPU_OUTPUT"])
    predictions = json.loads((Path(env["MANYCPU_OUTPUT"]) / "eval_predictions.json").read_text())
    context = "In 1800 mira drew the plans of the old bridge."
    assert reader.answer("Who drew the plans?", context).text == predictions["validation-0"]
    long = reader.answer("Who drew the plans?", "the old river and the town " * 200)
    assert long.text in "the old river and the town " * 2
    assert len(long.best) == 20
    with pytest.raises(BadInputError, match="leaves 0 tokens"):
        reader.answer("Who? " * 400, context)


def test_a_model_may_be_asked_from_a_shell(env: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    run(env, "--max_steps", "1")
    capsys.readouterr()
    assert ask.main([env["MANYCPU_OUTPUT"], "Who?", "odo"]) == 0
    assert capsys.readouterr().out == "odo\n"
    assert ask.main(["only one"]) == 2
    assert ask.main([str(Path(env["MANYCPU_OUTPUT"]) / "nowhere"), "Who?", "odo"]) == 2
