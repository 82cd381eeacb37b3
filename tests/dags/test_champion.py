"""DAG `champion` where a threshold decides: what is promoted, and what is left of those that are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.in_process_airflow import Ran

from manycpu.operators.champion.versions import write_version

RunDag = Callable[..., Ran]
pytestmark = pytest.mark.usefixtures("no_process_left")


def conf(folder: Path, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), "ask": False, "nproc_per_node": 1, "rates": [0.3], **more}


def left(folder: Path) -> list[str]:
    """Names of models that are there, but for the champion's and the one before."""
    return [
        path.name for path in (*folder.glob("runs/*"), *folder.glob("models/*"), *folder.glob("models/.*"))
    ]


def test_the_best_of_those_that_succeeded_is_promoted_and_used(
    run_dag: RunDag, tmp_path: Path, home: Path
) -> None:
    write_version(tmp_path / "data", 100)
    ran = run_dag("champion", conf=conf(tmp_path))
    print(ran.said[-6000:], ran.tasks)
    assert ran.state == "success"
    print(list(tmp_path.rglob("*.csv")), left(tmp_path))
    assert 0
