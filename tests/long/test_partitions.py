"""A backfill of partitions: each trains a model of its own."""

import json
from pathlib import Path

from support.standalone_airflow import Airflow
from support.waiting import until

DAYS = [f"2026-03-0{day}" for day in range(1, 8)]


def test_a_backfill_of_seven_partitions_makes_seven_models(airflow: Airflow, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    until(lambda: "tiny_days" in [dag["dag_id"] for dag in airflow.api("GET", "dags")["dags"]])
    airflow.api("PATCH", "dags/tiny_days", {"is_paused": False})
    days = {"from_date": f"{DAYS[0]}T00:00:00Z", "to_date": f"{DAYS[-1]}T00:00:00Z", "max_active_runs": 2}
    conf = {"folder": str(tmp_path)}
    airflow.api("POST", "backfills", {"dag_id": "tiny_days", "dag_run_conf": conf} | days)
    runs = "dags/tiny_days/dagRuns?run_type=backfill"
    until(lambda: len(airflow.api("GET", f"{runs}&state=success")["dag_runs"]) == len(DAYS), 900)
    found = {}
    for folder in tmp_path.iterdir():
        if folder.is_dir():
            report = json.loads((folder / "report.json").read_text())
            assert (report["state"], report["attempts"]) == ("succeeded", 1)
            assert report["dag"]["partition_key"] == folder.name
            found[folder.name[:10]] = report["key"]
    assert sorted(found) == DAYS
    assert len(set(found.values())) == len(DAYS)
