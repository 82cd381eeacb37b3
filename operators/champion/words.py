"""What people are told of a comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Comparison", "Tried", "decision", "places"]

_METRIC: Final = "accuracy"
_FINEST: Final = 4  # digits of a percentage behind the point


class Tried(NamedTuple):
    """A candidate of the sweep."""

    rate: float
    accuracy: float | None
    """On the rows that candidates are chosen by; None: it failed."""
    page: str
    """Address of its training."""
    chosen: bool


@dataclass(frozen=True)
class Comparison:
    """A candidate beside the champion, if there is one.

    Args:
        contenders: Fields of the candidate, and of the champion.
        scores: What they reached, on rows that neither saw.
        candidates: All of the sweep.
        threshold: By how much the candidate has to be better.
    """

    contenders: Sequence[Mapping[str, Any]]
    scores: Sequence[float]
    candidates: Sequence[Tried]
    threshold: float

    @property
    def gain(self) -> float:
        """By how much the candidate is better; without a champion, than nothing at all."""
        return self.scores[0] - sum(self.scores[1:])

    @property
    def text(self) -> str:
        """What was reached, what was needed, and which candidates failed."""
        score, *others = _percents(self.scores)
        reached = f"The candidate of learning rate {self.contenders[0]['rate']:g} reached {_METRIC} {score}"
        other = f"the champion {others[0]}" if others else "there is no champion yet"
        rates = ", ".join(f"{one.rate:g}" for one in self.candidates if one.accuracy is None)
        failed = f" Candidates that failed: those of learning rate {rates}." if rates else ""
        return f"{reached} on digits that neither saw, {other}; needed was {self._needed}.{failed}"

    @property
    def body(self) -> str:
        """The same as Markdown, with a table of the two, and one of all candidates."""
        page = next((one.page for one in self.candidates if one.chosen), None)
        link = [f"[The candidate's training]({page})"] if page else []
        return "\n\n".join([self.text, self._contenders(), *link, self._sweep()]) + "\n"

    @property
    def _needed(self) -> str:
        points = f"{100 * self.threshold:g}"
        if len(self.scores) == 1:
            return f"more than {points} %"
        return f"a lead of more than {points} points" if self.threshold else "any lead"

    def _contenders(self) -> str:
        rows = [
            [f"{_METRIC} on digits that neither saw", *_percents(self.scores)],
            ["learning rate", *(f"{one['rate']:g}" for one in self.contenders)],
            ["trained on version", *(Path(one["data"]).name for one in self.contenders)],
            ["sha256", *(f"`{one['sha256'][:12]}`" for one in self.contenders)],
        ]
        return _table(["", "candidate", "champion"], [[*row, "none yet"][:3] for row in rows])

    def _sweep(self) -> str:
        """List the candidates, the best first."""
        found = sorted(self.candidates, key=lambda one: math.inf if one.accuracy is None else -one.accuracy)
        reached = iter(_percents([one.accuracy for one in found if one.accuracy is not None]))
        rows = [
            [
                f"[{one.rate:g}]({one.page})",
                "failed" if one.accuracy is None else next(reached),
                "the candidate" if one.chosen else "",
            ]
            for one in found
        ]
        return _table(["learning rate", f"{_METRIC} on digits to choose by", ""], rows)


def decision(*, better: bool, promoted: bool, approval: Mapping[str, Any] | None) -> str:
    """Say what was decided.

    Args:
        better: Whether the candidate was better by more than the threshold.
        promoted: Whether it was promoted.
        approval: What the approval task returned: nothing where nobody was asked, or it was not approved.
    """
    if not better:
        return "That is not enough: nothing was promoted."
    if not promoted:
        return "It was not approved: nothing was promoted."
    if approval is None:
        return "The threshold decided: it was promoted."
    return f"It was promoted: {_name(approval.get('responded_by_user'))} approved."


def places(model: str, predictions: str) -> str:
    """Say where what a promotion has made is."""
    return f"The model is in {model}, its predictions are in {predictions}."


def _name(user: Any) -> str:
    return str(user.get("name") or user.get("id")) if isinstance(user, dict) else str(user)


def _percents(shares: Sequence[float]) -> list[str]:
    """Write shares alike, with as few digits as tell them apart."""
    for digits in range(1, _FINEST + 1):
        texts = [f"{100 * share:.{digits}f} %" for share in shares]
        if len(set(texts)) == len(set(shares)):
            break
    return texts


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
