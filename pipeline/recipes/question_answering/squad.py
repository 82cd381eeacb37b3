"""Read files in SQuAD's format: find the files of each split, check them, and read their questions.

Imports the standard library alone, so that preflight can check the data before a run starts. Two layouts are
supported: the official one (``data[].paragraphs[].qas[]``) and flat records (``data[]`` with ``context``,
``question`` and ``answers``), as Hugging Face's example scripts take them.

Source: Rajpurkar et al. 2016, https://rajpurkar.github.io/SQuAD-explorer/
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from manycpu.pipeline.recipes.files import below
from manycpu.pipeline.spec.errors import BadInputError

SPLITS = {"train": ("train",), "validation": ("dev", "val", "eval"), "test": ("test",)}
"""Split -> how the names of its files begin."""
_SUFFIXES = (".json", ".parquet")
_FIX = "Give a file in SQuAD v1.1 format, or a folder with train*.json and dev*.json or validation*.json"


Reader = Callable[[Any, str], list[tuple[str, int]]]
"""Reads the texts and starts of a record's answers; also takes where the record is."""


class Question(NamedTuple):
    """A question about a context; ``texts`` are its answers, ``starts`` where they begin, in characters."""

    id: str
    title: str
    context: str
    question: str
    texts: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()


class _Malformed(Exception):  # noqa: N818 - is caught in this file
    """A part of a file cannot be read; the message has its path in the document, and why."""


def splits(path: str | Path) -> dict[str, list[Path]]:
    """Return the files of each split: those in a folder, or a single file, by how their names begin.

    A single file is ``train`` if its name begins with no split's name.

    Raises:
        BadInputError: There are no such files, or those of a split are in several folders or formats.
    """
    path = Path(path)
    if path.is_file():
        return {_split(path) or "train": [path]}
    if not path.is_dir():
        raise BadInputError(f"there is no file or folder {path}", field="run.data", fix=_FIX)
    by_split: dict[str, list[Path]] = {}
    for file in below(path):
        if file.suffix in _SUFFIXES and (split := _split(file)):
            by_split.setdefault(split, []).append(file)
    if not by_split:
        raise BadInputError(f"{path} holds no file that could be a data set", field="run.data", fix=_FIX)
    # A split may have several files, but of one format and in one folder: else they are alternatives.
    for split, files in by_split.items():
        file_of_kind = {(file.parent, file.suffix): file for file in files}
        if len(file_of_kind) > 1:
            two_files = " and ".join(str(file) for file in list(file_of_kind.values())[:2])
            raise BadInputError(
                f"several files could be the {split} split: {two_files}",
                field="run.data",
                fix="Point it at the folder that holds one of them",
            )
    return by_split


def problems(path: str | Path, *, version_2: bool = False, trains: bool = False) -> list[str]:
    """List all that is wrong with a folder or file; empty: nothing. Parquet files are not read.

    Args:
        path: The folder or file.
        version_2: Questions may have no answer, as in SQuAD v2.0.
        trains: There must be a train split.
    """
    try:
        by_split = splits(path)
    except BadInputError as error:
        return [str(error)]
    if trains and "train" not in by_split:
        names = ", ".join(by_split)
        message = f"{path} holds nothing to train on: by their names, its files are of {names}"
        return [f"{message}. Name those to train on train*.json"]
    found: list[str] = []
    for split, files in by_split.items():
        for file in files:
            if file.suffix == ".json":
                _, faults = _scan(file, unanswered=version_2 or split == "test")
                found += faults
    return found


def repeated_id(ids: Iterable[Any]) -> str | None:
    """Describe an id that names more than one question, and how many; None: each id names one question."""
    for name, count in Counter(ids).most_common(1):
        if count > 1:
            return f"the id {name!r} names {count} questions"
    return None


def load(path: str | Path, *, unanswered: bool = False) -> list[Question]:
    """Read the questions of one JSON file; raises BadInputError for what :func:`problems` lists."""
    questions, faults = _scan(Path(path), unanswered=unanswered)
    if faults:
        raise BadInputError("\n".join(faults), field="run.data", fix=_FIX)
    return questions


def _split(file: Path) -> str | None:
    """Return the split that a file belongs to by the beginning of its name; None: no split."""
    name = file.name.lower()
    return next((split for split, starts in SPLITS.items() if name.startswith(starts)), None)


