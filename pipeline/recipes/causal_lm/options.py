"""Parse the options: those of the Trainer, of ``run_clm.py`` and of peft by their names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from manycpu.pipeline.recipes import arguments
from manycpu.pipeline.recipes.arguments import Parser, option, translate
from manycpu.pipeline.recipes.loading import check_shard
from manycpu.pipeline.recipes.trainer import CpuTrainingOptions, usable
from manycpu.pipeline.spec import recipe_options

_COUNTS = (
    *("max_seq_length", "max_train_samples", "max_eval_samples", "preprocessing_num_workers"),
    "early_stopping_patience",
)


@dataclass
class ModelOptions:
    """Which model to begin with, and what of it to train."""

    model_name_or_path: str | None = option(
        None, "Base checkpoint: a folder or a name on the Hub; default: run.model."
    )
    from_scratch: bool = option(False, "Begin with random weights, of the model's configuration.")
    config_overrides: str | None = option(
        None, "Changes to the configuration, such as attention_dropout=0.1,tie_word_embeddings=true."
    )
    tokenizer_name: str | None = option(None, "Tokenizer, where it is not the model's.")
    pad_token: str | None = option(
        None, "Token that pads, for a tokenizer that names none; only padded batches need it."
    )
    cache_dir: str | None = option(None, "Folder for what comes from the Hub, and for prepared data.")
    model_revision: str = option("main", "Branch, tag or commit on the Hub.")
    token: str | None = option(None, "Token for the Hub; better: HF_TOKEN through run.env_from.")
    trust_remote_code: bool = option(False, "Run code that comes with a model on the Hub.")
    method: Literal["lora", "dora", "full"] = option("lora", "Train adapters of peft, or all weights.")
    lora_r: int = option(16, "Rank of the adapters.")
    lora_alpha: int = option(32, "Scale of the adapters, divided by their rank.")
    lora_dropout: float = option(0.0, "Dropout before the adapters.")
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"],
        metadata={"help": "Layers that get adapters, by the ends of their names, such as q_proj v_proj."},
    )
    merge_adapter: bool = option(True, "Write the model with the adapter merged into it, beside the adapter.")


@dataclass
class DataOptions:
    """Which data, and how it becomes batches."""

    dataset_name: str | None = option(None, "Data set on the Hub; default: run.data.")
    dataset_config_name: str | None = option(None, "Its configuration.")
    train_file: str | None = option(None, "Training file: JSON lines or Parquet.")
    validation_file: str | None = option(None, "Validation file, in the same format.")
    validation_split_percentage: int = option(
        5, "Share of the training data to evaluate on, where there is no validation split; 0: none."
    )
    text_column: str = option("text", "Column of whole texts.")
    prompt_column: str = option("prompt", "Column of prompts, which are no part of the loss.")
    completion_column: str = option("completion", "Column of what is to be answered.")
    messages_column: str = option("messages", "Column of conversations: lists of role and content.")
    max_train_samples: int | None = option(None, "Train on this many records only.")
    max_eval_samples: int | None = option(None, "Evaluate on this many records only.")
    max_seq_length: int | None = option(
        None, "Longest document in tokens, and the length of a pack; default: 1024, or what the model takes."
    )
    rope_scaling: Literal["linear", "yarn"] | None = option(
        None, "How the model's positions are stretched to a greater --max_seq_length."
    )
    packing: bool = option(
        True, "Fill each sequence with whole documents, which do not see each other; else pad."
    )
    preprocessing_num_workers: int | None = option(None, "Processes that prepare the data; default: one.")
    overwrite_cache: bool = option(False, "Prepare the data again although it is cached.")
    samples: int = option(3, "Prompts of the validation split that the trained model continues.")
    sample_tokens: int = option(48, "Longest continuation in tokens.")
    early_stopping_patience: int | None = option(
        None, "Stop after so many evaluations without a lower loss, and keep the best model."
    )


class Options(NamedTuple):
    """All options of a training; the model goes to ``output``, checkpoints to ``training.output_dir``."""

    model: ModelOptions
    data: DataOptions
    training: CpuTrainingOptions
    output: str
    notes: tuple[str, ...] = ()
    """Notes on options that were read in another way than they are written."""


def parse(argv: Sequence[str], env: Mapping[str, str]) -> Options:
    """Parse the options, or one JSON file that has them; the environment of a run has defaults.

    Raises:
        BadInputError: There is no such option, its value cannot be used, or two options exclude each other.
    """
    option_classes: list[Any] = [ModelOptions, DataOptions, CpuTrainingOptions]
    parser = Parser(
        option_classes, model_name_or_path=env.get("MANYCPU_MODEL"), output_dir=env.get("MANYCPU_OUTPUT")
    )
    words, notes = translate(recipe_options.words(argv), parser)
    given_options = recipe_options.read(words)
    bf16, bf16_notes = arguments.bf16_by_default(given_options, env)
    parser.set_defaults(bf16=bf16)
    if "early_stopping_patience" in given_options:
        checkpoint_strategy = (
            recipe_options.value_of(given_options, "save_strategy", "eval_strategy") or "epoch"
        )
        parser.set_defaults(
            load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False
        )
        # The Trainer keeps the best model only if it evaluates whenever it saves.
        parser.set_defaults(save_strategy=checkpoint_strategy, eval_strategy=checkpoint_strategy)
    model, data, training = parser.read(words)
    arguments.check_least(model, 1, "lora_r", "lora_alpha")
    arguments.check_least(data, 1, *_COUNTS)
    if not 0 <= model.lora_dropout <= 1:
        parser.error(f"--lora_dropout {model.lora_dropout:g} is no probability: give 0 to 1")
    arguments.check_least(data, 0, "samples", "sample_tokens", "validation_split_percentage")
    if data.validation_split_percentage >= 100:  # noqa: PLR2004 - per cent
        parser.error("--validation_split_percentage leaves nothing to train on: give less than 100")
    if model.method == "dora":  # peft mixes shares with whole tensors for its norms
        if training.shard not in {"no", "auto"}:
            parser.error(f"--method dora excludes --shard {training.shard}: leave one of them out")
        training.shard = "no"
    # Random weights are made as a whole on each rank.
    if model.from_scratch and training.shard in ("full", "hybrid"):
        parser.error(f"--from_scratch excludes --shard {training.shard}: leave one of them out")
    check_shard(training, has_adapters=model.method != "full")
    if model.method != "full" and model.from_scratch and not model.merge_adapter:
        parser.error(
            "--from_scratch needs --merge_adapter: nothing else keeps the random base of the adapter"
        )
    if training.label_smoothing_factor:
        parser.error("--label_smoothing_factor has no effect here: leave it out")
    # Else the Trainer drops columns that are no arguments of the model, and the collator needs them.
    training.remove_unused_columns = False
    output, training.output_dir, folder_notes = arguments.folders(training.output_dir, env)
    return Options(model, data, training, output, (*notes, *bf16_notes, *usable(training), *folder_notes))
