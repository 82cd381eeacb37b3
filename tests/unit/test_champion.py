"""Promotions: none is half done, none passes over another; and what people are told of a comparison."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from manycpu.operators.champion import steps, words
from manycpu.operators.champion.promotions import (
    Candidate,
    Champion,
    SupersededError,
    champion,
    discard,
    promote,
)
from manycpu.operators.champion.versions import newest, read_version, write_version
from manycpu.pipeline.adapters import disk
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.adapters.tracking_mlflow import name_champion
from manycpu.pipeline.spec.errors import BadInputError, ManycpuError
from manycpu.pipeline.transfer import Hashing, save


def trained(folder: Path, name: str, files: dict[str, str] | None = None) -> Candidate:
    """Make what a training exports, with a report beside it."""
    made, output = folder / "made" / name, folder / "runs" / name
    made.mkdir(parents=True)
    for file, content in (files or {"model.pt": name}).items():
        (made / file).write_text(content)
    manifest = save(Hashing(Location.of(str(made), "test")), output, "key")
    (output / "report.json").write_text("{}")
    return Candidate(
        name=name,
        key="key",
        path=str(output),
        sha256=manifest.digest,
        rate=0.1,
        data="/data/v0001",
        accuracy=0.9,
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_promotion_has_a_copy_of_the_model_alone(tmp_path: Path) -> None:
    candidate = trained(tmp_path, "a")
    promoted = promote(tmp_path, candidate, 0)
    assert champion(tmp_path) == promoted
    assert (promoted.number, promoted.path) == (1, str(tmp_path / "models" / "a"))
    assert names(Path(promoted.path)) == {"model.pt", "manifest.json"}
    assert promote(tmp_path, candidate, 0) == promoted, "a retry promotes nothing anew"


def test_a_model_with_a_manifest_of_its_own_is_copied_whole(tmp_path: Path) -> None:
    promoted = promote(tmp_path, trained(tmp_path, "a", {"model.pt": "a", "manifest.json": "[]"}), 0)
    assert names(Path(promoted.path)) == {"model.pt", "manifest.json", "manifest.manycpu.json"}
    assert (Path(promoted.path) / "manifest.json").read_text() == "[]"


def test_a_candidate_that_was_compared_with_an_earlier_champion_is_refused(tmp_path: Path) -> None:
    first = promote(tmp_path, trained(tmp_path, "a"), 0)
    with pytest.raises(SupersededError, match=r"compared with promotion 0, and there is promotion 1"):
        promote(tmp_path, trained(tmp_path, "b"), 0)
    assert champion(tmp_path) == first
    assert discard(tmp_path, "b") == []
    assert names(tmp_path / "models") == {"a"}


def test_of_many_at_once_one_is_promoted(tmp_path: Path) -> None:
    candidates = [trained(tmp_path, f"model-{number}") for number in range(8)]
    together, lost = threading.Barrier(len(candidates)), []

    def try_it(candidate: Candidate) -> None:
        together.wait()
        try:
            promote(tmp_path, candidate, 0)
        except SupersededError:
            lost.append(candidate.name)

    threads = [threading.Thread(target=try_it, args=(one,)) for one in candidates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winner = champion(tmp_path)
    assert winner is not None
    assert sorted([*lost, winner.name]) == [one.name for one in candidates]
    assert (Path(winner.path) / "model.pt").read_text() == winner.name


@pytest.mark.parametrize("last_call", ["copied", "written"])
def test_a_crash_before_the_promotion_leaves_the_old_champion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_call: str
) -> None:
    first = promote(tmp_path, trained(tmp_path, "a"), 0)
    second = trained(tmp_path, "b")

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(*((disk, "sync", crash) if last_call == "copied" else (os, "link", crash)))
        with pytest.raises(KeyboardInterrupt):
            promote(tmp_path, second, 1)
    assert champion(tmp_path) == first
    assert (Path(first.path) / "model.pt").read_text() == "a"
    assert discard(tmp_path, "b")
    assert names(tmp_path / "models") == {"a"}
    assert names(tmp_path / "promotions") == {"000001.json"}
    promoted = promote(tmp_path, second, 1)
    assert (promoted.name, champion(tmp_path)) == ("b", promoted)


def test_the_champion_before_is_kept_and_no_older_one(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        promote(tmp_path, trained(tmp_path, name), number)
    assert names(tmp_path / "models") == {"b", "c"}
    assert discard(tmp_path, "") == []


def test_a_champion_that_becomes_one_again_keeps_its_model(tmp_path: Path) -> None:
    first, second, third = (trained(tmp_path, name) for name in "abc")
    for number, one in enumerate([first, second, first]):
        promoted = promote(tmp_path, one, number)
    assert (champion(tmp_path), promoted.number) == (promoted, 3)
    assert (Path(promoted.path) / "model.pt").read_text() == "a"
    assert names(tmp_path / "models") == {"a", "b"}
    promote(tmp_path, third, 3)
    assert names(tmp_path / "models") == {"a", "c"}


def test_the_same_candidate_many_times_at_once_is_promoted_once(tmp_path: Path) -> None:
    candidate = trained(tmp_path, "a", {f"{number}.pt": "weights" for number in range(50)})
    together = threading.Barrier(6)

    def try_it(_: int) -> Champion:
        together.wait()
        return promote(tmp_path, candidate, 0)

    with ThreadPoolExecutor(6) as pool:
        promoted = list(pool.map(try_it, range(6)))
    assert promoted == [champion(tmp_path)] * 6
    assert names(tmp_path / "promotions") == {"000001.json"}
    assert names(tmp_path / "models") == {"a"}


def test_a_retry_after_another_champion_is_no_success(tmp_path: Path) -> None:
    first = trained(tmp_path, "a")
    promote(tmp_path, first, 0)
    second = promote(tmp_path, trained(tmp_path, "b"), 1)
    with pytest.raises(SupersededError, match="compared with promotion 0, and there is promotion 2"):
        promote(tmp_path, first, 0)
    assert champion(tmp_path) == second


def test_what_stands_in_the_way_of_a_model_is_left_and_named(tmp_path: Path) -> None:
    candidate = trained(tmp_path, "a")
    damaged = Path(promote(tmp_path, candidate, 0).path)
    promote(tmp_path, trained(tmp_path, "b"), 1)
    (damaged / "model.pt").unlink()
    with pytest.raises(ManycpuError, match="models/a is not the model that is to be there"):
        promote(tmp_path, candidate, 2)
    assert names(tmp_path / "models") == {"a", "b"}


def test_a_model_that_is_gone_or_changed_is_not_promoted(tmp_path: Path) -> None:
    candidate = trained(tmp_path, "a")
    (Path(candidate.path) / "model.pt").write_text("another")
    with pytest.raises(ManycpuError, match="has changed since it was evaluated"):
        promote(tmp_path, candidate, 0)
    with pytest.raises(ManycpuError, match="the model that was evaluated is not at"):
        promote(tmp_path, candidate.model_copy(update={"path": str(tmp_path / "none")}), 0)
    assert champion(tmp_path) is None
    assert names(tmp_path / "models") == set()


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


FAILED = [{"rate": 0.5, "error": "diverged"}]
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
    good = {"key": "k", "path": "/m", "sha256": "0123456789", "metrics": {}}
    candidates = [
        {"rate": 0.1, "accuracy": 0.7, **good},
        {"rate": 0.2, "accuracy": 0.8, **good},
        {"rate": 0.3, "error": "diverged"},
    ]
    (best,) = steps.choose(candidates, "run", "/data", params)
    assert (best["rate"], best["name"]) == (0.2, "run-01234567")
    assert steps.choose(candidates[0], "run", "/data", params)[0]["rate"] == 0.1
    promote(tmp_path, trained(tmp_path, "a"), 0)
    assert [one["name"] for one in steps.choose(candidates, "run", "/data", params)] == ["run-01234567", "a"]
    with pytest.raises(AirflowFailException, match="no candidate succeeded"):
        steps.choose(candidates[2:], "run", "/data", params)


@pytest.mark.parametrize(
    ("scores", "threshold", "ask", "task"),
    [
        ([0.9, 0.8], 0.0, True, "approve"),
        ([0.9, 0.8], 0.0, False, "promote"),
        ([0.9, 0.8], 0.2, True, None),
        ([0.9, 0.9], 0.0, True, None),
        ([0.9], 0.0, True, "approve"),
        ([0.9], 0.0, False, "promote"),
        ([0.9], 0.95, False, None),
    ],
)
def test_what_comes_after_the_comparison(
    params: dict[str, Any], scores: list[float], threshold: float, task: str | None, *, ask: bool
) -> None:
    contenders = [
        {"rate": 0.1, "data": f"/data/v000{number}", "sha256": "ab" * 32} for number in range(len(scores))
    ]
    given = params | {"threshold": threshold, "ask": ask}
    compared = steps.compare(contenders, [{"accuracy": score} for score in scores], FAILED, given, RUN)
    assert steps.road(compared["better"], given) == task
    assert ("there is no champion yet" in compared["says"]) == (len(scores) == 1)
    assert ("| none yet |" in compared["body"]) == (len(scores) == 1)
    for text in (compared["says"], compared["body"]):
        assert "Candidates that failed: those of rate 0.5." in text


def test_the_page_of_a_run_is_below_airflows_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example.org/team/")
    assert words.page("champion", "a+b") == (
        "https://airflow.example.org/team/dags/champion/runs/a%2Bb/plugin/training"
    )


def test_the_registry_is_asked_only_where_runs_are_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert name_champion("0123456789") == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The ``noload``")  # of MLflow's own store
def test_what_the_run_has_registered_gets_the_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    client = MlflowClient()
    experiment = client.create_experiment("digits", artifact_location=str(tmp_path / "artifacts"))
    client.create_registered_model("digits")
    for key in ("loser", "winner", "later"):
        run = client.create_run(experiment, tags={"manycpu.key": key}).info.run_id
        client.create_model_version("digits", f"runs:/{run}/model", run)
    assert name_champion("winner") == ["digits 2"]
    assert client.get_model_version_by_alias("digits", "champion").version in (2, "2")
    assert name_champion("nobody") == []
