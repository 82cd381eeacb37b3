"""What the steps of DAG `champion` choose, compare and promote, and what people are told of it."""

import math
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.champion import trained

from manycpu.operators.airflow_versions import AirflowFailException
from manycpu.operators.champion import steps
from manycpu.operators.champion.promotions import (
    promote,
)
from manycpu.operators.champion.versions import newest, read_version, write_version
from manycpu.pipeline.adapters.tracking_mlflow import name_champion
from manycpu.pipeline.run_report import Report
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.spec.state import RunState
from manycpu.pipeline.tracking import ending


def test_versions_grow_and_their_holdout_is_never_trained_on(tmp_path: Path) -> None:
    first, second = (write_version(tmp_path, 50) for _ in range(2))
    assert (first.number, second.number, newest(tmp_path)) == (1, 2, second)

    def rows(path: str, part: str) -> list[str]:
        return Path(path, part, "digits.csv").read_text().split()

    assert [len(rows(one.path, "train")) for one in (first, second)] == [50, 100]
    assert set(rows(first.path, "train")) < set(rows(second.path, "train"))
    assert rows(first.path, "holdout") == rows(second.path, "holdout")
    everything = write_version(tmp_path, 1000).path
    assert not set(rows(everything, "train")) & set(rows(everything, "holdout"))
    counts = [len(rows(everything, part)) for part in ("train", "holdout", "unlabelled")]
    assert sum(counts) == 1797


def test_what_is_no_version_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="it has no train"):
        read_version(str(tmp_path))


@pytest.fixture
def params(tmp_path: Path) -> dict[str, Any]:
    return {
        "folder": str(tmp_path),
        "threshold": 0.0,
        "ask": True,
        "rates": [0.1],
        "target": {"kind": "local"},
        "nproc_per_node": 1,
    }


FIT = {"training": "candidate.fit", "map_index": 0}
FAILED = [{"rate": 0.5, "error": "diverged", **FIT}]
RUN = SimpleNamespace(dag_id="champion", run_id="manual__2026-01-01T00:00:00+00:00")


def test_the_newest_events_version_is_trained_on_else_the_newest_of_the_folder(
    tmp_path: Path, params: dict[str, Any]
) -> None:
    first, second = (write_version(tmp_path / "data", 10).path for _ in range(2))
    events = {"digits": [SimpleNamespace(extra={"path": second}), SimpleNamespace(extra={"path": first})]}
    assert steps.begin(params, RUN, events)["version"] == first
    assert steps.begin(params, RUN, {"digits": [SimpleNamespace(extra={})]})["version"] == second
    assert steps.begin(params, RUN)["version"] == second


@pytest.mark.parametrize("folder", ["s3://bucket/champion", "champion"])
def test_a_folder_is_on_a_disk_and_the_same_for_every_worker(params: dict[str, Any], folder: str) -> None:
    with pytest.raises(AirflowFailException, match="is no absolute path"):
        steps.begin(params | {"folder": folder}, RUN)


def test_the_best_is_chosen_of_those_that_succeeded(tmp_path: Path, params: dict[str, Any]) -> None:
    candidates = [
        GOOD,
        GOOD | {"rate": 0.2, "accuracy": 0.8},
        {"rate": 0.3, "error": "diverged"},
    ]
    (best,) = steps.choose(candidates, "run", "/data", params)
    assert (best["rate"], best["name"]) == (0.2, "run-01234567")
    assert steps.choose(candidates[0], "run", "/data", params)[0]["rate"] == 0.1
    promote(tmp_path, trained(tmp_path, "a"), 0)
    assert [one["name"] for one in steps.choose(candidates, "run", "/data", params)] == ["run-01234567", "a"]
    with pytest.raises(AirflowFailException, match="no candidate succeeded"):
        steps.choose(candidates[2:], "run", "/data", params)


MLFLOWS_OWN = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The ``noload``")
GOOD = {"rate": 0.1, "accuracy": 0.7, "key": "k", "path": "/m", "sha256": "0123456789", "metrics": {}, **FIT}


@pytest.mark.parametrize("accuracy", [math.nan, math.inf, None, "0.9"])
def test_a_candidate_whose_accuracy_is_no_finite_number_counts_as_failed(
    params: dict[str, Any], caplog: pytest.LogCaptureFixture, accuracy: object
) -> None:
    odd = GOOD | {"rate": 0.5, "accuracy": accuracy}
    (best,) = steps.choose([odd, GOOD], "run", "/data", params)
    assert best["rate"] == 0.1
    assert f"the candidate of rate 0.5 failed: its accuracy is no finite number: {accuracy!r}" in caplog.text
    compared = steps.compare([best], [{"accuracy": 0.8}], [odd, GOOD], params, RUN)
    assert "Candidates that failed: those of learning rate 0.5." in compared["says"]
    with pytest.raises(AirflowFailException, match="no candidate succeeded"):
        steps.choose(odd, "run", "/data", params)
    with pytest.raises(AirflowFailException, match="nothing was promoted: its accuracy is no finite number"):
        steps.promote([best], accuracy, params)  # type: ignore[arg-type]


