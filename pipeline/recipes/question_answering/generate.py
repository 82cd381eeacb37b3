"""Write the demo's data set: ``python -m manycpu.pipeline.recipes.question_answering.generate FOLDER``.

A context states three to five facts about one thing, or two facts each about two things of different kinds.
Two of the facts are always of the same kind (two persons, two years), so that a model must read the question.
Names are invented and used once: no name, year or amount of a validation context is in a training context.
"""

import json
import random
import string
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

SPLITS = {"train": 720, "validation": 75}
"""Contexts of each split."""
QUESTIONS_PER_CONTEXT = 4
_FACTS_OF_ONE, _FACTS_OF_TWO = (3, 4, 5), (2,)  # numbers of facts of each thing
_TWO_THINGS_CHANCE, _AGAIN_CHANCE = 0.3, 0.5
_VALIDATION_YEARS = 200  # years that only validation contexts have
# fmt: off
_ONSETS = ("b", "br", "c", "d", "dr", "f", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s", "sh",
           "st", "t", "th", "tr", "v", "w", "y", "z")
_VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ea", "ou", "é", "ö")
_CODAS = ("l", "ld", "lm", "m", "n", "nd", "nt", "r", "rn", "rth", "s", "sk", "th", "v", "x", "š")
# fmt: on
_COMPANIES = ("{} Brothers", "the {} Company", "{} and Sons", "the {} Guild", "the {} Trust", "{} Works")


class Subject(NamedTuple):
    """A kind of thing; subjects.toml explains its fields."""

    names: list[str]
    again: str
    facts: dict[str, str]
    """Name of a fact -> its kind, as :meth:`Names.draw` takes it."""
    statements: list[str]
    questions: dict[str, list[str]]


class Thing(NamedTuple):
    """A thing that a context describes; ``facts``: name of a fact -> its text; ``it`` -> its own name."""

    subject: Subject
    facts: dict[str, str]


class Names:
    """Invents words and amounts, never the same twice, and draws years, none twice before all are drawn.

    Args:
        rng: The random numbers.
        used: Words and amounts that were used before; new ones are added.
        years: The years to draw from.
    """

    def __init__(self, rng: random.Random, used: set[str], years: Sequence[int]) -> None:
        self._rng, self._used, self._years = rng, used, years
        self._undrawn_years: list[int] = []

    def draw(self, kind: str) -> str:
        """Draw a name, person, place, company, year or count.

        Raises:
            ValueError: There is no such kind.
        """
        match kind:
            case "name" | "place":
                return self._word()
            case "person":
                return f"{self._word()} {self._word()}"
            case "company":
                return _pick(self._rng, _COMPANIES).format(self._word())
            case "year":
                self._undrawn_years = self._undrawn_years or _shuffle(self._rng, self._years)
                return str(self._undrawn_years.pop())
            case "count":
                rng = self._rng
                # From 2,000 to 98,999; the comma, so that no amount looks like a year.
                return self._unused(
                    draw=lambda: f"{2 + int(rng.random() * 97)},{int(rng.random() * 1000):03d}"
                )
        raise ValueError(kind)

    def _word(self) -> str:
        """Invent a capitalised word of two syllables."""
        parts = (_ONSETS, _VOWELS, _ONSETS, _VOWELS, _CODAS)
        return self._unused(draw=lambda: "".join(_pick(self._rng, part) for part in parts).capitalize())

    def _unused(self, draw: Callable[[], str]) -> str:
        """Draw until the result is new, and note it as used."""
        while (name := draw()) in self._used:
            pass
        self._used.add(name)
        return name


@cache
def subjects() -> list[Subject]:
    """Read the kinds of things."""
    text = files(__package__).joinpath("subjects.toml").read_text(encoding="utf-8")
    return [Subject(**subject) for subject in tomllib.loads(text).values()]


def data_set() -> dict[str, dict[str, Any]]:
    """Make both splits in SQuAD v1.1 format; equal in every version of Python, on every machine."""
    rng = random.Random(20_260)  # noqa: S311 - sentences, not secrets
    years, used = _shuffle(rng, range(1100, 2000)), set[str]()
    split_years = {"train": years[_VALIDATION_YEARS:], "validation": years[:_VALIDATION_YEARS]}
    documents: dict[str, dict[str, Any]] = {}
    for split, count in SPLITS.items():
        # `used` is the same for both splits: a name of one is never in the other.
        names = Names(rng, used, years=split_years[split])
        articles = [_article(f"{split}-{number}", names, rng) for number in range(count)]
        documents[split] = {"version": "1.1", "data": articles}
    return documents


