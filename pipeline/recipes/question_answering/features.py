"""Make features: stretches of a context that fit the model, each with its question and the answer's place.

A context longer than a feature becomes several, which share ``doc_stride`` tokens. A stretch that does not
hold the whole answer is labelled with its first token (special, as a rule), which also means "no answer".
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import BatchEncoding, PretrainedConfig, PreTrainedTokenizerBase

from manycpu.pipeline.spec.errors import BadInputError

NO_OFFSET = (-1, -1)
"""Offsets of tokens that are not of the context."""
NOWHERE = 0
"""The token that stands for "not in this stretch"."""
MULTIPLE = 8
"""Tokens of a batch are a multiple of it, which suits the matrix units."""
_CONTEXT = 1  # number of the context in a pair; the question is 0


class Shape(NamedTuple):
    """Lengths in tokens: of a whole feature, and of what two stretches share; ``pad``: pad to that length."""

    length: int
    stride: int
    pad: bool = False


def usable_length(requested: int, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> int:
    """Return a feature's length in tokens: ``requested``, or less if tokenizer or model take less.

    Raises:
        BadInputError: The model has positions for less than the shortest batch.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return min(requested, tokenizer.model_max_length)
    if config.model_type in ("camembert", "longformer", "mpnet", "roberta", "xlm-roberta"):
        # RoBERTa and related models begin to count after the padding token.
        positions -= (config.pad_token_id or 0) + 1
    if positions < MULTIPLE:
        message = f"the model has {max(positions, 0)} positions: a batch has {MULTIPLE} tokens or more"
        raise BadInputError(message, field="run.model", fix="Choose a model with more positions")
    # A batch is padded up to a multiple, which must not be more than the positions.
    return min(requested, tokenizer.model_max_length, positions // MULTIPLE * MULTIPLE)


def build(
    batch: Mapping[str, Sequence[Any]], rows: Sequence[int], tokenizer: PreTrainedTokenizerBase, shape: Shape
) -> dict[str, list[Any]]:
    """Make the features of a batch of examples; raises BadInputError if a question leaves no room.

    Args:
        batch: Columns id, question, context, and answers where there are labels to make.
        rows: Number of each example in its table.
        tokenizer: A fast one, which knows offsets; it pads on the right.
        shape: Lengths.

    Returns:
        Columns of equal length: what the model takes, ``start_positions`` and ``end_positions`` (tokens)
        where there are answers, ``example`` (the row) and ``offsets`` (pairs of characters in the context).
    """
    questions = [question.strip() for question in batch["question"]]
    _check_room(questions, batch["id"], tokenizer, shape)
    encoded: BatchEncoding = tokenizer(
        questions,
        list(batch["context"]),
        truncation="only_second",
        max_length=shape.length,
        stride=shape.stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding="max_length" if shape.pad else False,
    )
    owners = encoded["overflow_to_sample_mapping"]  # for each feature, the number of its example in the batch
    # Tokens of the question and special tokens get no offsets.
    offsets = [
        [
            tuple(pair) if part == _CONTEXT else NO_OFFSET
            for pair, part in zip(encoded["offset_mapping"][index], encoded.sequence_ids(index), strict=True)
        ]
        for index in range(len(owners))
    ]
    columns: dict[str, list[Any]] = {
        name: encoded[name] for name in tokenizer.model_input_names if name in encoded
    }
    columns |= {"example": [rows[owner] for owner in owners], "offsets": offsets}
    if "answers" not in batch:
        return columns
    spans = [label(places, batch["answers"][owner]) for places, owner in zip(offsets, owners, strict=True)]
    return columns | {
        "start_positions": [start for start, _ in spans],
        "end_positions": [end for _, end in spans],
    }


def _check_room(
    questions: list[str], ids: Sequence[str], tokenizer: PreTrainedTokenizerBase, shape: Shape
) -> None:
    """Raise BadInputError if the longest question leaves too little room for a stretch of the context.

    The room must be more than what two stretches share, or a stretch would have nothing new.
    """
    lengths = [len(tokens) for tokens in tokenizer(questions, add_special_tokens=False)["input_ids"]]
    longest = max(lengths)
    room = shape.length - longest - tokenizer.num_special_tokens_to_add(pair=True)
    if room <= shape.stride:  # a stretch would have nothing that the one before it has not
        raise BadInputError(
            f"--max_seq_length {shape.length} leaves {max(room, 0)} tokens for the context beside question "
            f"{ids[lengths.index(longest)]!r} of {longest} tokens: not more than --doc_stride "
            f"{shape.stride}",
            field="run.args",
            fix="Give a greater --max_seq_length or a smaller --doc_stride",
        )


def label(offsets: Sequence[tuple[int, int]], answers: Mapping[str, Sequence[Any]]) -> tuple[int, int]:
    """Return the first and last token of the first answer; NOWHERE twice: the stretch has not all of it.

    Args:
        offsets: For each token its begin and end in the context, in characters, or NO_OFFSET.
        answers: The texts of the answers, and where they begin in the context; empty: there is no answer.
    """
    if not answers["text"]:
        return NOWHERE, NOWHERE
    begin = answers["answer_start"][0]
    end = begin + len(answers["text"][0])
    inside = [token for token, pair in enumerate(offsets) if tuple(pair) != NO_OFFSET]
    if not inside or offsets[inside[0]][0] > begin or offsets[inside[-1]][1] < end:
        return NOWHERE, NOWHERE
    # An answer may begin or end inside of a token: the tokens that cover it are the answer's.
    first = max(token for token in inside if offsets[token][0] <= begin)
    last = min(token for token in inside if offsets[token][1] >= end)
    # A character may be several tokens with the same offsets: then `first` is the last of these.
    return first, max(first, last)
