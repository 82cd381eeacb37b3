"""Promotions: none is half done, none passes over another, and none deletes a model that counts."""

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.champion import trained

from manycpu.operators.champion.promotions import (
    Candidate,
    Champion,
    SupersededError,
    champion,
    discard,
    promote,
)
from manycpu.pipeline.adapters import disk
from manycpu.pipeline.spec.errors import ManycpuError


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_promotion_has_a_copy_of_the_model_alone(tmp_path: Path) -> None:
    candidate = trained(tmp_path, "a")
    promoted = promote(tmp_path, candidate, 0)
    assert champion(tmp_path) == promoted
    assert (promoted.number, promoted.path) == (1, str(tmp_path / "models" / "a"))
    assert names(Path(promoted.path)) == {"model.pt", "manifest.json"}
    assert promote(tmp_path, candidate, 0) == promoted, "a retry promotes nothing again"


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
    with pytest.raises(ManycpuError, match="models/a is not the model that was evaluated"):
        promote(tmp_path, candidate, 2)
    assert names(tmp_path / "models") == {"a", "b"}


@pytest.mark.parametrize("number", [math.nan, math.inf, None])
def test_what_is_no_finite_number_is_not_promoted(tmp_path: Path, number: float | None) -> None:
    first = promote(tmp_path, trained(tmp_path, "a"), 0)
    candidate = trained(tmp_path, "b").model_copy(update={"accuracy": number})
    with pytest.raises(ValueError, match="accuracy"):
        promote(tmp_path, candidate, 1)
    assert champion(tmp_path) == first
    assert names(tmp_path / "promotions") == {"000001.json"}


def test_metrics_that_are_not_finite_block_nothing(tmp_path: Path) -> None:
    candidate = trained(tmp_path, "a").model_copy(update={"metrics": {"loss": math.nan}})
    promote(tmp_path, candidate, 0)
    assert promote(tmp_path, trained(tmp_path, "b"), 1) == champion(tmp_path)


def test_a_stray_file_is_no_promotion(tmp_path: Path) -> None:
    first = promote(tmp_path, trained(tmp_path, "a"), 0)
    for name in ("2.json.json", "2.json", "000002.json.bak", "000002 (copy).json"):
        (tmp_path / "promotions" / name).write_text("{")
    assert champion(tmp_path) == first
    assert promote(tmp_path, trained(tmp_path, "b"), 1).number == 2


@pytest.mark.parametrize("there", [True, False])
def test_a_link_among_the_models_is_deleted_and_not_what_it_leads_to(tmp_path: Path, *, there: bool) -> None:
    elsewhere = tmp_path / "elsewhere"
    if there:
        elsewhere.mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "b").symlink_to(elsewhere)
    assert discard(tmp_path, "b") == ["b"]
    assert names(tmp_path / "models") == set()
    assert elsewhere.exists() == there


def test_a_link_in_the_place_of_an_old_model_is_deleted_and_not_what_it_leads_to(tmp_path: Path) -> None:
    first = Path(promote(tmp_path, trained(tmp_path, "a"), 0).path)
    first.rename(tmp_path / "elsewhere")
    first.symlink_to(tmp_path / "elsewhere")
    for number, name in enumerate("bc", 1):
        promote(tmp_path, trained(tmp_path, name), number)
    assert names(tmp_path / "models") == {"b", "c"}
    assert (tmp_path / "elsewhere" / "model.pt").exists()


def test_a_model_that_is_gone_or_changed_is_not_promoted(tmp_path: Path) -> None:
    candidate = trained(tmp_path, "a")
    (Path(candidate.path) / "model.pt").write_text("another")
    with pytest.raises(ManycpuError, match="has changed since it was evaluated"):
        promote(tmp_path, candidate, 0)
    with pytest.raises(ManycpuError, match="the model that was evaluated is not at"):
        promote(tmp_path, candidate.model_copy(update={"path": str(tmp_path / "none")}), 0)
    assert champion(tmp_path) is None
    assert names(tmp_path / "models") == set()
