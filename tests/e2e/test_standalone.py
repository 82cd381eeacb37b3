"""Runs in a real Airflow, and what becomes of a training whose worker is killed or whose task is ended."""

import json
import os
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.rank_launches import LIGHT
from support.standalone_airflow import Airflow
from support.waiting import until

# Seconds within which a person's word ends the local processes: 5, where others leave them the cores.
END = 300


def _handle(airflow: Airflow, folder: Path, attempt: int = 1) -> dict[str, Any]:
    """Wait for an attempt of the run that writes to a folder; returns its handle."""
    found: list[Path] = []

    def launched() -> bool:
        for ledger in (airflow.home / "manycpu" / "runs").glob("*/ledger.json"):
            file = ledger.parent / "attempts" / str(attempt) / "handle.json"
            if str(folder) in ledger.read_text() and file.exists():
                found.append(file)
        return bool(found)

    until(launched)
    return dict(json.loads(found[0].read_text()))


def _ranks(handle: dict[str, Any]) -> list[psutil.Process]:
    """Find the processes of a training: its supervisor, launcher and ranks."""
    supervisor = psutil.Process(handle["pid"])
    return [supervisor, *supervisor.children(recursive=True)]


def _said(handle: dict[str, Any], text: str) -> None:
    log = Path(handle["directory"]) / "log"
    until(lambda: log.exists() and text in log.read_text())


def _deferred(airflow: Airflow, run: str, handle: dict[str, Any], task: str = "training.train") -> None:
    """Wait until the triggerer follows the training."""
    until(lambda: airflow.task(run, task)["state"] == "deferred")
    until(lambda: list(Path(handle["directory"]).glob("told.*")))


def _gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def _report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "output" / "report.json").read_text()))


@pytest.fixture(scope="module")
def hurried(
    airflow: Airflow, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[psutil.Process]]:
    """A run whose task has half a minute, which passes while others run; its folder and its processes."""
    folder = tmp_path_factory.mktemp("hurried")
    run = airflow.trigger("tiny_hurried", {"folder": str(folder)})
    handle = _handle(airflow, folder)
    processes = _ranks(handle)
    _deferred(airflow, run, handle)
    return run, folder, processes


def test_nothing_trains_that_nobody_asked_for(airflow: Airflow) -> None:
    assert airflow.api("GET", "dags/weekly_training")["is_paused"]
    assert airflow.api("GET", "dags/weekly_training/dagRuns")["total_entries"] == 0


@pytest.mark.long
def test_two_runs_at_once_from_the_api(airflow: Airflow, tmp_path: Path, script: Callable[..., str]) -> None:
    program, outputs = script(), [tmp_path / "a", tmp_path / "b"]
    confs = [{"program": program, "nproc_per_node": 2, "output": str(output)} for output in outputs]
    demo = {"env": LIGHT, "data": None, "model": None, "args": "", "dtype": "fp32", "oversubscribe": True}
    runs = [airflow.trigger("train", conf | demo) for conf in confs]
    assert [airflow.end(run, 200) for run in runs] == ["success", "success"]
    for output in outputs:
        report = json.loads((output / "report.json").read_text())
        assert (report["state"], report["world_size"], report["left_behind"]) == ("succeeded", 2, [])
        assert (output / "model.txt").read_text() == "sum 2"


def test_the_log_the_asset_and_its_consumer(airflow: Airflow, tmp_path: Path) -> None:
    run = airflow.trigger("tiny", {"folder": str(tmp_path)})
    handle = _handle(airflow, tmp_path)
    _deferred(airflow, run, handle)
    (tmp_path / "go").touch()
    assert airflow.end(run) == "success"
    told = [line for line in airflow.log(run) if line.startswith("[rank 0 ")]
    texts = [line.split("] ", 1)[1] for line in told]
    expected = ["line 0 of tiny", "line 1 of tiny", "line 2 of tiny", "step 3 of 4", "the last line"]
    assert [text.split(",")[0] for text in texts if text.split(",")[0] in expected] == expected
    assert not Path(handle["directory"]).exists()
    until((airflow.home / "consumed").exists)
    digest = _report(tmp_path)["export"]["sha256"]
    assert (airflow.home / "consumed").read_text() == f"42 trained {digest}"


@pytest.mark.usefixtures("hurried")  # only to begin: its time passes meanwhile
def test_a_retry_attaches_after_the_worker_is_ended_or_killed(airflow: Airflow, tmp_path: Path) -> None:
    run = airflow.trigger("tiny_sync", {"folder": str(tmp_path)})
    handle = _handle(airflow, tmp_path)
    _said(handle, "line 2")
    attached = f"attached to attempt 1, pid {handle['pid']} on {handle['host']}"
    until(lambda: airflow.task(run)["pid"])
    os.kill(airflow.task(run)["pid"], signal.SIGTERM)
    until(lambda: airflow.task(run)["try_number"] == 2)  # which a success would not have
    until(lambda: attached in airflow.log(run, attempt=2))
    os.kill(airflow.task(run)["pid"], signal.SIGKILL)
    until(lambda: airflow.task(run)["try_number"] == 3)
    until(lambda: airflow.task(run)["state"] == "running")
    assert _ranks(handle), "the training went with its worker"
    (tmp_path / "go").touch()
    assert airflow.end(run) == "success"
    assert _report(tmp_path)["attempts"] == 1
    assert attached in airflow.log(run, attempt=3)