def main(folder: str) -> None:
    """Write ``train.json`` and ``validation.json`` into a folder, with one article a line."""
    for split, document in data_set().items():
        articles = ",\n".join(json.dumps(article, ensure_ascii=False) for article in document["data"])
        text = f'{{"version": "{document["version"]}", "data": [\n{articles}\n]}}\n'
        Path(folder, f"{split}.json").write_text(text, encoding="utf-8")


def _article(key: str, names: Names, rng: random.Random) -> dict[str, Any]:
    """Make an article in SQuAD's format: a context, and questions about its facts with their answers."""
    things = _draw_things(names, rng)
    context = _context(things, rng)
    questions: list[tuple[str, str]] = []  # a question and its answer, for each fact that has wordings
    for subject, facts in things:
        for fact, wordings in subject.questions.items():
            # Wordings that name a fact which the context lacks cannot be used.
            usable_wordings = [words for words in wordings if _braces(words) <= set(facts)]
            if fact in facts and usable_wordings:
                questions.append((_pick(rng, usable_wordings).format(**facts), _bare(facts[fact])))
    qas = [
        {
            "id": f"{key}-{i}",
            "question": question,
            "answers": [{"text": text, "answer_start": context.index(text)}],
        }
        for i, (question, text) in enumerate(_shuffle(rng, questions)[:QUESTIONS_PER_CONTEXT])
    ]
    title = " and ".join(_bare(thing.facts["it"]) for thing in things)
    return {"title": title, "paragraphs": [{"context": context, "qas": qas}]}


def _choose_facts(rng: random.Random) -> list[tuple[Subject, list[str]]]:
    """Choose one or two subjects, and which of their facts the context states."""
    count, sizes = (2, _FACTS_OF_TWO) if rng.random() < _TWO_THINGS_CHANCE else (1, _FACTS_OF_ONE)
    fact_count = _pick(rng, sizes)
    # Drawn again until two facts are of the same kind, so that a model must read the question.
    while True:
        chosen_subjects = _shuffle(rng, subjects())[:count]
        plan = [(subject, _shuffle(rng, sorted(subject.facts))[:fact_count]) for subject in chosen_subjects]
        # Fewer kinds than facts: two facts share a kind.
        if len({subject.facts[fact] for subject, facts in plan for fact in facts}) < count * fact_count:
            return plan


def _draw_things(names: Names, rng: random.Random) -> list[Thing]:
    """Draw one or two things with their facts: first which facts, then names, years and amounts."""
    things = []
    for subject, fact_names in _choose_facts(rng):
        kinds = subject.facts  # name of a fact -> its kind
        facts = {fact: names.draw(kinds[fact]) for fact in fact_names}  # name of a fact -> its text
        # Subjects list their years in the order in which things happen: the least year is the first one's.
        dated = [fact for fact in kinds if fact in facts and kinds[fact] == "year"]
        facts |= dict(zip(dated, sorted(facts[fact] for fact in dated), strict=True))
        own_name = _pick(rng, subject.names).format(names.draw("name"))
        things.append(Thing(subject, {"it": own_name, **facts}))
    return things


def _context(things: list[Thing], rng: random.Random) -> str:
    """Write the context: sentences in random order that state every fact of the things once."""
    chosen: list[tuple[Thing, str]] = []
    for thing in things:
        unstated = set(thing.facts) - {"it"}
        for statement in _shuffle(rng, thing.subject.statements):
            stated = _braces(statement) - {"it"}
            if stated <= unstated:  # it repeats no fact
                unstated -= stated
                chosen.append((thing, statement))
    sentences: list[str] = []
    before: Thing | None = None
    for thing, statement in _shuffle(rng, chosen):
        # The second of two sentences about the same thing may say "it", or the like, for the name.
        uses_pronoun = thing is before and rng.random() < _AGAIN_CHANCE
        name = thing.subject.again if uses_pronoun else thing.facts["it"]
        text = statement.format(**{**thing.facts, "it": name})
        sentences.append(text[0].upper() + text[1:])
        before = thing
    return " ".join(sentences)


def _braces(text: str) -> set[str]:
    """Return the names of the facts that fill a text's braces."""
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def _bare(name: str) -> str:
    """Return a name without its article."""
    return name.removeprefix("the ")


def _pick(rng: random.Random, choices: Sequence[T]) -> T:
    """Choose one item, by ``random()``: only that gives the same numbers in every version of Python."""
    return choices[int(rng.random() * len(choices))]


def _shuffle(rng: random.Random, items: Sequence[T]) -> list[T]:
    """Return the items in a random order, for the same reason as :func:`_pick`."""
    order = sorted((rng.random(), index) for index in range(len(items)))
    return [items[index] for _, index in order]


if __name__ == "__main__":
    main(sys.argv[1])