@pytest.mark.parametrize("returned", [None, {}, {"accuracy": None}, [0.9]])
def test_a_training_that_returns_no_accuracy_is_a_candidate_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: object
) -> None:
    monkeypatch.setattr(steps, "state_of", lambda _place: "success")
    described = described_by(tmp_path, returned)
    assert described == {"rate": 0.5, "error": "its accuracy is no finite number: None", **FIT}


def test_a_candidate_whose_task_failed_is_not_judged_by_the_report_of_an_earlier_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[dict[str, Any]]()

    def state_of(place: dict[str, Any]) -> str:
        asked.append(place)
        return "failed"

    monkeypatch.setattr(steps, "state_of", state_of)
    assert "error" in described_by(tmp_path, {"accuracy": 0.9})
    assert asked == [{"dag_id": "champion", "run_id": "now", "task_id": "candidate.fit", "map_index": 0}]


def described_by(folder: Path, returned: object) -> dict[str, Any]:
    """Describe a candidate whose training succeeded by its report."""
    report = Report(key="k", name="n", state=RunState.SUCCEEDED, attempts=1, run={}, target={})
    whole = report.model_copy(update={"returned": returned, "export": {"sha256": "ab"}})
    (folder / "report.json").write_text(whole.model_dump_json())
    ti = SimpleNamespace(dag_id="champion", run_id="now", task_id="candidate.describe", map_index=0)
    return steps.describe(0.5, str(folder), "candidate.fit", ti)


@pytest.mark.parametrize(
    ("scores", "threshold", "ask", "task"),
    [
        ([0.9, 0.8], 0.0, True, "approve"),
        ([0.9, 0.8], 0.0, False, "promote"),
        ([0.9, 0.8], 0.2, True, None),
        ([0.9, 0.9], 0.0, True, None),
        ([8 / 300, 5 / 300], 0.01, True, None),  # exactly the threshold; as floats a little more
        ([9 / 300, 5 / 300], 0.01, True, "approve"),
        ([0.9], 0.0, True, "approve"),
        ([0.9], 0.0, False, "promote"),
        ([0.9], 0.95, False, None),
    ],
)
def test_what_comes_after_the_comparison(
    params: dict[str, Any], scores: list[float], threshold: float, task: str | None, *, ask: bool
) -> None:
    contenders = [
        {"rate": 0.1, "path": "/m", "data": f"/data/v000{number}", "sha256": "ab" * 32}
        for number in range(len(scores))
    ]
    given = params | {"threshold": threshold, "ask": ask}
    compared = steps.compare(contenders, [{"accuracy": score} for score in scores], FAILED, given, RUN)
    assert steps.road(compared["better"], given) == task
    assert ("there is no champion yet" in compared["says"]) == (len(scores) == 1)
    assert ("| none yet |" in compared["body"]) == (len(scores) == 1)
    for text in (compared["says"], compared["body"]):
        assert "Candidates that failed: those of learning rate 0.5." in text


def compared(
    params: dict[str, Any], scores: list[float], candidates: list[dict[str, Any]]
) -> tuple[str, list[str]]:
    """Compare the first candidate with a champion; returns the sentence, and the lines of the Markdown."""
    versions = [{"rate": 0.30000000000000004, "data": "/data/v0003"}, {"rate": 1.0, "data": "/data/v0001"}]
    contenders = [{**one, "path": "/m", "sha256": "ab" * 32} for one in versions]
    told = steps.compare(contenders, [{"accuracy": score} for score in scores], candidates, params, RUN)
    return told["says"], told["body"].splitlines()