@pytest.mark.long
def test_marking_the_task_failed_ends_the_training(airflow: Airflow, tmp_path: Path) -> None:
    run = airflow.trigger("tiny", {"folder": str(tmp_path)})
    handle = _handle(airflow, tmp_path)
    _deferred(airflow, run, handle)
    processes = _ranks(handle)
    airflow.mark(run, "failed")
    until(lambda: _gone(processes), END)
    assert airflow.end(run) == "failed"
    assert _report(tmp_path)["state"] == "cancelled"
    assert _report(tmp_path)["left_behind"] == []


@pytest.mark.long
def test_a_triggerer_that_takes_over_the_trigger_of_another_ends_nothing(
    airflow: Airflow, tmp_path: Path
) -> None:
    """Airflow tells a triggerer that lost a trigger to another one the same as if a person ended the task."""
    run = airflow.trigger("tiny", {"folder": str(tmp_path)})
    handle = _handle(airflow, tmp_path)
    _deferred(airflow, run, handle)

    def said() -> str:
        """Return the log of the task, and that of the triggerer: which of them has it is a matter of time."""
        return "\n".join([*airflow.log(run), (airflow.home / "standalone.log").read_text(errors="replace")])

    mine = "id IN (SELECT trigger_id FROM task_instance WHERE run_id = ?)"
    with closing(sqlite3.connect(airflow.home / "airflow.db", timeout=60)) as database:
        with database:
            other = database.execute(
                "INSERT INTO job (job_type, state, start_date, latest_heartbeat, hostname, unixname) "
                "SELECT job_type, state, start_date, '2100-01-01 00:00:00.000000', 'other', unixname "
                "FROM job WHERE job_type = 'TriggererJob'"
            ).lastrowid
            moved = (other, run.rpartition("/")[2])
            database.execute(f"UPDATE trigger SET triggerer_id = ? WHERE {mine}", moved)  # noqa: S608
        until(lambda: "another triggerer follows" in said())
        with database:  # the other one dies
            database.execute("DELETE FROM job WHERE id = ?", (other,))
    (tmp_path / "go").touch()
    assert airflow.end(run) == "success"
    assert _report(tmp_path)["attempts"] == 1


def test_marking_the_task_failed_in_the_worker_ends_the_training(airflow: Airflow, tmp_path: Path) -> None:
    run = airflow.trigger("tiny_sync", {"folder": str(tmp_path)})
    handle = _handle(airflow, tmp_path)
    _said(handle, "line 2")
    processes = _ranks(handle)
    airflow.mark(run, "failed")
    until(lambda: _gone(processes), END)
    assert airflow.end(run) == "failed"
    assert _report(tmp_path)["state"] == "cancelled"


def test_clearing_the_task_ends_the_training_and_starts_the_next(airflow: Airflow, tmp_path: Path) -> None:
    run = airflow.trigger("tiny", {"folder": str(tmp_path)})
    handle = _handle(airflow, tmp_path)
    _deferred(airflow, run, handle)
    processes = _ranks(handle)
    airflow.clear(run)
    until(lambda: _gone(processes), END)
    second = _handle(airflow, tmp_path, attempt=2)
    assert second["pid"] != handle["pid"]
    (tmp_path / "go").touch()
    assert airflow.end(run) == "success"
    assert _report(tmp_path)["attempts"] == 2


def test_the_execution_timeout_of_a_deferred_task_ends_the_training(
    airflow: Airflow, hurried: tuple[str, Path, list[psutil.Process]]
) -> None:
    run, folder, processes = hurried
    until(lambda: _gone(processes), END)
    assert airflow.end(run) == "failed"
    assert airflow.task(run)["state"] == "failed"
    report = _report(folder)
    assert (report["state"], report["left_behind"]) == ("cancelled", [])
    assert "ended by execution_timeout" in report["error"]


def test_the_result_of_a_function_that_was_deferred_and_its_end_by_a_person(
    airflow: Airflow, tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    runs = [airflow.trigger("tiny_function", {"folder": str(folder)}) for folder in folders]
    handles = [_handle(airflow, folder) for folder in folders]
    for run, handle in zip(runs, handles, strict=True):
        _deferred(airflow, run, handle, "fit")
    folders[0].mkdir()
    (folders[0] / "go").touch()
    airflow.mark(runs[1], "failed", "fit")
    assert airflow.end(runs[0]) == "success"
    kept = airflow.api("GET", f"{runs[0]}/taskInstances/fit/xcomEntries/went")
    assert kept["value"] == "on"
    assert any("step 3 of 4" in line for line in airflow.log(runs[0], "fit"))
    folder = {handle["directory"].partition("/attempts/")[0] for handle in handles}
    until(lambda: not any(Path(one).exists() for one in folder), END)
    ended = Path(airflow.home, "manycpu", "reports", handles[1]["run"], "report.json")
    assert json.loads(ended.read_text())["state"] == "cancelled"
