"""Turn the model's scores for starts and ends into answers."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from manycpu.pipeline.recipes.question_answering.features import NO_OFFSET, NOWHERE

__all__ = ["Answer", "Candidate", "Limits", "Scores", "answers", "candidates"]

Scores = npt.NDArray[np.floating[Any]]


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