def test_a_person_is_told_metric_threshold_and_what_the_others_reached(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example.org/team/")
    candidates = [
        {**GOOD, "rate": 0.03, "path": "/other", "accuracy": 0.8765432},
        {**GOOD, "rate": 0.30000000000000004, "accuracy": 0.91234567, "map_index": 1},
        {**FAILED[0], "map_index": 2},
    ]
    says, lines = compared(params | {"threshold": 0.005}, [0.9333333, 0.92], candidates)
    assert says == (
        "The candidate of learning rate 0.3 reached accuracy 93.3 % on digits that neither saw, "
        "the champion 92.0 %; needed was a lead of more than 0.5 points. "
        "Candidates that failed: those of learning rate 0.5."
    )
    assert lines[0] == says
    assert "| accuracy on digits that neither saw | 93.3 % | 92.0 % |" in lines
    assert "| learning rate | 0.3 | 1 |" in lines
    url = "https://airflow.example.org/team/dags/champion/runs/manual__2026-01-01T00:00:00+00:00/plugin/training"
    fits = [f"{url}?training=candidate.fit%5B{index}%5D" for index in range(3)]
    assert f"[The candidate's training]({fits[1]})" in lines
    assert lines[-5:] == [
        "| learning rate | accuracy on digits to choose by |  |",
        "| --- | --- | --- |",
        f"| [0.3]({fits[1]}) | 91.2 % | the candidate |",
        f"| [0.03]({fits[0]}) | 87.7 % |  |",
        f"| [0.5]({fits[2]}) | failed |  |",
    ]


@pytest.mark.parametrize(
    ("scores", "shown"),
    [
        ([0.9, 0.9], ["90.0 %", "90.0 %"]),
        ([0.93334, 0.93331], ["93.334 %", "93.331 %"]),
        ([0.9, 0.90000001], ["90.0000 %", "90.0000 %"]),
    ],
)
def test_numbers_have_as_few_digits_as_tell_them_apart(
    params: dict[str, Any], scores: list[float], shown: list[str]
) -> None:
    says, lines = compared(params, scores, [GOOD])
    assert f"reached accuracy {shown[0]} on digits that neither saw, the champion {shown[1]}; " in says
    assert "needed was any lead." in says
    assert f"| accuracy on digits that neither saw | {shown[0]} | {shown[1]} |" in lines


@pytest.mark.parametrize("promoted", [None, {"path": "/champion/models/a"}])
def test_the_conclusion_names_what_was_promoted_and_what_it_predicted(
    promoted: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    told = {
        "begin": {"predictions": "/champion/predictions/a"},
        "compare": {"better": True, "says": "It is better."},
        "promote": promoted,
    }
    caplog.set_level("INFO")

    def pulled(*, task_ids: str) -> Any:
        return told.get(task_ids)

    concluded = steps.conclude(SimpleNamespace(xcom_pull=pulled))
    assert concluded["says"] in caplog.text
    if promoted is None:
        assert concluded == {
            "promoted": False,
            "says": "It is better. It was not approved: nothing was promoted.",
        }
        return
    assert (concluded["model"], concluded["predictions"]) == ("/champion/models/a", "/champion/predictions/a")
    assert concluded["says"].endswith(
        "The model is in /champion/models/a, its predictions are in /champion/predictions/a."
    )


def test_the_registry_is_asked_only_where_runs_are_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert name_champion("0123456789", "ab") is None


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Register the next version of model ``digits``, of a run of MLflow's with these tags."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    client = MlflowClient()
    experiment = client.create_experiment("digits", artifact_location=str(tmp_path / "artifacts"))
    client.create_registered_model("digits")

    def register(**tags: str) -> None:
        named = {f"manycpu.{name}": value for name, value in tags.items()}
        run = client.create_run(experiment, tags=named).info.run_id
        client.create_model_version("digits", f"runs:/{run}/model", run)

    return register


def _alias() -> int:
    from mlflow import MlflowClient

    return int(MlflowClient().get_model_version_by_alias("digits", "champion").version)


@MLFLOWS_OWN
def test_what_the_run_has_registered_gets_the_alias(registered: Callable[..., None]) -> None:
    for key in ("loser", "winner", "later"):
        registered(key=key)
    assert name_champion("winner", "ab") == "digits 2"
    assert _alias() == 2
    assert name_champion("nobody", "ab") is None


@MLFLOWS_OWN
def test_of_a_run_that_was_done_anew_the_promoted_model_alone_gets_the_alias(
    registered: Callable[..., None],
) -> None:
    registered(key="winner", began="1.000")
    registered(key="winner", began="2.000")
    assert name_champion("winner", "ab") == "digits 2", "the newest, if the exported one is unknown"
    assert _alias() == 2
    for sha256 in ("ab", "ab", "cd"):
        registered(key="winner", export=sha256)
    assert name_champion("winner", "ab") == "digits 4"
    assert name_champion("winner", "cd") == "digits 5"
    assert _alias() == 5


def promoting(tmp_path: Path, params: dict[str, Any]) -> dict[str, Any]:
    """Promote a candidate as the DAG does; returns what the asset's event then carries."""
    event = SimpleNamespace(extra={})
    contenders = [trained(tmp_path, "a").model_dump()]
    steps.promote(contenders, 0.9, params, SimpleNamespace(outlets=["asset"]), {"asset": event})
    return dict(event.extra)


def test_a_registry_that_is_away_is_one_warning(
    tmp_path: Path,
    params: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:very-secret@127.0.0.1:1")
    assert promoting(tmp_path, params)["path"] == str(tmp_path / "models" / "a")
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warning.startswith("MLflow did not receive the champion: 127.0.0.1:1 does not answer")
    assert "very-secret" not in caplog.text


def test_a_registry_that_hangs_is_waited_for_no_longer_than_its_time(
    tmp_path: Path,
    params: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ending, "_CHAMPION_TIMEOUT_S", 0.2)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # its thread ends with this test
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # takes connections, and says nothing
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{hanging.getsockname()[1]}")
        assert promoting(tmp_path, params)["path"] == str(tmp_path / "models" / "a")
    assert "MLflow did not receive the champion: it has not answered within 0.2 s" in caplog.text
