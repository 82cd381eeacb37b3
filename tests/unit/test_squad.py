"""Files in SQuAD's format: what is read from them, and what is said about bad ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from manycpu.pipeline.recipes.question_answering import squad
from manycpu.pipeline.spec.errors import BadInputError

CONTEXT = "Ilka Brennöth drew the plans in 1893."


def document(**changes: Any) -> dict[str, Any]:
    asked = {
        "id": "q1",
        "question": "Who drew the plans?",
        "answers": [{"text": "Ilka Brennöth", "answer_start": 0}],
    }
    qas = [asked | changes]
    return {
        "version": "1.1",
        "data": [{"title": "Plans", "paragraphs": [{"context": CONTEXT, "qas": qas}]}],
    }


def written(folder: Path, content: Any, name: str = "train.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_the_official_layout_is_read(tmp_path: Path) -> None:
    (asked,) = squad.load(written(tmp_path, document()))
    assert asked == squad.Question("q1", "Plans", CONTEXT, "Who drew the plans?", ("Ilka Brennöth",), (0,))
    assert squad.problems(tmp_path) == []


def test_flat_records_are_read(tmp_path: Path) -> None:
    record = {
        "id": 7,
        "context": CONTEXT,
        "question": "When?",
        "answers": {"text": ["1893"], "answer_start": [32]},
    }
    (asked,) = squad.load(written(tmp_path, {"data": [record]}))
    assert (asked.id, asked.texts, asked.starts) == ("7", ("1893",), (32,))
    assert squad.load(written(tmp_path, [record])) == [asked]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"data": [', "is not JSON: line 1, column 11"),
        ("[1, 2]", "data[0] is a number, not an object with 'paragraphs'"),
        ("3", "an object with 'data' is needed at the top, not a number"),
        ({"version": "1.1"}, "the top has no 'data'"),
        ({"data": {}}, "'data' of the top is an object"),
        ({"data": []}, "holds no question"),
        ({"data": [{"title": "x"}]}, "data[0] has no 'paragraphs'"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, "data[0].paragraphs[0] has no 'context'"),
        ({"data": [{"paragraphs": [{"context": "x"}]}]}, "data[0].paragraphs[0] has no 'qas'"),
        (document(question=None), "'question' of data[0].paragraphs[0].qas[0] is null"),
        (document(answers=["Ilka"]), "data[0].paragraphs[0].qas[0].answers[0] is a text, not an object"),
        (document(answers=[{"text": "Ilka"}]), "qas[0].answers[0] has no 'answer_start'"),
        (document(answers=[{"text": "Ilka", "answer_start": "0"}]), "'answer_start' of data[0]"),
        (document(answers=[]), "no question has an answer"),
        (document(question="Who \ud83d?"), "data[0].paragraphs[0].qas[0] has half of a character"),
        (
            {
                "data": [
                    {"id": 1, "context": "x", "question": "?", "answers": {"text": ["x"], "answer_start": []}}
                ]
            },
            "data[0].answers has 1 texts and 0 starts",
        ),
        (
            {
                "data": [
                    {"id": 1, "context": "x", "question": "?", "answers": {"text": [1], "answer_start": [0]}}
                ]
            },
            "data[0].answers has 1 at 0: a text and a number are needed",
        ),
    ],
)
def test_a_malformed_file_is_told_with_its_place(tmp_path: Path, content: Any, said: str) -> None:
    path = written(tmp_path, content)
    (problem,) = squad.problems(tmp_path)
    assert str(path) in problem
    assert said in problem
    with pytest.raises(BadInputError, match=r"run\.data: "):
        squad.load(path)


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_bytes(b"\xff\xfe{")
    (problem,) = squad.problems(tmp_path)
    assert "is not UTF-8 text" in problem


@pytest.mark.parametrize(("text", "start"), [("Brennöth", 6), ("Brennöth", -8), ("", 3), ("1893", 400)])
def test_answers_that_are_not_where_they_should_be_are_counted(tmp_path: Path, text: str, start: int) -> None:
    wrong = document(answers=[{"text": text, "answer_start": start}] * 2)
    (problem,) = squad.problems(written(tmp_path, wrong))
    assert "2 answers are not where answer_start says; the first is of question 'q1'" in problem
    assert f"{text!r} should stand at character {start}" in problem


def test_a_repeated_id_is_told(tmp_path: Path) -> None:
    twice = document()
    twice["data"] *= 2
    (problem,) = squad.problems(written(tmp_path, twice))
    assert "the id 'q1' names 2 questions" in problem


def test_questions_without_an_answer_need_version_2(tmp_path: Path) -> None:
    mixed = document()
    mixed["data"].extend(document(id="q2", answers=[])["data"])
    path = written(tmp_path, mixed)
    (problem,) = squad.problems(path)
    assert "1 of 2 questions have no answer, the first is 'q2'" in problem
    assert "--version_2_with_negative" in problem
    assert squad.problems(path, version_2=True) == []
    assert [asked.id for asked in squad.load(path, unanswered=True)] == ["q1", "q2"]


def test_a_test_split_needs_no_answers(tmp_path: Path) -> None:
    written(tmp_path, document(answers=[]), "test.json")
    assert squad.problems(tmp_path) == []


def test_splits_are_told_by_names(tmp_path: Path) -> None:
    names = ("train-v1.1.json", "dev-v1.1.json", "test.json", "dataset_infos.json", "README.md")
    for name in names:
        written(tmp_path, "{}", name)
    found = squad.splits(tmp_path)
    assert {split: [file.name for file in files] for split, files in found.items()} == {
        "train": ["train-v1.1.json"],
        "validation": ["dev-v1.1.json"],
        "test": ["test.json"],
    }


def test_the_hubs_layout_is_known(tmp_path: Path) -> None:
    folder = tmp_path / "plain_text"
    folder.mkdir()
    for name in (
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
        "validation-00000-of-00001.parquet",
    ):
        written(folder, "", name)
    found = squad.splits(tmp_path)
    assert [file.name for file in found["train"]] == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    assert list(found) == ["train", "validation"]


def test_one_file_is_its_split(tmp_path: Path) -> None:
    assert list(squad.splits(written(tmp_path, "{}", "dev-v1.1.json"))) == ["validation"]
    assert list(squad.splits(written(tmp_path, "{}", "questions.json"))) == ["train"]


def test_a_folder_without_data_is_told(tmp_path: Path) -> None:
    written(tmp_path, "x", "notes.txt")
    assert squad.problems(tmp_path)[0].startswith(f"run.data: {tmp_path} holds no file")
    assert "there is no file or folder" in squad.problems(tmp_path / "nowhere")[0]


def test_two_folders_with_the_same_split_are_told(tmp_path: Path) -> None:
    for name in ("v1", "v2"):
        (tmp_path / name).mkdir()
        written(tmp_path / name, document())
    with pytest.raises(BadInputError, match="several files could be the train split"):
        squad.splits(tmp_path)
