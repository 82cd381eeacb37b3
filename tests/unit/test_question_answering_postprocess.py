"""From scores to answers."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from manycpu.pipeline.recipes.question_answering.features import NO_OFFSET
from manycpu.pipeline.recipes.question_answering.scoring import (
    Answer,
    Limits,
    Scores,
    answers,
    candidates,
)

CONTEXT = "odo drew the plans"
# A question of two tokens between specials, then the context's four words.
OFFSETS = [NO_OFFSET] * 3 + [(0, 3), (4, 8), (9, 12), (13, 18)] + [NO_OFFSET]


def scores(length: int = 8, **high: float) -> Scores:
    """Make a row of zeros but for some tokens, written ``t3=5.0``."""
    row = np.zeros(length, dtype=np.float32)
    for token, value in high.items():
        row[int(token[1:])] = value
    return row


def one(starts: Scores, ends: Scores, limits: Limits, offsets: Sequence[tuple[int, int]] = OFFSETS) -> Answer:
    (answer,) = answers([CONTEXT], [0], [offsets], (starts[None], ends[None]), limits)
    return answer


def test_the_best_pair_is_the_answer() -> None:
    answer = one(scores(t3=5, t5=4), scores(t4=5, t6=1), Limits())
    assert answer.text == "odo drew"
    assert [entry["text"] for entry in answer.best[:2]] == ["odo drew", "odo drew the plans"]


def test_probabilities_are_those_of_the_scores() -> None:
    answer = one(scores(t3=2, t6=1), scores(t3=2, t6=1), Limits(n_best=2))
    assert [entry["score"] for entry in answer.best] == [4.0, 3.0]
    assert answer.best[0]["probability"] == pytest.approx(math.exp(4) / (math.exp(4) + math.exp(3)))
    assert sum(entry["probability"] for entry in answer.best) == pytest.approx(1)


def test_an_end_before_its_start_is_no_answer() -> None:
    assert one(scores(t6=9, t3=1), scores(t3=9), Limits()).text == "odo"


def test_tokens_outside_of_the_context_are_no_answer() -> None:
    assert one(scores(t1=99, t3=1), scores(t7=99, t3=1), Limits()).text == "odo"


def test_an_answer_is_at_most_as_long_as_allowed() -> None:
    starts, ends = scores(t3=5), scores(t6=5, t4=3)
    assert one(starts, ends, Limits(max_tokens=4)).text == CONTEXT
    assert one(starts, ends, Limits(max_tokens=3)).text == "odo drew"


def test_only_the_n_best_starts_and_ends_are_combined() -> None:
    # The best start lies after the best end, and with one of each there is no other pair.
    assert one(scores(t6=9), scores(t3=9), Limits(n_best=1)).text == ""


def test_padding_of_a_row_is_left_out() -> None:
    padded = np.concatenate([scores(t3=1), np.full(4, 100, dtype=np.float32)])
    assert one(padded, padded, Limits()).text == "odo"


def test_features_of_an_example_compete() -> None:
    two = [NO_OFFSET, (0, 3), (4, 8)], [NO_OFFSET, (4, 8), (9, 12)]
    starts = np.array([[0, 1, 2], [0, 3, 0]], dtype=np.float32)
    (answer,) = answers([CONTEXT], [0, 0], two, (starts, starts), Limits())
    assert answer.text == "drew"
    # It was found in both stretches and is listed once, with its better score.
    assert [(entry["text"], entry["score"]) for entry in answer.best if entry["text"] == "drew"] == [
        ("drew", 6.0)
    ]


def test_features_belong_to_their_examples() -> None:
    contexts = ["odo", "no feature", "pell"]
    offsets = [[NO_OFFSET, (0, 3)], [NO_OFFSET, (0, 4)]]
    row = np.array([[0, 1], [0, 1]], dtype=np.float32)
    found = answers(contexts, [0, 2], offsets, (row, row), Limits())
    assert [answer.text for answer in found] == ["odo", "", "pell"]


def test_no_answer_needs_to_beat_the_best_answer_by_the_threshold() -> None:
    starts, ends = scores(t0=3, t3=2), scores(t0=3, t3=2)
    assert one(starts, ends, Limits(null_threshold=None)).null_odds is None
    with_null = one(starts, ends, Limits(null_threshold=0.0))
    assert (with_null.text, with_null.null_odds) == ("", 2.0)
    assert with_null.best[0]["text"] == ""
    assert one(starts, ends, Limits(null_threshold=2.0)).text == "odo"


def test_every_stretch_must_say_that_there_is_no_answer() -> None:
    two = [NO_OFFSET, (0, 3)], [NO_OFFSET, (4, 8)]
    starts = np.array([[9, 1], [0, 2]], dtype=np.float32)
    (answer,) = answers([CONTEXT], [0, 0], two, (starts, starts), Limits(null_threshold=0.0))
    assert (answer.text, answer.null_odds) == ("drew", -4.0)


def test_candidates_come_best_first() -> None:
    rng = np.random.default_rng(0)
    found = candidates(OFFSETS, rng.normal(size=8), rng.normal(size=8), Limits())
    assert len(found) == 10  # of 4 tokens: 4 + 3 + 2 + 1 pairs
    assert [candidate.score for candidate in found] == sorted(
        (candidate.score for candidate in found), reverse=True
    )
