"""What people are told of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Comparison", "decision", "page"]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A candidate beside the champion, if there is one.

    Args:
        best: Fields of the candidate.
        champion: Fields of the champion; None: there is none yet.
        accuracy: Of the candidate, on rows that neither saw.
        before: Of the champion, on the same.
        threshold: By how much the candidate has to be better.
    """

    best: Mapping[str, Any]
    champion: Mapping[str, Any] | None = None
    accuracy: float
    before: float | None
    threshold: float

    @property
    def sentence(self) -> str:
        """Both figures, and what was needed."""
        other = "there is no champion yet" if self.before is None else f"the champion {_percent(self.before)}"
        needed = f"; needed were {_points(self.threshold)} more" if self.threshold else ""
        return (
            f"The candidate of rate {self.best['rate']:g} reached {_percent(self.accuracy)}, {other}{needed}."
        )

    @property
    def table(self) -> str:
        """The same as a table of Markdown."""
        rows = [
            ("", "candidate", "champion"),
            ("---", "---", "---"),
            ("digits told right, of those that neither saw", _percent(self.accuracy), _percent(self.before)),
            ("rate", *self._both("rate")),
            ("trained on version", *(Path(path).name for path in self._both("data"))),
            ("sha256", *(f"`{digest[:12]}`" for digest in self._both("sha256"))),
        ]
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join(lines)

    def _both(self, name: str) -> list[str]:
        return [str(one[name]) if one else "none yet" for one in (self.best, self.champion)]


def decision(*, better: bool, promoted: bool, approval: Mapping[str, Any] | None) -> str:
    """Say what was decided.

    Args:
        better: Whether the candidate was better by more than the threshold.
        promoted: Whether it was promoted.
        approval: What the approval task returned: nothing where nobody was asked, or it was not approved.
    """
    if not better:
        return "That is not enough: nothing was promoted, and the champion stays."
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


def _percent(share: float | None) -> str:
    return "none yet" if share is None else f"{100 * share:.1f} %"


def _points(share: float) -> str:
    return f"{100 * share:g} percentage points"
