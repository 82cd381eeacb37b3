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
    from transformers.trainer_utils import PredictionOutput

Scores = npt.NDArray[np.floating[Any]]

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


class Limits(NamedTuple):
    """How far to search: the n best starts and ends, and the most tokens of an answer.

    ``null_threshold`` is how much better "no answer" must score; None: every question has an answer.
    """

    n_best: int = 20
    max_tokens: int = 30
    null_threshold: float | None = None


class Candidate(NamedTuple):
    """A stretch of a context, by its characters, and the sum of its two scores (logits)."""

    score: float
    start: int
    end: int


class Answer(NamedTuple):
    """What is answered, the best candidates with their probabilities, and how much better "no answer" scores.

    ``null_odds`` None: every question has an answer.
    """

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
    """Yield the answer of each context; its text is empty if no answer was found, or "no answer" is better.

    Args:
        contexts: Context of each example.
        owners: Example of each feature.
        offsets: Per feature and token, its characters in the context, or NO_OFFSET.
        scores: Logits of starts and of ends, each (features, tokens); columns beyond a feature's tokens are
            padding.
        limits: How far to search.
    """
    features_of_example: list[list[int]] = [[] for _ in contexts]
    for feature, owner in enumerate(owners):
        features_of_example[owner].append(feature)
    starts, ends = scores
    for context, own_features in zip(contexts, features_of_example, strict=True):
        # Stretches of a context overlap: the same answer may have been found in two of them. Its better score
        # is sorted last, and stays in `by_span`.
        all_candidates = sorted(
            candidate
            for feature in own_features
            for candidate in candidates(offsets[feature], starts[feature], ends[feature], limits)
        )
        by_span = {(start, end): score for score, start, end in all_candidates}
        best = sorted(((score, *span) for span, score in by_span.items()), reverse=True)[: limits.n_best]
        texts = [(context[start:end], score) for score, start, end in best]  # the best first
        text = texts[0][0] if texts else ""
        no_answer_lead: float | None = None
        if limits.null_threshold is not None:
            # "No answer" scores as in the stretch where it is least likely: the answer may be there.
            null_scores = (
                float(starts[feature][NOWHERE] + ends[feature][NOWHERE]) for feature in own_features
            )
            no_answer_score = min(null_scores, default=0.0)
            no_answer_lead = no_answer_score - texts[0][1] if texts else float("inf")
            if no_answer_lead > limits.null_threshold:
                text = ""
            texts = sorted([*texts, ("", no_answer_score)], key=lambda pair: -pair[1])
        yield Answer(text, _with_probabilities(texts), no_answer_lead)


def _with_probabilities(texts: Sequence[tuple[str, float]]) -> list[dict[str, Any]]:
    """Return each text with its score and its probability: the softmax of the scores."""
    logits = np.array([score for _, score in texts])
    # The greatest score is subtracted so that exp cannot overflow.
    weights = np.exp(logits - logits.max()) if texts else logits
    probabilities = weights / weights.sum()
    return [
        {"text": text, "score": score, "probability": float(probability)}
        for (text, score), probability in zip(texts, probabilities, strict=True)
    ]


def candidates(
    offsets: Sequence[Sequence[int]], starts: Scores, ends: Scores, limits: Limits
) -> list[Candidate]:
    """List the candidates of a feature (a stretch of a context), best first.

    A candidate is a pair of one of the ``n_best`` starts and one of the ``n_best`` ends. Both are tokens of
    the context, the end is not before the start, and from start to end are at most ``max_tokens`` tokens.
    """
    spans = np.asarray(offsets)  # (tokens, 2): begin and end of each token, in characters
    length = len(spans)
    inside = spans[:, 0] != NO_OFFSET[0]
    first, last = (
        np.argsort(-np.where(inside, logits[:length], -np.inf), kind="stable")[: limits.n_best]
        for logits in (starts, ends)
    )
    tokens = last[None, :] - first[:, None] + 1  # of each pair: a row for each start, a column for each end
    # If few tokens are inside, the best starts and ends have others among them.
    valid = (tokens > 0) & (tokens <= limits.max_tokens) & inside[first][:, None] & inside[last][None, :]
    rows, columns = np.nonzero(valid)
    begin, end = first[rows], last[columns]
    scores = (starts[begin] + ends[end]).tolist()
    return sorted(map(Candidate, scores, spans[begin, 0].tolist(), spans[end, 1].tolist()), reverse=True)


