"""Write the demo's data set: ``python -m manycpu.pipeline.recipes.question_answering.generate FOLDER``.

A context tells three to five facts of one thing, or two facts each of two things of different kinds. Always
two are of the same kind (two persons, two years), so that the question has to be read. Names are invented and
drawn once: no name, year or amount of a validation context is in a training context.
"""

import json
import random
import string
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from manycpu.pipeline.recipes.question_answering.names import YEARS, Names, pick, shuffled

__all__ = ["SPLITS", "data_set", "main", "subjects"]

SPLITS = {"train": 720, "validation": 75}
"""Contexts of each split."""
QUESTIONS_PER_CONTEXT = 4
_FACTS_OF_ONE, _FACTS_OF_TWO = (3, 4, 5), (2,)
_TWO_THINGS_CHANCE, _AGAIN_CHANCE = 0.3, 0.5
_VALIDATION_YEARS = 200
_SEED = 20_260


class Subject(NamedTuple):
    """A kind of thing, as subjects.toml explains it."""

    names: list[str]
    again: str
    facts: dict[str, str]
    statements: list[str]
    questions: dict[str, list[str]]


class Thing(NamedTuple):
    """A thing that a context tells of; ``facts`` also has its own name, as ``it``."""

    subject: Subject
    facts: dict[str, str]


@cache
def subjects() -> list[Subject]:
    """Read the kinds of things."""
    text = files(__package__).joinpath("subjects.toml").read_text(encoding="utf-8")
    return [Subject(**subject) for subject in tomllib.loads(text).values()]


def data_set() -> dict[str, dict[str, Any]]:
    """Make both splits in SQuAD v1.1 format; the same in every Python, on every machine."""
    rng = random.Random(_SEED)  # noqa: S311 - sentences, not secrets
    years, used = shuffled(rng, YEARS), set[str]()
    own = {"train": years[_VALIDATION_YEARS:], "validation": years[:_VALIDATION_YEARS]}
    return {split: _split(split, count, Names(rng, used, own[split]), rng) for split, count in SPLITS.items()}


def main(folder: str) -> None:
    """Write ``train.json`` and ``validation.json`` into a folder."""
    for split, document in data_set().items():
        text = json.dumps(document, ensure_ascii=False, indent=0, separators=(",", ":"))
        Path(folder, f"{split}.json").write_text(text + "\n", encoding="utf-8")


def _split(name: str, count: int, names: Names, rng: random.Random) -> dict[str, Any]:
    articles = [_article(f"{name}-{i}", names, rng) for i in range(count)]
    return {"version": "1.1", "data": articles}


def _article(key: str, names: Names, rng: random.Random) -> dict[str, Any]:
    things = [_thing(*planned, names, rng) for planned in _plan(rng)]
    context = _context(things, rng)
    questions = shuffled(rng, [question for thing in things for question in _questions(thing, rng)])
    qas = [
        {"id": f"{key}-{i}", "question": question, "answers": [_answer(context, text)]}
        for i, (question, text) in enumerate(questions[:QUESTIONS_PER_CONTEXT])
    ]
    title = " and ".join(_bare(thing.facts["it"]) for thing in things)
    return {"title": title, "paragraphs": [{"context": context, "qas": qas}]}


def _plan(rng: random.Random) -> list[tuple[Subject, list[str]]]:
    """Choose subjects and their facts, until no two facts are of the same kind."""
    count, sizes = (2, _FACTS_OF_TWO) if rng.random() < _TWO_THINGS_CHANCE else (1, _FACTS_OF_ONE)
    fact_count = pick(rng, sizes)
    while True:
        kinds = shuffled(rng, subjects())[:count]
        plan = [(subject, shuffled(rng, sorted(subject.facts))[:fact_count]) for subject in kinds]
        if len({subject.facts[fact] for subject, facts in plan for fact in facts}) < count * fact_count:
            return plan


def _thing(subject: Subject, chosen: list[str], names: Names, rng: random.Random) -> Thing:
    facts = {fact: names.draw(subject.facts[fact]) for fact in chosen}
    # Subjects list their years in the order in which things happen.
    dated = [fact for fact in subject.facts if fact in facts and subject.facts[fact] == "year"]
    facts |= dict(zip(dated, sorted(facts[fact] for fact in dated), strict=True))
    return Thing(subject, {"it": pick(rng, subject.names).format(names.draw("name")), **facts})


def _context(things: list[Thing], rng: random.Random) -> str:
    statements = shuffled(rng, [(thing, words) for thing in things for words in _statements(thing, rng)])
    sentences: list[str] = []
    before: Thing | None = None
    for thing, words in statements:
        sentences.append(_sentence(thing, words, again=thing is before and rng.random() < _AGAIN_CHANCE))
        before = thing
    return " ".join(sentences)


def _statements(thing: Thing, rng: random.Random) -> Iterator[str]:
    """Choose statements that state every fact once."""
    remaining = set(thing.facts) - {"it"}
    for words in shuffled(rng, thing.subject.statements):
        used = _braces(words) - {"it"}
        if used <= remaining:
            remaining -= used
            yield words


def _sentence(thing: Thing, words: str, *, again: bool) -> str:
    values = thing.facts | {"it": thing.subject.again} if again else thing.facts
    text = words.format(**values)
    return text[0].upper() + text[1:]


def _questions(thing: Thing, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield a question and its answer for each fact, and for the thing itself where that can be asked."""
    for fact, wordings in thing.subject.questions.items():
        usable = [words for words in wordings if _braces(words) <= set(thing.facts)]
        if fact in thing.facts and usable:
            yield pick(rng, usable).format(**thing.facts), _bare(thing.facts[fact])


def _answer(context: str, text: str) -> Mapping[str, Any]:
    return {"text": text, "answer_start": context.index(text)}


def _braces(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def _bare(name: str) -> str:
    return name.removeprefix("the ")


if __name__ == "__main__":
    main(sys.argv[1])
