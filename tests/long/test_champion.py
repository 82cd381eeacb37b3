"""DAG `champion` in a real Airflow: started by its data set's asset, approved and rejected over REST."""

from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from support.approval import asked
from support.standalone_airflow import Airflow
from support.waiting import until

from manycpu.operators.base import tab_of
from manycpu.operators.champion.promotions import Champion, champion
from manycpu.operators.champion.versions import write_version

WAIT = 600  # seconds for a sweep, where others leave it some of the cores


def _started_by_asset(airflow: Airflow, number: int) -> str:
    """Wait for the DAG run that an event of the data set starts; returns its path in the API."""
    started = partial(airflow.runs, "champion", "run_type=asset_triggered&order_by=-run_after")
    until(lambda: len(started()) == number)
    return started()[0]


def _answer(airflow: Airflow, run: str, option: str) -> None:
    body = {"chosen_options": [option], "params_input": {}}
    airflow.api("PATCH", f"{run}/taskInstances/approve/-1/hitlDetails", body)


def _conclusion(airflow: Airflow, run: str) -> dict[str, Any]:
    return dict(airflow.api("GET", f"{run}/taskInstances/conclude/xcomEntries/return_value")["value"])


def _events(airflow: Airflow, asset: str) -> list[dict[str, Any]]:
    """List the events of an asset, and their asset's id."""
    return list(airflow.api("GET", f"assets/events?name_pattern={asset}&order_by=timestamp")["asset_events"])


def _left(folder: Path) -> list[Path]:
    """List what DAG runs left besides champions."""
    kept = {one.path for one in [champion(folder)] if one}
    found = [*folder.glob("runs/*"), *folder.glob("models/*"), *folder.glob("models/.*")]
    return [path for path in found if str(path) not in kept]


def test_a_new_version_becomes_a_champion_that_a_worse_one_does_not_replace(
    airflow: Airflow, tmp_path: Path
) -> None:
    folder = airflow.home / "manycpu" / "champion"
    written = airflow.trigger("digits_dataset", {"more": 400})
    assert airflow.end(written) == "success"
    run = _started_by_asset(airflow, 1)
    body = asked(airflow, run)["body"]
    assert champion(folder) is None
    assert "| candidate | champion |" in body
    assert "none yet" in body
    run_id = unquote(run.rpartition("/")[2])
    tabs = [f"({airflow.url}/{tab_of('champion', run_id, 'candidate.fit', index)})" for index in range(3)]
    assert all(tab in body for tab in tabs)
    assert body.count("[The candidate's training](") == 1
    _answer(airflow, run, "Approve")
    assert airflow.end(run, WAIT) == "success"
    first = champion(folder)
    assert isinstance(first, Champion)
    assert first.metrics["holdout_accuracy"] > 0.8
    concluded = _conclusion(airflow, run)
    assert concluded["promoted"]
    assert f"It was promoted: {airflow.user} approved." in concluded["says"]
    assert concluded["model"] == first.path
    assert Path(concluded["predictions"], "predictions.csv").is_file()
    assert {"model.pt", "seen.txt"} < {path.name for path in Path(first.path).iterdir()}
    assert len(next(folder.glob("predictions/*/predictions.csv")).read_text().splitlines()) == 201
    assert _left(folder) == []
    told = [event["extra"] for event in _events(airflow, "champion-model")]
    assert told == [{"path": first.path, "sha256": first.sha256, "metrics": first.metrics}]

    poor = write_version(tmp_path, 10)
    asset = _events(airflow, "digits")[0]["asset_id"]
    airflow.api("POST", "assets/events", {"asset_id": asset, "extra": {"path": poor.path}})
    run = _started_by_asset(airflow, 2)
    assert airflow.end(run, WAIT) == "success"
    concluded = _conclusion(airflow, run)
    assert not concluded["promoted"]
    assert concluded["says"].endswith("That is not enough: nothing was promoted.")
    assert airflow.task(run, "approve")["state"] == "skipped"
    assert champion(folder) == first
    assert _left(folder) == []
    assert len(_events(airflow, "champion-model")) == 1


def test_a_person_rejects_a_better_one(airflow: Airflow, tmp_path: Path) -> None:
    write_version(tmp_path / "data", 100)
    conf = {"folder": str(tmp_path), "rates": [0.3], "nproc_per_node": 1}
    run = airflow.trigger("champion", conf)
    asked(airflow, run)
    _answer(airflow, run, "Reject")
    assert airflow.end(run, WAIT) == "success"
    concluded = _conclusion(airflow, run)
    assert not concluded["promoted"]
    assert concluded["says"].endswith("It was not approved: nothing was promoted.")
    assert champion(tmp_path) is None
    assert _left(tmp_path) == []
    assert not (tmp_path / "predictions").exists()
