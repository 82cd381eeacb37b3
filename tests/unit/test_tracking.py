"""What trackers are told, computed from events, a ledger and a report."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.waiting import until

from manycpu.pipeline.adapters.tracking_mlflow import MlflowTracker, _named, silence
from manycpu.pipeline.ledger import Attempt, Entry
from manycpu.pipeline.listeners import RankListener
from manycpu.pipeline.observed import Observer
from manycpu.pipeline.run_report import draft
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.event_types import Event, MetricsEvent, PaceEvent, ProgressEvent, WarningEvent
from manycpu.pipeline.spec.events import RankLine, encode
from manycpu.pipeline.spec.handle import ProcessHandle
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.spec.tracking import Ending, Point, Tracked
from manycpu.pipeline.spec.validation import read_run
from manycpu.pipeline.targets.context import RunContext
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.tracking import live, trackers
from manycpu.pipeline.tracking.ending import ending_of
from manycpu.pipeline.tracking.trackers import points_of, tracked
from manycpu.pipeline.verbs.preflight import preflight

PROCESS = ProcessHandle(
    run="qa-1", attempt=2, host="a", boot_id="b", pid=1, start_time=50.0, directory="/runs/qa-1/attempts/2"
)


def entry(**run: object) -> Entry:
    described = {"program": "./code/train.py", "backend": None, **run}
    attempt = Attempt(
        run=described, target={"kind": "local", "launch": "processes"}, digests={"code": "c0de"}
    )
    return Entry(
        key="1",
        name="qa-1",
        created=10.0,
        run=described,
        target={"kind": "local"},
        attempt=2,
        attempts={2: attempt},
        handle=PROCESS,
    )


def test_points_are_the_finite_numbers_of_progress_and_metrics() -> None:
    progress = ProgressEvent(step=3, total_steps=8, loss=0.5, seconds_left=9, time=1.0)
    assert points_of(progress, 0, 2, now=7.0) == [Point("loss", 3, 1.0, 0.5)]
    values = {
        "f1": 93,
        "nan": float("nan"),
        "huge": 10**400,
        "best": "checkpoint-5",
        "ok": True,
        "none": None,
    }
    assert points_of(MetricsEvent(values=values), 0, None, now=7.0) == [Point("f1", 0, 7.0, 93.0)]
    assert points_of(WarningEvent(message="0.5"), 0, 2, now=7.0) == []


def test_an_attempt_is_told_by_what_it_was_started_with() -> None:
    known = tracked(entry(job_name="weekly", nnodes=2, resources={"cpu": 4}), 2)
    assert (known.name, known.began, known.started, known.group) == ("qa-1", 10.0, 50.0, "weekly")
    assert known.params == {
        "program": "./code/train.py",
        "job_name": "weekly",
        "nnodes": "2",
        "resources.cpu": "4",
        "target.kind": "local",
        "target.launch": "processes",
    }
    assert known.tags == {"manycpu.key": "1", "manycpu.name": "qa-1", "manycpu.code": "c0de"}


def test_options_of_the_program_are_parameters() -> None:
    args = ["data.json", "--lr", "3e-5", "--out={output}", "--", "--resume", "--epochs", "2", "--fast"]
    params = tracked(entry(args=args), 2).params
    options = {name: value for name, value in params.items() if name.startswith("args.")}
    expected = {"lr": "3e-5", "out": "{output}", "resume": "true", "epochs": "2", "fast": "true"}
    assert options == {f"args.{name}": value for name, value in expected.items()}


def test_no_value_of_the_environment_and_no_credentials_are_told() -> None:
    given = {"env": {"TOKEN": "very-secret"}, "data": "s3://me:very-secret@host/set", "args": ["--lr", "1"]}
    known = tracked(entry(**given, tracking=["mlflow"]), 2)
    assert "very-secret" not in str(known)
    assert known.params["env"] == "TOKEN"
    assert "tracking" not in known.params


@pytest.mark.parametrize(
    "words",
    [
        *(["--api-key", "very-secret"], ["--hf_token=very-secret"], ["--password", "very-secret"]),
        *(["--hfToken", "very-secret"], ["-passwd", "-very-secret"], ["--AWS_SECRET=very-secret=="]),
        *(["model.credentials=very-secret"], ["--token", "very-secret", "--key", "very-secret", "--secret"]),
    ],
)
def test_values_of_options_that_are_called_like_secrets_are_not_told(words: list[str]) -> None:
    params = tracked(entry(args=["--lr", "1", *words, "--tokenizer", "bert", "--monkey=ape"]), 2).params
    assert "very-secret" not in str(params)
    assert params["args"].startswith("--lr 1 ")
    assert params["args"].endswith(" --tokenizer bert --monkey=ape")
    assert (params["args.lr"], params["args.tokenizer"], params["args.monkey"]) == ("1", "bert", "ape")


def test_the_name_of_a_hidden_option_is_told() -> None:
    params = tracked(entry(args=["--api-key", "very-secret", "--use_token", "--lr=1"]), 2).params
    told = {name: value for name, value in params.items() if name.startswith("args")}
    assert told == {
        "args": "--api-key '***' --use_token --lr=1",
        "args.api-key": "***",
        "args.use_token": "true",
        "args.lr": "1",
    }


def test_names_that_mlflow_does_not_take_stay_different() -> None:
    given = ["acc>0.5", "acc<0.5", "acc_0.5", "a//b", "a/_/b", "..", "__", "", "\ud800", "x" * 300, "x" * 301]
    named = {_named(name) for name in given}
    assert len(named) == len(given)
    assert max(map(len, named)) <= 250
    assert _named("eval/f1 @5") != "eval/f1 _5"
    assert _named("eval/f1-a b.c") == "eval/f1-a b.c"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"registered_model": "m"}, "put mlflow into run.tracking"),
        ({"registered_model": "m", "tracking": ["tensorboard"]}, "put mlflow into run.tracking"),
        ({"registered_model": "m", "tracking": ["mlflow"], "output": None}, "where run.output is null"),
        ({"registered_model": "a/b", "tracking": ["mlflow"]}, "no slash"),
        ({"tracking": ["mlflo"]}, "Did you mean 'mlflow'?"),
    ],
)
def test_what_cannot_be_tracked_is_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(BadInputError, match=problem.replace("?", r"\?")):
        read_run({"program": "train.py", "output": "out", **fields})


def context(tmp_path: Path, *names: str) -> RunContext:
    (tmp_path / "train.py").write_text("")
    run = {"program": str(tmp_path / "train.py"), "output": str(tmp_path / "out"), "tracking": names}
    return open_context(run, {"kind": "local", "directory": str(tmp_path)}, "x", base=tmp_path)


def findings(ctx: RunContext) -> list[tuple[bool, str]]:
    return [(each.fatal, str(each)) for each in preflight(ctx) if each.field == "run.tracking"]


def test_preflight_asks_for_the_server_and_warns_of_one_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    ((fatal, text),) = findings(context(tmp_path, "mlflow"))
    assert fatal
    assert "Set it to the server's address" in text
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:very-secret@127.0.0.1:1")
    ((fatal, text),) = findings(context(tmp_path, "mlflow", "tensorboard"))
    assert not fatal
    assert "127.0.0.1:1 does not answer" in text
    assert "very-secret" not in text


def test_an_address_that_is_none_is_not_quoted() -> None:
    assert silence("http://me:very/secret@host") == "MLFLOW_TRACKING_URI is no address"
    assert silence("databricks") is None


def test_preflight_names_the_extra_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = {name: kind._replace(module="no_such_package") for name, kind in trackers.TRACKERS.items()}
    monkeypatch.setattr(trackers, "TRACKERS", absent)
    found = findings(context(tmp_path, "mlflow", "tensorboard"))
    assert [fatal for fatal, _ in found] == [True, True]
    assert all("pip install 'manycpu[tracking]'" in text for _, text in found)


class Keeper:
    """A tracker that keeps what it gets, and can be away."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.away, self.answers = False, threading.Event()
        self.answers.set()

    def send(self, tracked: Tracked, points: Sequence[Point]) -> None:  # noqa: ARG002 - of one attempt
        assert self.answers.wait(30)
        if self.away:
            raise ConnectionError("https://me:very-secret@host does not answer")
        self.points.extend(points)

    def end(self, tracked: Tracked, ending: Ending) -> None: ...

    def place_of(self, tracked: Tracked) -> dict[str, str]:
        return {"address": "http://host", "experiment": tracked.group}


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Keeper:
    """Have a tracker of the test's own in the place of MLflow."""
    kept = Keeper()
    monkeypatch.setattr(live, "open_tracker", lambda *_: kept)
    monkeypatch.setattr(live, "_described", lambda *_: tracked(entry(), 2))
    return kept