class Scorer:
    """Answers the questions of a split; serves as ``compute_metrics`` of Hugging Face's Trainer.

    ``examples`` are the questions of the split, ``features`` the rows that the model gets, several for each
    long context.
    """

    def __init__(self, examples: "Dataset", features: "Dataset", limits: Limits) -> None:
        self.features = features
        self._examples, self._limits = examples, limits
        self._answers: dict[str, Answer] = {}

    def __call__(self, prediction: "EvalPrediction | PredictionOutput") -> dict[str, float]:
        """Answer every question by its features' logits; returns exact match and F1, in percent.

        The answers are kept, for :meth:`write`. Empty: there are no reference answers to compare with.

        Raises:
            ValueError: There is not one row of logits for each feature.
        """
        starts, ends = tuple(prediction.predictions)
        if not len(starts) == len(ends) == len(self.features):
            raise ValueError(f"{len(starts)} rows of scores for {len(self.features)} features")
        ids, features = self._examples["id"], self.features
        chosen = answers(
            self._examples["context"], features["example"], features["offsets"], (starts, ends), self._limits
        )
        self._answers = dict(zip(ids, chosen, strict=True))
        references: dict[str, list[str]] = {}
        if "answers" in self._examples.column_names:
            pairs = zip(ids, self._examples["answers"], strict=True)
            references = {key: reference["text"] for key, reference in pairs}
        if not any(references.values()):
            return {}
        return score({key: answer.text for key, answer in self._answers.items()}, references)

    def write(self, folder: Path, prefix: str) -> None:
        """Write the answers: ``PREFIX_predictions.json`` (id -> text) and ``PREFIX_nbest_predictions.json``.

        If questions may have no answer, write ``PREFIX_null_odds.json`` too.
        """
        files = {"predictions": "text", "nbest_predictions": "best"}
        if self._limits.null_threshold is not None:
            files["null_odds"] = "null_odds"
        for name, field in files.items():
            values = {key: getattr(answer, field) for key, answer in self._answers.items()}
            text = json.dumps(values, ensure_ascii=False, indent=1)
            (folder / f"{prefix}_{name}.json").write_text(text + "\n", encoding="utf-8")


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
    """Compute ``exact_match`` and ``f1`` in percent, over all references; a missing prediction counts as 0.

    If some questions have no answer, compute both also for each kind of question, as version 2.0 does. Their
    names begin with ``has_answer_`` or ``no_answer_``.

    Args:
        predictions: Id of a question -> the predicted answer.
        references: Id of a question -> its reference answers; empty: it has no answer.
    """
    groups = {"": list(references)}  # prefix of the names -> ids of the questions
    if unanswerable := [key for key, answers in references.items() if not answers]:
        answerable = [key for key, answers in references.items() if answers]
        groups |= {"has_answer_": answerable, "no_answer_": unanswerable}
    results: dict[str, float] = {}
    for prefix, keys in groups.items():
        if not keys:
            continue
        for name, measure in (("exact_match", exact_match), ("f1", f1)):
            total = sum(_best_over_references(measure, predictions.get(key), references[key]) for key in keys)
            results[prefix + name] = 100 * total / len(keys)
    return results


def _best_over_references(
    measure: Callable[[str, str], float], prediction: str | None, answers: Sequence[str]
) -> float:
    """Return the best score of a prediction over the reference answers; None: 0."""
    if prediction is None:
        return 0.0
    # Version 2.0 leaves out references that normalise to nothing; with none left, the answer is "no answer".
    references = [answer for answer in answers if normalize(answer)] or [""]
    return max(measure(prediction, answer) for answer in references)
