"""What a training begins with: the base checkpoint and its tokenizer, and a table for each split of the data.

The checkpoint is a folder or a model of the Hub; the data set is files in SQuAD's format or of the Hub.
"""

import glob
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import datasets  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from datasets.exceptions import DatasetGenerationError  # type: ignore[import-untyped]
from transformers import (
    AutoModelForQuestionAnswering,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from manycpu.pipeline.recipes import base_model
from manycpu.pipeline.recipes.loading import loader
from manycpu.pipeline.recipes.question_answering import squad
from manycpu.pipeline.recipes.question_answering.options import DataOptions, ModelOptions
from manycpu.pipeline.recipes.trainer import CpuTrainingOptions
from manycpu.pipeline.spec.errors import BadInputError

_PADDING_SCORE: Final = -1e4
"""The score of padding: below that of every token, and within the range of half precision."""
_SCHEMA = datasets.Features(
    {
        "id": datasets.Value("string"),
        "title": datasets.Value("string"),
        "context": datasets.Value("string"),
        "question": datasets.Value("string"),
        "answers": {
            "text": datasets.List(datasets.Value("string")),
            "answer_start": datasets.List(datasets.Value("int32")),
        },
    }
)


def load_model(
    options: ModelOptions, training: CpuTrainingOptions, length: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base model and its fast tokenizer, which pads on the right; freeze embeddings if asked for.

    If ``training.shard`` is ``auto``, ``no`` or ``full`` replaces it. The choice depends on ``length``, the
    number of tokens of a sample.

    Raises:
        BadInputError: Model or tokenizer cannot be loaded, or the model cannot be sharded as asked.
    """
    config, tokenizer = base_model.read_config(options, options.config_name)
    name = str(options.model_name_or_path)
    try:
        # `load` works as from_pretrained, but each rank of a sharded model reads only its own share.
        load = loader(AutoModelForQuestionAnswering, config, training, length)
        # Weights are fp32 also where the checkpoint has others: bf16 is for the computation (autocast) alone.
        model = load(name, config=config, dtype=torch.float32, **base_model.hub_arguments(options))
    except base_model.LOAD_ERRORS as error:
        raise base_model.unloadable(name, error) from error
    if options.freeze_embeddings:
        model.get_input_embeddings().requires_grad_(requires_grad=False)
    tokenizer.padding_side = "right"
    return model, tokenizer


def exclude_padding(model: PreTrainedModel) -> None:
    """Make the model give padding so low scores that no answer contains padding, and no loss counts it.

    One hook of the model notes the mask of each batch. A second hook, of the head ``qa_outputs``, sets the
    scores of padding. A model whose head has another name stays as it is.
    """
    mask_of_batch: list[torch.Tensor | None] = [None]  # one element, which `read` sets and `exclude` reads

    def read(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        del args
        mask_of_batch[0] = kwargs.get("attention_mask")

    def exclude(_: torch.nn.Module, args: Any, scores: torch.Tensor) -> torch.Tensor:
        del args
        mask = mask_of_batch[0]
        if mask is None or mask.shape != scores.shape[:2]:
            return scores
        return scores.masked_fill(mask[..., None] == 0, _PADDING_SCORE)

    if isinstance(head := getattr(model, "qa_outputs", None), torch.nn.Module):
        model.register_forward_pre_hook(read, with_kwargs=True)
        head.register_forward_hook(exclude)


def read_data(model: ModelOptions, data: DataOptions, env: Mapping[str, str]) -> dict[str, Dataset]:
    """Read the splits that the data set has of train, validation and test; cut each to the number asked for.

    The data set is the first that is given: one of the Hub, files named by options, or MANYCPU_DATA. Tables
    have the columns id, context, question and answers, as rajpurkar/squad has them.

    Raises:
        BadInputError: There is no data set, or it cannot be read, or a split lacks what the training needs.
    """
    if data.dataset_name:
        tables = _hub(model, data)
    else:
        option_values = {"train": data.train_file, "validation": data.validation_file, "test": data.test_file}
        files = {split: [Path(file)] for split, file in option_values.items() if file}
        if not files and (folder := env.get("MANYCPU_DATA")):
            files = squad.splits(folder)
        tables = {split: _table(split, paths, model.cache_dir, data) for split, paths in files.items()}
    if not tables:
        raise BadInputError(
            "there is no data set",
            field="run.data",
            fix="Name a folder or a file there, or give --dataset_name or --train_file in run.args",
        )
    limits = {
        "train": data.max_train_samples,
        "validation": data.max_eval_samples,
        "test": data.max_predict_samples,
    }
    for split, table in tables.items():
        _check(split, table, data)
    for split, limit in limits.items():
        if limit is not None and split in tables:
            table = tables[split]
            tables[split] = table.select(range(min(limit, len(table))))
    return tables


def _hub(model: ModelOptions, data: DataOptions) -> dict[str, Dataset]:
    """Load the splits train, validation and test of a data set of the Hub, those that it has.

    Raises:
        BadInputError: There is no such data set, or it cannot be reached.
    """
    try:
        loaded = datasets.load_dataset(
            str(data.dataset_name), data.dataset_config_name, cache_dir=model.cache_dir, token=model.token
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInputError(
            f"the data set {data.dataset_name!r} cannot be loaded: {error}",
            field="run.args",
            fix="Check the name, the access to the Hub, and HF_TOKEN; or stage a copy through run.data",
        ) from error
    return {split: loaded[split] for split in squad.SPLITS if split in loaded}


def _table(split: str, files: list[Path], cache: str | None, data: DataOptions) -> Dataset:
    """Read the files of a split, all .json or all .parquet, as one table.

    Raises:
        BadInputError: A file does not exist, has another format, or what is in it is wrong.
    """
    for file in files:
        if not file.is_file():
            raise BadInputError(f"there is no file {file}", field="run.args", fix=f"Check --{split}_file")
    if files[0].suffix == ".parquet":
        return Dataset.from_parquet([glob.escape(str(file)) for file in files], cache_dir=cache)
    if files[0].suffix != ".json":
        raise BadInputError(f"{files[0]} is neither .json nor .parquet", field="run.data", fix="Convert it")
    # The digest is part of the cache's key, so that a changed file is read again.
    source = {
        "files": [str(file) for file in files],
        "digest": hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest(),
        "unanswered": data.version_2_with_negative or split == "test",
    }
    try:
        return Dataset.from_generator(_records, features=_SCHEMA, cache_dir=cache, gen_kwargs=source)
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None  # the cause is the error of _records


def _records(files: list[str], digest: str, unanswered: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table; ``unanswered``: questions may have no answer."""
    del digest  # needed for the cache's key alone
    for file in files:
        for question in squad.load(file, unanswered=unanswered):
            yield {
                "id": question.id,
                "title": question.title,
                "context": question.context,
                "question": question.question,
                "answers": {"text": list(question.texts), "answer_start": list(question.starts)},
            }


def _check(split: str, table: Dataset, data: DataOptions) -> None:
    """Raise BadInputError if a split lacks a column, has no question, or lacks answers that are needed."""
    needed_columns = ("id", "context", "question", *(() if split == "test" else ("answers",)))
    missing = [name for name in needed_columns if name not in table.column_names]
    if missing:
        raise BadInputError(
            f"the {split} split has no column {missing[0]!r}; it has {', '.join(table.column_names)}",
            field="run.data",
            fix="Columns are needed as rajpurkar/squad has them: id, title, context, question, answers",
        )
    if len(table) == 0:
        raise BadInputError(
            f"the {split} split holds no question", field="run.data", fix="Give a data set with questions"
        )
    if split != "test" and not data.version_2_with_negative:
        pairs = zip(table["id"], table["answers"], strict=True)
        unanswered = [key for key, answers in pairs if not answers["text"]]
        if unanswered:
            count = f"{len(unanswered)} of {len(table)} {split} questions"
            raise BadInputError(
                f"{count} have no answer, the first is {unanswered[0]!r}",
                field="run.data",
                fix="For data of SQuAD v2.0 add --version_2_with_negative to run.args",
            )
