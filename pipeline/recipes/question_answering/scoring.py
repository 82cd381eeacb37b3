"""Turn the model's scores of starts and ends into answers, and answers into exact match and F1.

Source: evaluate-v1.1.py and evaluate-v2.0.py of https://rajpurkar.github.io/SQuAD-explorer/ (Rajpurkar et al.
2016, section 6.1; 2018). Both compare words after lower-casing and dropping punctuation, the articles a, an
and the, and extra spaces; a question's score is the best over its reference answers.

>>> exact_match("The Eiffel tower.", "eiffel Tower")
1.0
>>> round(f1("in the year 1889", "1889"), 2)
0.5
"""

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from manycpu.pipeline.recipes.question_answering.features import NO_OFFSET, NOWHERE

if TYPE_CHECKING:  # asking a model questions needs no datasets
    from datasets import Dataset  # type: ignore[import-untyped]
    from transformers import EvalPrediction

__all__ = [
    "Answer",
    "Candidate",
    "Limits",
    "Scorer",
    "Scores",
    "answers",
    "candidates",
    "exact_match",
    "f1",
    "normalize",
    "score",
]

Scores = npt.NDArray[np.floating[Any]]

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


class Limits(NamedTuple):
    """How far to search; ``null_threshold`` None: every question has an answer."""

    n_best: int = 20
    max_tokens: int = 30
    null_threshold: float | None = None


class Candidate(NamedTuple):
    """A stretch of a context, by its characters, and the sum of its two scores (logits)."""

    score: float
    start: int
    end: int


class Answer(NamedTuple):
    """What is answered, the best candidates with their probabilities, and how much better "none" scores."""

    text: str
    best: list[dict[str, Any]]
    null_odds: float | None = None


def answers(
    contexts: Sequence[str],
    owners: Sequence[int],
    offsets: Sequence[Sequence[Sequence[int]]],
    scores: tuple[Scores, Scores],
    limits: Limits,
) -> Iterator[Answer]:
    """Choose an answer for each example.

    Args:
        contexts: Context of each example.
        owners: Example of each feature.
        offsets: Per feature and token, its characters in the context, or NO_OFFSET.
        scores: Logits of starts and of ends, each (features, tokens); columns beyond a feature's tokens are
            padding.
        limits: How far to search.

    Yields:
        One answer for each context, in their order; an empty text when nothing could be chosen.
    """
    features: list[list[int]] = [[] for _ in contexts]
    for feature, owner in enumerate(owners):
        features[owner].append(feature)
    for context, own in zip(contexts, features, strict=True):
        own_candidates = [
            candidate
            for feature in own
            for candidate in candidates(offsets[feature], scores[0][feature], scores[1][feature], limits)
        ]
        null = min(
            (float(scores[0][feature][NOWHERE] + scores[1][feature][NOWHERE]) for feature in own), default=0.0
        )
        yield _choose(context, own_candidates, null, limits)


def candidates(
    offsets: Sequence[Sequence[int]], starts: Scores, ends: Scores, limits: Limits
) -> list[Candidate]:
    """List a feature's candidates: pairs of its best starts and ends that make sense, best first."""
    pairs = np.asarray(offsets)
    length = len(pairs)
    inside = pairs[:, 0] != NO_OFFSET[0]
    first = _top(np.where(inside, starts[:length], -np.inf), limits.n_best)
    last = _top(np.where(inside, ends[:length], -np.inf), limits.n_best)
    tokens = last[None, :] - first[:, None] + 1
    sense = (tokens > 0) & (tokens <= limits.max_tokens) & inside[first][:, None] & inside[last][None, :]
    rows, columns = np.nonzero(sense)
    unsorted = [
        Candidate(
            float(starts[first[row]] + ends[last[column]]),
            int(pairs[first[row], 0]),
            int(pairs[last[column], 1]),
        )
        for row, column in zip(rows, columns, strict=True)
    ]
    return sorted(unsorted, reverse=True)


def _top(values: Scores, count: int) -> npt.NDArray[np.intp]:
    return np.argsort(-values, kind="stable")[:count]


def _choose(context: str, unsorted: list[Candidate], null: float, limits: Limits) -> Answer:
    # Stretches of a context overlap: the same answer may have been found in two of them.
    unique = {(candidate.start, candidate.end): candidate for candidate in sorted(unsorted)}
    best = sorted(unique.values(), reverse=True)[: limits.n_best]
    texts = [(context[candidate.start : candidate.end], candidate.score) for candidate in best]
    if limits.null_threshold is None:
        return Answer(texts[0][0] if texts else "", _listed(texts))
    odds = null - texts[0][1] if texts else float("inf")
    listed = _listed(sorted([*texts, ("", null)], key=lambda pair: -pair[1]))
    return Answer("" if odds > limits.null_threshold else texts[0][0], listed, odds)


