"""Features: where answers are labelled, in every stretch of a context."""

from itertools import pairwise
from typing import Any

import pytest
from support.tiny_bert import tiny_tokenizer
from transformers import BertConfig, PretrainedConfig, RobertaConfig

from manycpu.pipeline.recipes.question_answering.features import (
    NO_OFFSET,
    NOWHERE,
    Shape,
    build,
    label,
    usable_length,
)
from manycpu.pipeline.spec.errors import BadInputError

TOKENIZER = tiny_tokenizer()
QUESTION = "Who drew the plans?"


def features(context: str, answer: str, shape: Shape, start: int | None = None) -> dict[str, list[Any]]:
    begin = context.index(answer) if start is None else start
    answers = [{"text": [answer], "answer_start": [begin]}]
    batch: dict[str, Any] = {"id": ["q"], "question": [QUESTION], "context": [context], "answers": answers}
    return build(batch, [41], TOKENIZER, shape)


def labelled(made: dict[str, list[Any]], index: int, context: str) -> str:
    offsets = made["offsets"][index]
    return context[offsets[made["start_positions"][index]][0] : offsets[made["end_positions"][index]][1]]


@pytest.mark.parametrize(
    "answer", ["odo", "In", "bridge.", "odo drew the plans", "In 1893 odo drew the plans of the bridge."]
)
def test_a_short_context_is_one_feature_with_its_answer(answer: str) -> None:
    context = "In 1893 odo drew the plans of the bridge."
    made = features(context, answer, Shape(64, 16))
    assert made["example"] == [41]
    assert labelled(made, 0, context) == answer


@pytest.mark.parametrize("answer", ["mira", "odo town pell", "town rusk town", "vex", "town mira town odo"])
def test_every_stretch_labels_only_an_answer_that_it_holds_whole(answer: str) -> None:
    context = "town mira town odo town pell town rusk town vex"
    # 8 tokens of question and specials leave 6 of the context, of which 3 are shared with the next stretch.
    made = features(context, answer, Shape(14, 3))
    begin = context.index(answer)
    held = []
    for index, offsets in enumerate(made["offsets"]):
        inside = [pair for pair in offsets if pair != NO_OFFSET]
        if inside[0][0] <= begin and begin + len(answer) <= inside[-1][1]:
            held.append(index)
            assert labelled(made, index, context) == answer
        else:
            assert made["start_positions"][index] == made["end_positions"][index] == NOWHERE
    assert 0 < len(held) < len(made["offsets"])


def test_an_answer_longer_than_every_stretch_is_nowhere() -> None:
    context = "town mira town odo town pell town rusk town vex"
    made = features(context, context, Shape(14, 3))
    assert len(made["offsets"]) == 3
    assert set(made["start_positions"] + made["end_positions"]) == {NOWHERE}


def test_stretches_share_the_stride_and_cover_the_context() -> None:
    context = "a river and a town and a bridge and a year and a river and a town"
    made = features(context, "bridge", Shape(14, 3))
    stretches = [[pair for pair in offsets if pair != NO_OFFSET] for offsets in made["offsets"]]
    assert all(before[-3:] == after[:3] for before, after in pairwise(stretches))
    assert {pair for stretch in stretches for pair in stretch} == {
        (start, start + len(word)) for start, word in _words(context)
    }
    assert all(len(ids) <= 14 for ids in made["input_ids"])


def _words(context: str) -> list[tuple[int, str]]:
    starts = [0, *(index + 1 for index, letter in enumerate(context) if letter == " ")]
    return list(zip(starts, context.split(), strict=True))


def test_the_question_has_no_offsets() -> None:
    made = features("In 1893 odo drew.", "odo", Shape(64, 16))
    question = len(TOKENIZER(QUESTION)["input_ids"])
    assert set(made["offsets"][0][:question]) == {NO_OFFSET}
    assert made["offsets"][0][-1] == NO_OFFSET


def test_accents_do_not_move_the_answer() -> None:
    context = "Éla Brönn, née Odö Šell, drew the plans."
    made = features(context, "Odö Šell", Shape(96, 16))
    assert labelled(made, 0, context) == "Odö Šell"


def test_the_right_one_of_two_occurrences_is_labelled() -> None:
    context = "odo and mira, then odo"
    made = features(context, "odo", Shape(64, 16), start=19)
    offsets = made["offsets"][0]
    assert offsets[made["start_positions"][0]] == (19, 22)


def test_an_answer_inside_of_a_token_is_labelled_with_the_token() -> None:
    # "town" is one token; "ow" is two letters of it.
    made = features("the town", "ow", Shape(64, 16))
    assert labelled(made, 0, "the town") == "town"


def test_an_answer_of_a_space_alone_still_has_an_end_after_its_start() -> None:
    first, last = label([NO_OFFSET, (0, 3), (4, 7)], {"text": [" "], "answer_start": [3]})
    assert first <= last


def test_several_examples_become_features_in_their_order() -> None:
    answers = [{"text": ["odo"], "answer_start": [0]}, {"text": [], "answer_start": []}]
    long = "odo " + "town " * 20
    batch: dict[str, Any] = {
        "id": ["a", "b"],
        "question": [QUESTION] * 2,
        "context": [long, "the town"],
        "answers": answers,
    }
    made = build(batch, [5, 6], TOKENIZER, Shape(14, 3))
    assert made["example"] == [5] * (len(made["example"]) - 1) + [6]
    assert made["start_positions"][0] == 7
    assert set(made["start_positions"][1:]) == {NOWHERE}
    assert {len(column) for column in made.values()} == {len(made["example"])}


def test_without_answers_there_are_no_labels() -> None:
    made = build(
        {"id": ["a"], "question": [QUESTION], "context": ["the town"]}, [0], TOKENIZER, Shape(64, 16)
    )
    assert "start_positions" not in made


def test_padding_on_request() -> None:
    made = features("the town", "town", Shape(64, 16, pad=True))
    assert [len(ids) for ids in made["input_ids"]] == [64]
    assert len(made["offsets"][0]) == 64


@pytest.mark.parametrize("shape", [Shape(14, 8), Shape(8, 0), Shape(4, 0)])
def test_lengths_without_room_for_the_context_are_refused(shape: Shape) -> None:
    with pytest.raises(BadInputError, match=r"run\.args: --max_seq_length \d+ leaves \d+ tokens.*'q'"):
        features("the old town", "town", shape)


@pytest.mark.parametrize(
    ("requested", "config", "usable"),
    [
        (384, {}, 384),
        (384, {"max_position_embeddings": 128}, 128),
        (384, {"max_position_embeddings": 44}, 40),
        (1000, {"max_position_embeddings": 2048}, 512),
        (384, {"max_position_embeddings": -1}, 384),
    ],
)
def test_the_length_is_limited_by_tokenizer_and_model(
    requested: int, config: dict[str, Any], usable: int
) -> None:
    assert usable_length(requested, TOKENIZER, PretrainedConfig(**config)) == usable


@pytest.mark.parametrize(
    "config", [BertConfig(max_position_embeddings=7), RobertaConfig(max_position_embeddings=1)]
)
def test_a_model_without_positions_for_a_batch_is_refused(config: PretrainedConfig) -> None:
    with pytest.raises(BadInputError, match=r"the model has [07] positions.*more positions"):
        usable_length(384, TOKENIZER, config)


def test_roberta_counts_positions_after_the_padding_token() -> None:
    config = RobertaConfig(max_position_embeddings=514, pad_token_id=1)
    assert usable_length(1000, TOKENIZER, config) == 512
    assert usable_length(384, TOKENIZER, RobertaConfig(max_position_embeddings=130)) == 128
