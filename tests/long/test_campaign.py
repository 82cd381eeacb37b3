"""A campaign of random faults on the test cluster, in rounds of users at the same time (docs/testing.md).

Planted bugs show that its judge is not blind.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from cluster.faults import Faults
from cluster.fixtures import TestCluster
from cluster.settings import MACHINE_ADDRESS, PROJECT
from cluster.space import Space
from support.campaign import USERS, Move, Plan, plans, play
from support.campaign_faults import FAULTS
from support.campaign_judge import breaches
from support.campaign_users import Round
from support.outside_history import History, reachable
from support.planted_bugs import plant

SEED: Final = int(os.environ.get("MANYCPU_SEED", "1"))
_FIRST, _, _LAST = os.environ.get("MANYCPU_TRIALS", "3").rpartition("-")
TRIALS: Final = range(int(_FIRST or 1), int(_LAST) + 1)
HISTORIES: Final = PROJECT / ".cache" / "campaign"


def rounds() -> Iterator[Any]:
    """Yield the trials of each round; it has the cluster to itself if a fault for all is among them."""
    for first in TRIALS[::USERS]:
        chosen = plans(SEED, range(first, min(first + USERS, TRIALS.stop)))
        of_all = any(FAULTS[move.fault].strikes_all for plan in chosen for move in plan.moves)
        yield pytest.param(chosen, marks=[pytest.mark.alone] if of_all else [], id=f"{SEED}-{first}")


@pytest.mark.parametrize("chosen", list(rounds()))
def test_all_that_is_promised_holds(
    chosen: Sequence[Plan], cluster: TestCluster, namespace: Space, faults: Faults, tmp_path: Path
) -> None:
    first, last = (chosen[place].number for place in (0, -1))
    history = History(HISTORIES / str(SEED) / f"{first:04}.jsonl")
    with reachable(history, MACHINE_ADDRESS) as url:
        play(Round(cluster, namespace, faults, tmp_path, history, url), SEED, chosen)
    replay = f"make campaign SEED={SEED} TRIALS={first}-{last}"
    assert breaches(history.lines) == [], f"replay: {replay}; history: {history.file}"


BUGS: Final[Mapping[str, tuple[str, Sequence[Move]]]] = {
    "cleans_similar_names": ("processes", []),
    "deletes_names_that_begin_so": ("intel", []),
    "forgets_checkpoints": ("intel", [Move("job deleted", "saved", 0.5)]),
    "forgets_the_owner": ("intel", []),
    "never_attaches": ("intel", [Move("command killed", "start", 0.5)]),
}
"""Bugs of tests/faults/planted/ that one trial finds: the kind of run, and the faults that it meets."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(
    bug: str, cluster: TestCluster, namespace: Space, faults: Faults, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": str(plant(bug, tmp_path / "product"))}
    history = History(tmp_path / "history.jsonl")
    with reachable(history, MACHINE_ADDRESS) as url:
        at = Round(cluster, namespace, faults, tmp_path / "round", history, url, env)
        play(at, 0, [Plan(1, "planted", *BUGS[bug])])
    assert breaches(history.lines) != []