def _listed(texts: list[tuple[str, float]]) -> list[dict[str, Any]]:
    scores = np.array([score for _, score in texts])
    shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum() if texts else scores
    return [
        {"text": text, "score": score, "probability": float(share)}
        for (text, score), share in zip(texts, shares, strict=True)
    ]


class Scorer:
    """Answers the questions of a split; serves as ``compute_metrics`` of Hugging Face's Trainer.

    Args:
        examples: The split, with columns id, context, and answers where there are any.
        features: Its features, in the order in which their scores will come.
        limits: How far to search.
    """

    def __init__(self, examples: "Dataset", features: "Dataset", limits: Limits) -> None:
        self._examples, self._features, self._limits = examples, features, limits
        self.answers: dict[str, Answer] = {}
        """Question's id -> its latest answer."""

    def __call__(self, prediction: "EvalPrediction") -> dict[str, float]:
        """Compute exact_match and f1, in percent."""
        return self.score(*prediction.predictions)

    def score(self, starts: Scores, ends: Scores) -> dict[str, float]:
        """Answer every question.

        Args:
            starts: Logits, (features, tokens).
            ends: Logits, (features, tokens).

        Returns:
            exact_match and f1, in percent; nothing where the split has no reference answers.

        Raises:
            ValueError: There are not as many rows as features.
        """
        if not len(starts) == len(ends) == len(self._features):
            raise ValueError(f"{len(starts)} rows of scores for {len(self._features)} features")
        keys = self._examples["id"]
        chosen = answers(
            self._examples["context"],
            self._features["example"],
            self._features["offsets"],
            (starts, ends),
            self._limits,
        )
        self.answers = dict(zip(keys, chosen, strict=True))
        references: dict[str, list[str]] = {}
        if "answers" in self._examples.column_names:
            pairs = zip(keys, self._examples["answers"], strict=True)
            references = {key: listed["text"] for key, listed in pairs}
        if not any(references.values()):
            return {}
        return score({key: answer.text for key, answer in self.answers.items()}, references)

    def write(self, folder: Path, prefix: str) -> None:
        """Write ``PREFIX_predictions.json`` (id -> text), the n best, and the odds of no answer, if any."""
        texts = {key: answer.text for key, answer in self.answers.items()}
        best = {key: answer.best for key, answer in self.answers.items()}
        _dump(folder / f"{prefix}_predictions.json", texts)
        _dump(folder / f"{prefix}_nbest_predictions.json", best)
        if self._limits.null_threshold is not None:
            odds = {key: answer.null_odds for key, answer in self.answers.items()}
            _dump(folder / f"{prefix}_null_odds.json", odds)


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def normalize(text: str) -> str:
    """Lower-case; drop ASCII punctuation, articles and extra spaces, in this order."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    """Return 1.0 when both are the same after normalising, otherwise 0.0."""
    return float(normalize(prediction) == normalize(reference))


def f1(prediction: str, reference: str) -> float:
    """Compute the harmonic mean of precision and recall over words, as multisets; 0.0 without a common word.

    An empty reference means that there is no answer: then 1.0 for an empty prediction, as in version 2.0.
    """
    predicted, expected = normalize(prediction).split(), normalize(reference).split()
    if not predicted or not expected:
        return float(predicted == expected)
    common = sum((Counter(predicted) & Counter(expected)).values())
    return 2 * common / (len(predicted) + len(expected))


def score(predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Score predictions (id -> text) against references (id -> answers, none for an unanswerable question).

    Returns:
        ``exact_match`` and ``f1`` in percent, over all references: a question without a prediction counts
        as 0. Where some questions have no answer, also for both kinds apart, as version 2.0 reports them.
    """
    answerable = [key for key, answers in references.items() if answers]
    unanswerable = [key for key, answers in references.items() if not answers]
    totals = _means(predictions, references, list(references))
    if not unanswerable:
        return totals
    has = _means(predictions, references, answerable, prefix="has_answer_")
    no = _means(predictions, references, unanswerable, prefix="no_answer_")
    return totals | has | no


def _means(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]], keys: list[str], prefix: str = ""
) -> dict[str, float]:
    if not keys:
        return {}
    return {
        prefix + name: 100
        * sum(_best(measure, predictions.get(key), references[key]) for key in keys)
        / len(keys)
        for name, measure in (("exact_match", exact_match), ("f1", f1))
    }


def _best(measure: Callable[[str, str], float], prediction: str | None, answers: Sequence[str]) -> float:
    if prediction is None:
        return 0.0
    # Version 2.0 leaves out references that normalise to nothing; with none left, the answer is "no answer".
    references = [answer for answer in answers if normalize(answer)] or [""]
    return max(measure(prediction, answer) for answer in references)