def hear(listener: RankListener, *steps: int) -> None:
    for step in steps:
        listener.event(ProgressEvent(step=step, loss=1.0, time=float(step)), RankLine(0, "a", ""))


def test_what_is_heard_is_told_in_order_and_all_of_it_at_a_flush(keeper: Keeper, tmp_path: Path) -> None:
    (listener,) = live.listeners(context(tmp_path, "mlflow"), PROCESS)
    hear(listener, *range(500))
    listener.flush()
    assert [point.step for point in keeper.points] == list(range(500))


def test_where_a_tracker_has_the_attempt_is_said_once_and_only_when_it_has_it(
    keeper: Keeper, tmp_path: Path
) -> None:
    said: list[str] = []
    keeper.away = True
    (listener,) = live.listeners(context(tmp_path, "mlflow"), PROCESS, say=said.append)
    hear(listener, 1)
    listener.flush()
    assert said == []
    keeper.away = False
    for step in (2, 3):
        hear(listener, step)
        listener.flush()
    assert said == ["mlflow: address http://host, experiment train"]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://me:very-secret@host:5000/", "http://host:5000"),
        ("https://very-secret@host/ml", "https://host/ml"),
        ("http://me:very-se/cret@host/ml", "http://host/ml"),
        ("http://host:5000/?token=very-secret", "http://host:5000/?token=***"),
        ("databricks", "databricks"),
    ],
)
def test_the_address_of_mlflow_is_told_without_credentials(address: str, shown: str) -> None:
    assert MlflowTracker(address).place_of(tracked(entry(), 2)) == {"address": shown, "experiment": "train"}


