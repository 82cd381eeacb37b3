"""Exact match and F1 by the official definition, on cases worked out by hand."""

import doctest

import pytest

from manycpu.pipeline.recipes.question_answering import scoring
from manycpu.pipeline.recipes.question_answering.scoring import exact_match, f1, normalize, score


def test_the_examples_hold() -> None:
    tried = doctest.testmod(scoring)
    assert (tried.failed, tried.attempted) == (0, 2)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Eiffel Tower.", "eiffel tower"),
        ("an apple a day", "apple day"),
        ("theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("rock-and-roll", "rockandroll"),
        ("«Привет», a!", "«привет»"),
        ("The", ""),
    ],
)
def test_normalizing_drops_case_punctuation_and_articles(text: str, normal: str) -> None:
    assert normalize(text) == normal


def test_exact_match_compares_normalised_texts() -> None:
    assert exact_match("the Eiffel Tower!", "Eiffel tower") == 1.0
    assert exact_match("Eiffel", "Eiffel tower") == 0.0


def test_f1_counts_common_words_as_multisets() -> None:
    assert f1("cat sat", "cat sat") == 1.0
    assert f1("cat", "dog") == 0.0
    assert f1("in 1889", "1889") == pytest.approx(2 / 3)
    # Two of three words, of which the reference has one: common 1, precision 1/3, recall 1/2.
    assert f1("no no yes", "no maybe") == pytest.approx(2 / 5)


def test_the_best_reference_counts() -> None:
    references = {"q": ["in the year 1889", "1889"]}
    assert score({"q": "1889"}, references) == {"exact_match": 100.0, "f1": 100.0}


def test_a_question_without_a_prediction_counts_as_wrong() -> None:
    references = {"q1": ["1889"], "q2": ["1890"]}
    assert score({"q1": "1889"}, references) == {"exact_match": 50.0, "f1": 50.0}


def test_questions_without_an_answer_are_scored_apart() -> None:
    references: dict[str, list[str]] = {"has": ["1889"], "has2": ["the tower"], "no": [], "no2": []}
    predictions = {"has": "1889", "has2": "", "no": "", "no2": "1890"}
    assert score(predictions, references) == {
        "exact_match": 50.0,
        "f1": 50.0,
        "has_answer_exact_match": 50.0,
        "has_answer_f1": 50.0,
        "no_answer_exact_match": 50.0,
        "no_answer_f1": 50.0,
    }


def test_a_reference_that_is_only_an_article_is_no_reference_beside_others() -> None:
    assert score({"q": "tower"}, {"q": ["the", "tower"]})["exact_match"] == 100.0
    assert score({"q": "a"}, {"q": ["the"]}) == {"exact_match": 100.0, "f1": 100.0}
