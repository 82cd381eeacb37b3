"""Parse the options: those of ``run_qa.py`` by the same names, with defaults from a run's environment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from manycpu.pipeline.recipes import arguments
from manycpu.pipeline.recipes.arguments import Parser, option, translate
from manycpu.pipeline.recipes.loading import check_shard
from manycpu.pipeline.recipes.trainer import CpuTrainingOptions, usable
from manycpu.pipeline.spec import recipe_options

_COUNTS = (
    *("max_answer_length", "max_seq_length", "n_best_size", "preprocessing_num_workers"),
    *("max_train_samples", "max_eval_samples", "max_predict_samples"),
)


@dataclass
class ModelOptions:
    """Which model to begin with."""

    model_name_or_path: str | None = option(
        None, "Base checkpoint: a folder or a name on the Hub; default: run.model."
    )
    config_name: str | None = option(None, "Configuration, where it is not the model's.")
    config_overrides: str | None = option(
        None,
        "Changes to the configuration, such as hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0.",
    )
    freeze_embeddings: bool = option(
        False, "Leave the embeddings of words as they are: less to compute and to exchange."
    )
    tokenizer_name: str | None = option(None, "Tokenizer, where it is not the model's.")
    cache_dir: str | None = option(None, "Folder for what comes from the Hub, and for prepared data.")
    model_revision: str = option("main", "Branch, tag or commit on the Hub.")
    token: str | None = option(None, "Token for the Hub; better: HF_TOKEN through run.env_from.")
    trust_remote_code: bool = option(False, "Run code that comes with a model on the Hub.")


@dataclass
class DataOptions:
    """Which data, and how it becomes features."""

    dataset_name: str | None = option(
        None, "Data set on the Hub, such as rajpurkar/squad; default: run.data."
    )
    dataset_config_name: str | None = option(None, "Its configuration.")
    train_file: str | None = option(None, "Training file, SQuAD format, JSON or parquet.")
    validation_file: str | None = option(None, "Validation file, in the same format.")
    test_file: str | None = option(None, "File to predict on, in the same format; answers may be missing.")
    overwrite_cache: bool = option(False, "Prepare features again although they are cached.")
    preprocessing_num_workers: int | None = option(None, "Processes that prepare features; default: one.")
    max_seq_length: int = option(384, "Tokens of a feature: question, stretch of context, special tokens.")
    pad_to_max_length: bool = option(
        False, "Pad to max_seq_length; default: to the longest of a batch, which costs less on CPUs."
    )
    unpad: bool = option(True, "Compute nothing on padding, where the model allows it: see docs/speed.md.")
    max_train_samples: int | None = option(None, "Train on this many examples only.")
    max_eval_samples: int | None = option(None, "Evaluate on this many examples only.")
    max_predict_samples: int | None = option(None, "Predict on this many examples only.")
    version_2_with_negative: bool = option(False, "Some questions have no answer, as in SQuAD v2.0.")
    null_score_diff_threshold: float = option(
        0.0, "Say that there is no answer when it scores this much better than the best answer."
    )
    doc_stride: int = option(128, "Tokens that two stretches of a long context share.")
    n_best_size: int = option(
        20, "Starts and ends to combine, and answers to list in nbest_predictions.json."
    )
    max_answer_length: int = option(30, "Longest answer, in tokens.")
    evaluate_before: bool | None = option(
        None, "Evaluate before training too; default: where it costs at most a tenth of the training."
    )


class Options(NamedTuple):
    """All options of a training; the model goes to ``output``, checkpoints to ``training.output_dir``."""

    model: ModelOptions
    data: DataOptions
    training: CpuTrainingOptions
    output: str
    chosen: bool
    """Whether the user said which of training, evaluation and prediction to do."""
    notes: tuple[str, ...] = ()
    """Notes on options that were read in another way than they are written."""


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """Parse the options, or one JSON file that has them; the environment of a run has defaults.

    Raises:
        BadInputError: There is no such option, its value cannot be used, or two options exclude each other.
    """
    option_classes: list[Any] = [ModelOptions, DataOptions, CpuTrainingOptions]
    model_name, output = env.get("MANYCPU_MODEL"), env.get("MANYCPU_OUTPUT")
    parser = Parser(option_classes, model_name_or_path=model_name, output_dir=output)
    words, notes = translate(recipe_options.words(argv), parser)
    given_options = recipe_options.read(words)
    bf16, bf16_notes = arguments.bf16_by_default(given_options, env)
    parser.set_defaults(bf16=bf16)
    model, data, training = parser.read(words)
    arguments.check_least(data, 1, *_COUNTS)
    arguments.check_least(data, 0, "doc_stride")
    check_shard(training)
    chosen = bool({"do_train", "do_eval", "do_predict"} & set(given_options))
    output, training.output_dir, folder_notes = arguments.folders(training.output_dir, env)
    all_notes = (*notes, *bf16_notes, *usable(training), *folder_notes)
    return Options(model, data, training, output, chosen, all_notes)
