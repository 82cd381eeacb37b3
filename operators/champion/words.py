"""What people are told of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Comparison", "decision", "page"]


@dataclass(frozen=True)
class Comparison:
    """A candidate beside the champion, if there is one.

    Args:
        contenders: Fields of the candidate, and of the champion.
        scores: What they reached, on rows that neither saw.
        failed: Rates of candidates that failed.
        threshold: By how much the candidate has to be better.
    """

    contenders: Sequence[Mapping[str, Any]]
    scores: Sequence[float]
    failed: Sequence[float]
    threshold: float

    @property
    def gain(self) -> float:
        """By how much the candidate is better; without a champion, than nothing at all."""
        return self.scores[0] - sum(self.scores[1:])

    @property
    def text(self) -> str:
        """What was reached, what was needed, and which candidates failed."""
        score, *others = map(_percent, self.scores)
        other = f"the champion {others[0]}" if others else "there is no champion yet"
        needed = f"; needed was a lead of {100 * self.threshold:g} points" if self.threshold else ""
        first = f"The candidate of rate {self.contenders[0]['rate']:g} reached {score}, {other}{needed}."
        return " ".join([first, *self._failed()])

    @property
    def table(self) -> str:
        """The same as a table of Markdown."""
        rows = [
            ["", "candidate", "champion"],
            ["---"] * 3,
            ["digits told right, of those that neither saw", *map(_percent, self.scores)],
            ["rate", *(str(one["rate"]) for one in self.contenders)],
            ["trained on version", *(Path(one["data"]).name for one in self.contenders)],
            ["sha256", *(f"`{one['sha256'][:12]}`" for one in self.contenders)],
        ]
        lines = [f"| {' | '.join((*row, 'none yet')[:3])} |" for row in rows]
        return "\n".join([*lines, "", *self._failed()])

    def _failed(self) -> list[str]:
        rates = ", ".join(f"{rate:g}" for rate in self.failed)
        return [f"Candidates that failed: those of rate {rates}."] if rates else []


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


def page(dag_id: str, run_id: str) -> str:
    """Return the address of a DAG run's page with its trainings, in the web UI."""
    from airflow.sdk.configuration import conf

    base = (conf.get("api", "base_url", fallback="") or "").rstrip("/")
    return f"{base}/dags/{quote(dag_id, safe='')}/runs/{quote(run_id, safe='')}/plugin/training"


def _name(user: Any) -> str:
    return str(user.get("name") or user.get("id")) if isinstance(user, dict) else str(user)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
