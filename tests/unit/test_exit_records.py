"""A round is finished where each of its ranks has left a record of a good end; nothing less proves it."""

import os
from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline.spec.exit_records import finished_round, write


def record(rank: int, meeting: str = "m", code: int = 0, **fields: Any) -> dict[str, Any]:
    known = {"meeting": meeting, "rank": rank, "host": "a", "world_size": 2, "code": code, "time": 1.0}
    return known | {"lines": []} | fields


def test_all_ranks_of_a_round_finish_it(tmp_path: Path) -> None:
    for rank in (1, 0):
        write(tmp_path / "exits", record(rank))
    assert finished_round(tmp_path / "exits") == [record(0), record(1)]


def test_the_last_finished_round_counts(tmp_path: Path) -> None:
    for meeting, time in (("x", 3.0), ("a", 5.0), ("m", 4.0)):
        for rank in (0, 1):
            write(tmp_path, record(rank, meeting, time=time))
    write(tmp_path, record(0, "later", time=6.0))
    assert [each["meeting"] for each in finished_round(tmp_path)] == ["a", "a"]


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record(0)],
        [record(0), record(1, code=1)],
        [record(0), record(1, "other")],
        [record(1), record(2)],
    ],
    ids=["none", "one is missing", "one failed", "two rounds", "none of the first"],
)
def test_less_is_no_finished_round(records: list[dict[str, Any]], tmp_path: Path) -> None:
    for each in records:
        write(tmp_path, each)
    assert finished_round(tmp_path / "nowhere") == finished_round(tmp_path) == []


@pytest.mark.parametrize("text", ["", '{"rank": 1', "[]", '{"rank": 1}', "null"])
def test_what_is_no_record_counts_for_nothing(text: str, tmp_path: Path) -> None:
    write(tmp_path, record(0))
    (tmp_path / "m" / "1.json").write_text(text)
    assert finished_round(tmp_path) == []


def test_records_that_cannot_be_listed_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        write(tmp_path, record(rank))
    listdir, scandir = os.listdir, os.scandir

    def refuse(path: object) -> Any:
        raise PermissionError(path)

    monkeypatch.setattr("os.listdir", lambda path: refuse(path) if Path(path).name == "m" else listdir(path))
    monkeypatch.setattr("os.scandir", lambda path: refuse(path) if Path(path).name == "m" else scandir(path))
    with pytest.raises(PermissionError):
        finished_round(tmp_path)