def _scan(file: Path, *, unanswered: bool) -> tuple[list[Question], list[str]]:
    """Return the questions of a file, and messages on what is wrong with the file or with them.

    ``unanswered``: questions may have no answer.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        questions = list(_questions(document))
    except UnicodeDecodeError as error:
        return [], [f"{file} is not UTF-8 text: {error}"]
    except json.JSONDecodeError as error:
        return [], [f"{file} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"]
    except _Malformed as error:
        return [], [f"{file} is not in SQuAD's format: {error}"]
    if not questions:
        return [], [f"{file} holds no question"]
    return questions, [f"{file}: {problem}" for problem in _faults(questions, unanswered=unanswered)]


def _questions(document: Any) -> Iterator[Question]:
    """Yield the questions of a document in one of the two layouts; ``data`` may also be the whole document.

    A flat record is an article and its only question at once.

    Raises:
        _Malformed: A part of the document cannot be read.
    """
    articles = _get(document, "data", list, location="") if isinstance(document, dict) else document
    if not isinstance(articles, list):
        raise _Malformed(f"an object with 'data' is needed at the top, not {_kind(document)}")
    for i, article in enumerate(articles):
        location = f"data[{i}]"
        if isinstance(article, dict) and "context" in article:
            yield _question(
                article, article, _get(article, "context", str, location), location, _read_columns
            )
            continue
        for j, paragraph in enumerate(_get(article, "paragraphs", list, location)):
            paragraph_location = f"{location}.paragraphs[{j}]"
            context = _get(paragraph, "context", str, paragraph_location)
            for k, record in enumerate(_get(paragraph, "qas", list, paragraph_location)):
                yield _question(record, article, context, f"{paragraph_location}.qas[{k}]", _read_objects)


def _question(record: Any, article: Any, context: str, location: str, read_answers: Reader) -> Question:
    """Read a question; ``article`` has its title, ``location`` is its path in the document, for messages.

    Raises:
        _Malformed: The record, or an answer in it, cannot be read.
    """
    question_id = str(_get(record, "id", (str, int), location))
    question = _get(record, "question", str, location)
    answers = read_answers(record, location) if "answers" in record else []
    texts = tuple(text for text, _ in answers)
    starts = tuple(start for _, start in answers)
    title = str(article.get("title", ""))
    try:
        "".join([question_id, title, context, question, *texts]).encode()
    except UnicodeEncodeError as error:  # JSON can name half of a character, as \ud83d
        raise _Malformed(f"{location} has half of a character: {error}") from error
    return Question(question_id, title, context, question, texts, starts)


def _read_objects(record: Any, location: str) -> list[tuple[str, int]]:
    """Read answers as the official layout has them: a list of objects with text and answer_start."""
    pairs = []
    for i, answer in enumerate(_get(record, "answers", list, location)):
        at = f"{location}.answers[{i}]"
        pairs.append((_get(answer, "text", str, at), _get(answer, "answer_start", int, at)))
    return pairs


def _read_columns(record: Any, location: str) -> list[tuple[str, int]]:
    """Read answers as flat records have them: one object with a list of texts and a list of starts."""
    answers = _get(record, "answers", dict, location)
    at = f"{location}.answers"
    texts = _get(answers, "text", list, at)
    starts = _get(answers, "answer_start", list, at)
    if len(texts) != len(starts):
        raise _Malformed(f"{at} has {len(texts)} texts and {len(starts)} starts")
    pairs = list(zip(texts, starts, strict=True))
    for text, start in pairs:
        is_number = isinstance(start, int) and not isinstance(start, bool)  # to Python, a bool is an int
        if not isinstance(text, str) or not is_number:
            raise _Malformed(
                f"{at} has {json.dumps(text)} at {json.dumps(start)}: a text and a number are needed"
            )
    return pairs


def _get(holder: Any, key: str, kind: type | tuple[type, ...], location: str) -> Any:
    """Return the value of a key; raises _Malformed if it is missing or of another type than ``kind``."""
    name_of_holder = location or "the top"
    if not isinstance(holder, dict):
        raise _Malformed(f"{name_of_holder} is {_kind(holder)}, not an object with {key!r}")
    if key not in holder:
        raise _Malformed(f"{name_of_holder} has no {key!r}")
    if not isinstance(holder[key], kind) or isinstance(holder[key], bool):  # to Python, a bool is an int
        raise _Malformed(f"{key!r} of {name_of_holder} is {_kind(holder[key])}")
    return holder[key]


def _kind(value: Any) -> str:
    """Name the type of a JSON value in words, for messages."""
    names = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number"}
    return names.get(type(value), json.dumps(value))


def _faults(questions: Sequence[Question], *, unanswered: bool) -> Iterator[str]:
    """Yield a message for each kind of fault of the questions, with the first example.

    The kinds: an answer is not where it should be, an id is used twice, answers are missing.
    """
    misplaced = [
        (question, text, start)
        for question in questions
        for text, start in zip(question.texts, question.starts, strict=True)
        if start < 0 or not text or question.context[start : start + len(text)] != text
    ]
    for question, text, start in misplaced[:1]:  # the first one is the example for all
        begin = max(start, 0)
        actual = question.context[begin : begin + max(len(text), 1)]
        yield (
            f"{len(misplaced)} answers are not where answer_start says; "
            f"the first is of question {question.id!r}: {text!r} should stand at character {start}, "
            f"where the context has {actual!r}"
        )
    if repeated := repeated_id(question.id for question in questions):
        yield repeated
    without = [question for question in questions if not question.texts]
    if len(without) == len(questions) and not unanswered:
        yield "no question has an answer"
    elif without and not unanswered:
        yield (
            f"{len(without)} of {len(questions)} questions have no answer, the first is {without[0].id!r}; "
            "for data of SQuAD v2.0 add --version_2_with_negative to run.args"
        )
