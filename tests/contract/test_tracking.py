"""Trackers hear of real trainings: a real MLflow server with its SQLite store, TensorBoard's own reader."""

import logging
import resource
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.mlflow_server import MlflowServer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from manycpu.operators import train as train_operator
from manycpu.pipeline import train
from manycpu.pipeline.adapters import tracking_tensorboard
from manycpu.pipeline.adapters.tracking_mlflow import MlflowTracker
from manycpu.pipeline.adapters.tracking_tensorboard import TensorBoardTracker
from manycpu.pipeline.listeners import Silent
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import CancelledError, Finding, TrainingFailedError
from manycpu.pipeline.spec.tracking import Ending, Point, Tracked
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.tracking.live import listeners
from manycpu.pipeline.verbs.build import build
from manycpu.pipeline.verbs.cancel import cancel
from manycpu.pipeline.verbs.cleanup import cleanup
from manycpu.pipeline.verbs.launch import launch
from manycpu.pipeline.verbs.prepare import prepare
from manycpu.pipeline.verbs.stage import stage
from manycpu.pipeline.verbs.wait import conclude, wait

pytestmark = pytest.mark.usefixtures("home", "no_process_left", "light_torch", "_quiet")
Script = Callable[..., str]
TRAINS = """
import os
from manycpu.pipeline.node.metrics import metrics, progress
for step in range(1, 4):
    progress(step=step, total_steps=3, loss=1 / step)
metrics({"eval/f1 <b>": 93.0, "note": "not a number"}, step=3)
metrics({"best": 0.5})
open(os.path.join(os.environ["MANYCPU_OUTPUT"], "model.txt"), "w").write("the model")
raise SystemExit(int(os.environ.get("EXIT", "0")))
"""
LOSSES = [(step, 1 / step) for step in range(1, 4)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    known = MlflowServer(tmp_path_factory.mktemp("mlflow"))
    yield known
    known.stop()


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing of MLflow's leave the machine, nor stay in the environment."""
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"):
        monkeypatch.setenv(name, "true")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MANYCPU_TENSORBOARD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def away(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> MlflowServer:
    """Name a server that was not started, or that has ended."""
    server.stop()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
    return server


@pytest.fixture
def mlflow(server: MlflowServer, monkeypatch: pytest.MonkeyPatch) -> MlflowServer:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
    server.start()
    import_module("mlflow.tracking")  # for the first time it takes seconds, which no test is to wait for
    return server


def fields(tmp_path: Path, program: str, **more: Any) -> dict[str, Any]:
    return {"program": program, "output": str(tmp_path / "out"), "nproc_per_node": 1, **more}


def report(tmp_path: Path) -> Report:
    return Report.model_validate_json((tmp_path / "out" / "report.json").read_text())


def scalars(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Read what TensorBoard shows of the one attempt in a folder."""
    (attempt,) = folder.glob("*/*")
    read = EventAccumulator(str(attempt))
    read.Reload()
    return {
        name: [(event.step, pytest.approx(event.value)) for event in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }


class Return(Silent):
    """Starts a server when the training has ended."""

    def __init__(self, server: MlflowServer) -> None:
        self.server = server
        self.findings: list[str] = []

    def begin(self, verb: str) -> None:
        if verb == "export":
            self.server.start()

    def finding(self, finding: Finding) -> None:
        self.findings.append(str(finding))


def mlflow_said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """List what was said of MLflow, up to the reasons."""
    texts = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [text.partition(":")[0] for text in texts if "MLflow" in text]


def test_what_a_server_has_missed_it_is_told_at_the_end(
    away: MlflowServer, tmp_path: Path, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes first: nothing is started twice."""
    listener = Return(away)
    found = train(fields(tmp_path, script(TRAINS), tracking=["mlflow"]), listener=listener)
    assert (found.state, found.warnings) == ("succeeded", [])
    assert len(listener.findings) == 1
    assert "run.tracking: MLflow is away" in listener.findings[0]
    (run,) = away.runs(key=found.key)
    assert run["info"]["status"] == "FINISHED"
    assert away.history(run, "loss") == LOSSES
    assert mlflow_said(caplog) == ["MLflow is away"]


def test_mlflow_has_the_parameters_metrics_by_step_tags_and_model_of_a_training(
    mlflow: MlflowServer, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("some data")
    found = train(
        fields(
            tmp_path,
            script(TRAINS),
            args="--lr 3e-5 --verbose",
            data=str(tmp_path / "data"),
            env={"TOKEN": "very-secret"},
            job_name="weekly",
            tracking=["mlflow"],
            registered_model="weekly-qa",
        )
    )
    (run,) = mlflow.runs(key=found.key)
    assert (run["info"]["run_name"], run["info"]["status"]) == (found.name, "FINISHED")
    assert run["info"]["end_time"] >= run["info"]["start_time"] > 0
    assert mlflow.experiment_of(run) == "weekly"
    assert mlflow.history(run, "loss") == LOSSES
    assert mlflow.history(run, "eval/f1 _b__7f6232e2") == [(3, 93.0)]
    assert mlflow.history(run, "best") == [(3, 0.5)]
    expected = {"args": "--lr 3e-5 --verbose", "args.lr": "3e-5", "args.verbose": "true", "env": "TOKEN"}
    assert expected.items() <= run["params"].items()
    assert "very-secret" not in str(run)
    tags = {name.removeprefix("manycpu."): value for name, value in run["tags"].items()}
    assert (tags["attempt"], tags["state"], tags["world_size"]) == ("1", "succeeded", "1")
    assert tags["report"] == str(tmp_path / "out" / "report.json")
    assert len(tags["data"]) == len(tags["code"]) == len(tags["export"]) == 64
    info, experiment = run["info"], f"{mlflow.address}/#/experiments/{run['info']['experiment_id']}"
    assert found.trackers["mlflow"] == {
        "address": mlflow.address,
        "experiment": "weekly",
        "run": info["run_id"],
        "link": f"{experiment}/runs/{info['run_id']}",
    }
    (version,) = mlflow.versions("weekly-qa")
    assert (version["run_id"], version["status"]) == (run["info"]["run_id"], "READY")
    assert "model/model.txt" in mlflow.artifacts(run, "model")
    assert found.warnings == []


def test_a_training_that_failed_is_a_run_that_failed(
    mlflow: MlflowServer, script: Script, tmp_path: Path
) -> None:
    given = fields(tmp_path, script(TRAINS), env={"EXIT": "3"}, tracking=["mlflow"], registered_model="none")
    with pytest.raises(TrainingFailedError):
        train(given)
    (run,) = mlflow.runs(key=report(tmp_path).key)
    assert run["info"]["status"] == "FAILED"
    assert "exit code 3" in run["tags"]["manycpu.error"]
    assert mlflow.versions("none") == []


def test_tensorboard_finds_each_point_once(script: Script, tmp_path: Path, home: Path) -> None:
    found = train(fields(tmp_path, script(TRAINS), tracking=["tensorboard"]))
    shown = scalars(home / "tensorboard")
    (attempt,) = (home / "tensorboard").glob("*/*")
    command = f"tensorboard --logdir {home}/tensorboard"
    assert found.trackers == {"tensorboard": {"folder": str(attempt), "command": command}}
    assert shown["loss"] == LOSSES
    assert (shown["eval/f1 <b>"], shown["best"]) == ([(3, 93.0)], [(3, 0.5)])


def test_tensorboard_finds_each_point_once_after_a_write_that_broke_off(home: Path) -> None:
    tracker, tracked = TensorBoardTracker(home), Tracked("k", "n", 1.0, 1, 1.0, "g", {}, {})
    points = [Point("loss", step, 1000.0 + step, 0.5) for step in range(2000)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))  # bytes of a file
    try:
        with pytest.raises(OSError, match="File too large"):
            tracker.send(tracked, points)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tracker.send(tracked, points)
    assert sorted(scalars(home)["loss"]) == [(step, 0.5) for step in range(2000)]


def test_a_process_that_sends_known_points_reads_the_files_of_tensorboard_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked, points = Tracked("k", "n", 1.0, 1, 1.0, "g", {}, {}), [Point("loss", 1, 1000.0, 0.5)]
    TensorBoardTracker(home).send(tracked, points)
    read, keys = list[Path](), tracking_tensorboard._keys  # noqa: SLF001 - what reads a file

    def count(path: Path) -> Iterable[tracking_tensorboard.Key]:
        read.append(path)
        return keys(path)

    monkeypatch.setattr(tracking_tensorboard, "_keys", count)
    later = TensorBoardTracker(home)
    for _ in range(3):
        later.send(tracked, points)
    assert len(read) == 1


def begin(tmp_path: Path, program: str, **more: Any) -> tuple[RunContext, Any]:
    ctx = open_context(fields(tmp_path, program, **more), None, tmp_path, base=tmp_path)
    prepare(ctx)
    return ctx, launch(ctx, stage(ctx), build(ctx))[0]


def test_who_hears_an_attempt_again_makes_no_second_run_and_no_second_point(
    mlflow: MlflowServer, script: Script, tmp_path: Path, home: Path
) -> None:
    ctx, handle = begin(tmp_path, script(TRAINS), tracking=["mlflow", "tensorboard"])
    for _ in range(2):
        status = wait(ctx, handle, *listeners(ctx, handle))
    (run,) = mlflow.runs(key=ctx.key)
    assert run["info"]["status"] == "RUNNING"
    conclude(ctx, handle, status)
    (run,) = mlflow.runs(key=ctx.key)
    assert run["info"]["status"] == "FINISHED"
    cleanup(ctx)
    (run,) = mlflow.runs(key=ctx.key)
    assert mlflow.history(run, "loss") == LOSSES
    assert scalars(home / "tensorboard")["loss"] == LOSSES


def test_a_training_that_was_cancelled_is_a_run_that_was_killed(
    mlflow: MlflowServer, script: Script, tmp_path: Path
) -> None:
    ctx, handle = begin(tmp_path, script("import time; time.sleep(600)"), tracking=["mlflow"])
    cancel(ctx, by="a test")
    with pytest.raises(CancelledError):
        conclude(ctx, handle, wait(ctx, handle, *listeners(ctx, handle)))
    cleanup(ctx)
    (run,) = mlflow.runs(key=ctx.key)
    assert (run["info"]["status"], run["metrics"]) == ("KILLED", {})


def test_the_attempt_after_one_that_failed_is_a_run_of_its_own(
    mlflow: MlflowServer, script: Script, tmp_path: Path
) -> None:
    ctx, handle = begin(tmp_path, script(TRAINS), env={"EXIT": "3"}, tracking=["mlflow"])
    assert wait(ctx, handle, *listeners(ctx, handle)).state == "failed"
    ctx, handle = begin(tmp_path, script(TRAINS), tracking=["mlflow"])
    conclude(ctx, handle, wait(ctx, handle, *listeners(ctx, handle)))
    cleanup(ctx)
    ends = {run["tags"]["manycpu.attempt"]: run["info"]["status"] for run in mlflow.runs(key=ctx.key)}
    assert (ends["1"], set(ends)) == ("FAILED", {"1", "2"})


def test_processes_that_come_in_the_same_moment_make_one_run_in_the_end(mlflow: MlflowServer) -> None:
    attempt = Tracked("k1", "qa-k1", 10.0, 1, 20.0, "moment", {"lr": "1"}, {})
    points = [Point("loss", step, 20.0 + step, 0.5) for step in range(4)]
    doors = [MlflowTracker(mlflow.address) for _ in points]
    with ThreadPoolExecutor(len(doors)) as pool:
        list(pool.map(lambda door, point: door.send(attempt, [point]), doors, points))
    doors[0].end(attempt, Ending("succeeded", 30.0, points=points))
    (run,) = mlflow.runs(began="10.000")
    assert run["info"]["status"] == "FINISHED"
    assert mlflow.history(run, "loss") == [(step, 0.5) for step in range(4)]
    assert run["params"] == {"lr": "1"}


def test_tensorboard_is_given_a_folder(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MANYCPU_TENSORBOARD", str(tmp_path / "boards"))
    train(fields(tmp_path, script(TRAINS), tracking=["tensorboard"]))
    assert scalars(tmp_path / "boards")["loss"] == LOSSES


def test_a_server_that_is_away_throughout_stops_nothing_and_the_report_says_so(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:very-secret@127.0.0.1:1")
    found = train(fields(tmp_path, script(TRAINS), tracking=["mlflow"], registered_model="m"))
    assert (found.state, len(found.warnings)) == ("succeeded", 1)
    assert "MLflow did not receive all of the run: 127.0.0.1:1 does not answer" in found.warnings[0]
    assert found.trackers == {"mlflow": {"address": "http://127.0.0.1:1", "experiment": "train"}}
    assert report(tmp_path) == found
    assert mlflow_said(caplog) == ["MLflow is away", "MLflow did not receive all of the run"]
    assert "very-secret" not in str(found) + caplog.text


HANDS_OVER = """
from airflow.sdk import dag
from manycpu.operators import training_pipeline

@dag(schedule=None)
def handed_over():
    training_pipeline(run={run!r}, default_args={{"retries": 0}})

handed_over()
"""
REPORTS = """
import os, time
from pathlib import Path
from manycpu.pipeline.node.metrics import metrics, progress
progress(step=1, loss=1.0, seconds_left=3600)
while not [*Path(os.environ["ATTEMPTS"]).glob("*/attempts/*/told.*")]:
    time.sleep(0.05)  # until the trigger has come
progress(step=2, loss=0.5, seconds_left=0)
metrics({"f1": 90.0}, step=2)
"""


def test_a_training_that_goes_from_worker_to_trigger_is_one_run(
    mlflow: MlflowServer,
    run_dag: Callable[..., SimpleNamespace],
    script: Script,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train_operator, "SETTLE_S", 0.0)  # no scheduler is there to settle
    given = {
        "program": script(REPORTS),
        "output": None,
        "nproc_per_node": 1,
        "env": {"ATTEMPTS": f"{home}/runs"},
        "tracking": ["mlflow", "tensorboard"],
    }
    ran = run_dag("handed_over", HANDS_OVER.format(run=given))
    assert set(ran.tasks.values()) == {"success"}
    (run,) = mlflow.runs(dag_id="handed_over")
    assert (run["info"]["status"], run["tags"]["manycpu.dag_run_id"]) == ("FINISHED", ran.run_id)
    assert run["tags"]["manycpu.task"] == "task training.train of DAG handed_over"
    assert mlflow.experiment_of(run) == "handed_over"
    assert mlflow.history(run, "loss") == [(1, 1.0), (2, 0.5)]
    assert scalars(home / "tensorboard")["loss"] == [(1, 1.0), (2, 0.5)]
    assert len(list((home / "tensorboard").glob("*/*/*"))) > 1, "of the worker, and of the trigger"
