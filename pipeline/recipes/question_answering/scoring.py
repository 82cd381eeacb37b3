"""Turn the scores of a whole split, gathered from all ranks, into answers and metrics."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset  # type: ignore[import-untyped]
from transformers import EvalPrediction

from manycpu.pipeline.recipes.question_answering import squad_metrics
from manycpu.pipeline.recipes.question_answering.postprocess import Answer, Limits, Scores, answers

__all__ = ["Scorer"]


class Scorer:
    """Answers the questions of a split; what Hugging Face's Trainer calls ``compute_metrics``.

    Args:
        examples: The split, with columns id, context, and answers where there are any.
        features: Its features, in the order in which their scores will come.
        limits: How far to search.
    """

    def __init__(self, examples: Dataset, features: Dataset, limits: Limits) -> None:
        self._examples, self._features, self._limits = examples, features, limits
        self.answers: dict[str, Answer] = {}
        """Question's id -> what was answered last."""

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
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
        references = self._references()
        if not any(references.values()):
            return {}
        return squad_metrics.score({key: answer.text for key, answer in self.answers.items()}, references)

    def _references(self) -> dict[str, list[str]]:
        if "answers" not in self._examples.column_names:
            return {}
        pairs = zip(self._examples["id"], self._examples["answers"], strict=True)
        return {key: answers["text"] for key, answers in pairs}

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
