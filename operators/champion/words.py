"""Texts that describe a comparison of models, and the decision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Comparison", "Tried", "decision"]

_METRIC: Final = "accuracy"
_MAX_DECIMALS: Final = 4  # of a percentage


class Tried(NamedTuple):
    """A candidate of the sweep."""

    rate: float
    accuracy: float | None
    """On the rows for choosing; None: it failed."""
    page: str
    """URL of its training's page."""
    chosen: bool


@dataclass(frozen=True)
class Comparison:
    """A candidate beside the champion, if there is one.

    Args:
        contenders: Fields of the candidate, and of the champion.
        scores: Their accuracy on rows that neither has seen.
        candidates: All candidates of the sweep.
        threshold: How much better the candidate has to be.
    """

    contenders: Sequence[Mapping[str, Any]]
    scores: Sequence[float]
    candidates: Sequence[Tried]
    threshold: float

    @property
    def gain(self) -> float:
        """How much better the candidate is than the champion, or than 0 without a champion."""
        return self.scores[0] - sum(self.scores[1:])

    @property
    def text(self) -> str:
        """The accuracy reached, the accuracy needed, and the candidates that failed."""
        score, *others = _percents(self.scores)
        reached = f"The candidate of learning rate {self.contenders[0]['rate']:g} reached {_METRIC} {score}"
        other = f"the champion {others[0]}" if others else "there is no champion yet"
        rates = ", ".join(f"{one.rate:g}" for one in self.candidates if one.accuracy is None)
        failed = f" Candidates that failed: those of learning rate {rates}." if rates else ""
        points = f"{100 * self.threshold:g}"
        needed = f"a lead of more than {points} points" if self.threshold else "any lead"
        if not others:
            needed = f"more than {points} %"
        return f"{reached} on digits that neither saw, {other}; needed was {needed}.{failed}"

    @property
    def body(self) -> str:
        """The text as Markdown, with a table of the two models and one of all candidates."""
        page = next((one.page for one in self.candidates if one.chosen), None)
        link = [f"[The candidate's training]({page})"] if page else []
        rows = [
            [f"{_METRIC} on digits that neither saw", *_percents(self.scores)],
            ["learning rate", *(f"{one['rate']:g}" for one in self.contenders)],
            ["trained on version", *(Path(one["data"]).name for one in self.contenders)],
            ["sha256", *(f"`{one['sha256'][:12]}`" for one in self.contenders)],
        ]
        contenders = _table(["", "candidate", "champion"], [[*row, "none yet"][:3] for row in rows])
        best_first = sorted(
            self.candidates, key=lambda one: math.inf if one.accuracy is None else -one.accuracy
        )
        reached = iter(_percents([one.accuracy for one in best_first if one.accuracy is not None]))
        rows = [
            [
                f"[{one.rate:g}]({one.page})",
                "failed" if one.accuracy is None else next(reached),
                "the candidate" if one.chosen else "",
            ]
            for one in best_first
        ]
        sweep = _table(["learning rate", f"{_METRIC} on digits to choose by", ""], rows)
        return "\n\n".join([self.text, contenders, *link, sweep]) + "\n"


def decision(*, better: bool, promoted: bool, approval: Mapping[str, Any] | None) -> str:
    """Return the decision as a sentence.

    Args:
        better: Whether the candidate was better by more than the threshold.
        promoted: Whether it was promoted.
        approval: What the approval task returned; None: no person was asked, or the person rejected it.
    """
    if not better:
        return "That is not enough: nothing was promoted."
    if not promoted:
        return "It was not approved: nothing was promoted."
    if approval is None:
        return "The threshold decided: it was promoted."
    user: Any = approval.get("responded_by_user")
    name = user.get("name") or user.get("id") if isinstance(user, dict) else user
    return f"It was promoted: {name} approved."


def _percents(shares: Sequence[float]) -> list[str]:
    """Format shares as percentages, all with as few decimals as distinguish them."""
    for digits in range(1, _MAX_DECIMALS + 1):
        texts = [f"{100 * share:.{digits}f} %" for share in shares]
        if len(set(texts)) == len(set(shares)):
            break
    return texts


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
