"""A campaign of random faults on the test cluster, in rounds of users at the same time (docs/testing.md)."""

import os
from pathlib import Path
from typing import Final

import pytest
from cluster.faults import Faults
from cluster.fixtures import TestCluster
from cluster.settings import MACHINE_ADDRESS, PROJECT
from cluster.space import Space
from support.campaign import USERS, plans, play
from support.campaign_judge import breaches
from support.campaign_users import Round
from support.outside_history import History, reachable

SEED: Final = int(os.environ.get("MANYCPU_SEED", "1"))
_FIRST, _, _LAST = os.environ.get("MANYCPU_TRIALS", "6").rpartition("-")
TRIALS: Final = range(int(_FIRST or 1), int(_LAST) + 1)
HISTORIES: Final = PROJECT / ".cache" / "campaign"


@pytest.mark.alone
@pytest.mark.parametrize("first", TRIALS[::USERS])
def test_all_that_is_promised_holds_whatever_fault_strikes(
    first: int, cluster: TestCluster, namespace: Space, faults: Faults, tmp_path: Path
) -> None:
    numbers = range(first, min(first + USERS, TRIALS.stop))
    history = History(HISTORIES / str(SEED) / f"{first:04}.jsonl")
    with reachable(history, MACHINE_ADDRESS) as url:
        play(Round(cluster, namespace, faults, tmp_path, history, url), SEED, plans(SEED, numbers))
    replay = f"make campaign SEED={SEED} TRIALS={numbers[0]}-{numbers[-1]}"
    assert breaches(history.lines) == [], f"replay: {replay}; history: {history.file}"
