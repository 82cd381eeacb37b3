"""A campaign of random faults on the test cluster, in rounds of users at the same time (docs/testing.md)."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from cluster.faults import Faults
from cluster.fixtures import TestCluster
from cluster.settings import MACHINE_ADDRESS, PROJECT
from cluster.space import Space
from support.campaign import USERS, Plan, plans, play
from support.campaign_faults import FAULTS
from support.campaign_judge import breaches
from support.campaign_users import Round
from support.outside_history import History, reachable

SEED: Final = int(os.environ.get("MANYCPU_SEED", "1"))
_FIRST, _, _LAST = os.environ.get("MANYCPU_TRIALS", "6").rpartition("-")
TRIALS: Final = range(int(_FIRST or 1), int(_LAST) + 1)
HISTORIES: Final = PROJECT / ".cache" / "campaign"


def rounds() -> Iterator[Any]:
    """Yield the trials of each round; it has the cluster to itself if a fault for all is among them."""
    for first in TRIALS[::USERS]:
        chosen = plans(SEED, range(first, min(first + USERS, TRIALS.stop)))
        of_all = any(FAULTS[move.fault].scope == "all" for plan in chosen for move in plan.moves)
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
