"""Turn the splits of a data set into features, through the cache of ``datasets``."""

from typing import NamedTuple

from datasets import Dataset  # type: ignore[import-untyped]
from transformers import PreTrainedTokenizerBase

from manycpu.pipeline.recipes.emit import say
from manycpu.pipeline.recipes.question_answering.features import Shape, build, usable_length
from manycpu.pipeline.recipes.question_answering.options import DataOptions
from manycpu.pipeline.recipes.question_answering.postprocess import Limits
from manycpu.pipeline.recipes.question_answering.scoring import Scorer
from manycpu.pipeline.spec.errors import BadInputError

__all__ = ["Prepared", "prepare"]

_FOR_SCORING = ("example", "offsets")


class Prepared(NamedTuple):
    """A split as features, and what answers its questions."""

    features: Dataset
    scorer: Scorer


def prepare(
    splits: dict[str, Dataset],
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None,
) -> dict[str, Prepared]:
    """Make the features of every split.

    Args:
        splits: Tables as ``data.read`` gives them.
        options: Lengths and limits.
        tokenizer: The model's.
        positions: Greatest number of tokens that the model takes; None: any.

    Raises:
        BadInputError: The lengths do not fit together, or a training split has no answer within reach.
    """
    length = usable_length(options.max_seq_length, tokenizer, positions)
    if length < options.max_seq_length:
        say(f"--max_seq_length {options.max_seq_length} is more than the model takes: {length} is used")
    shape = Shape(length, options.doc_stride, options.pad_to_max_length)
    # Used once, a tokenizer keeps its truncation, which is a part of the cache's key: the same on every rank.
    build(next(iter(splits.values()))[:1], [0], tokenizer, shape)
    return {split: _split(split, table, options, tokenizer, shape) for split, table in splits.items()}


def _split(
    split: str, table: Dataset, options: DataOptions, tokenizer: PreTrainedTokenizerBase, shape: Shape
) -> Prepared:
    names = ["id", "question", "context", *(["answers"] if split != "test" else [])]
    features = table.select_columns(names).map(
        build,
        with_indices=True,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer, "shape": shape},
        remove_columns=names,
        num_proc=options.preprocessing_num_workers,
        load_from_cache_file=not options.overwrite_cache,
        desc=f"{split} features",
    )
    if split == "train" and not any(features["start_positions"]):
        raise BadInputError(
            f"no training question has an answer that fits into {shape.length} tokens",
            field="run.data",
            fix="Give a greater --max_seq_length, or data with answers",
        )
    limits = Limits(
        options.n_best_size,
        options.max_answer_length,
        options.null_score_diff_threshold if options.version_2_with_negative else None,
    )
    return Prepared(features, Scorer(table, features, limits))