def test_nobody_waits_for_a_tracker_that_is_slow_and_it_is_said_once(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_FLUSH_TIMEOUT_S", 0.05)
    said: list[str] = []
    (listener,) = live.listeners(context(tmp_path, "mlflow"), PROCESS, said.append)
    keeper.answers.clear()
    hear(listener, *range(100))
    listener.flush()
    listener.flush()
    assert len(said) == 1
    assert "MLflow is away: it has not answered" in said[0]
    keeper.answers.set()
    until(lambda: len(keeper.points) == 100)


def test_one_who_is_away_is_named_once_and_told_when_it_is_back(
    keeper: Keeper, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper.away = True
    (listener,) = live.listeners(context(tmp_path, "mlflow"), PROCESS)
    for step in range(3):
        hear(listener, step)
        listener.flush()
    keeper.away = False
    hear(listener, 3)
    listener.flush()
    assert [point.step for point in keeper.points] == [0, 1, 2, 3]
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "MLflow is away" in said
    assert "very-secret" not in said


def test_of_more_than_there_is_room_for_the_last_are_kept(
    keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_QUEUE_POINTS", 10)
    said: list[str] = []
    (listener,) = live.listeners(context(tmp_path, "mlflow"), PROCESS, said.append)
    keeper.away = True
    hear(listener, *range(100))
    listener.flush()
    keeper.away = False
    hear(listener, 100)
    listener.flush()
    assert [point.step for point in keeper.points] == list(range(91, 101))
    assert len(said) == 1


def test_points_told_while_it_trains_are_those_of_the_reports_curves(keeper: Keeper, tmp_path: Path) -> None:
    """Else the end would tell them a second time, at other steps."""
    events: list[Event] = [
        MetricsEvent(values={"before": 1.0}, time=1.0),
        PaceEvent(step=2, step_seconds=0.5, time=2.0),
        ProgressEvent(step=4, epoch=0.5, loss=0.25, time=3.0),
        MetricsEvent(step=3, values={"eval": 2}, time=4.0),
        PaceEvent(step=9, step_seconds=0.5, time=5.0),
        MetricsEvent(values={"after": 1.0}, time=6.0),
    ]
    (listener,) = live.listeners(context(tmp_path, "mlflow"), PROCESS)
    observer = Observer()
    for event in events:
        line = RankLine(0, "a", encode(event.event, **event.model_dump(exclude={"event"}, exclude_none=True)))
        observer.add_line(line)
        listener.event(event, line)
    listener.flush()
    report = draft(entry(), observer.observed, RunState.SUCCEEDED)
    assert sorted(keeper.points) == sorted(ending_of(report, 9.0).points)
