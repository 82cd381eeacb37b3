"""Invented words for the demo's data set: drawn once, and no model has seen them."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["YEARS", "Names", "pick", "shuffled"]

T = TypeVar("T")

# fmt: off
_ONSETS = ("b", "br", "c", "d", "dr", "f", "g", "gr", "h", "j", "k", "l", "m", "n", "p", "qu", "r", "s", "sh",
           "st", "t", "th", "tr", "v", "w", "y", "z")
_VOWELS = ("a", "e", "i", "o", "u", "a", "e", "i", "o", "u", "ai", "ea", "ou", "é", "ö")
_CODAS = ("l", "ld", "lm", "m", "n", "nd", "nt", "r", "rn", "rth", "s", "sk", "th", "v", "x", "š")
# fmt: on
_COMPANIES = ("{} Brothers", "the {} Company", "{} and Sons", "the {} Guild", "the {} Trust", "{} Works")
YEARS = range(1100, 2000)


class Names:
    """Draws words and amounts, never the same one twice, and years, each again only when all have been drawn.

    Args:
        rng: Where chance comes from.
        used: What was drawn before; grows.
        years: The years to draw from.
    """

    def __init__(self, rng: random.Random, used: set[str], years: Sequence[int]) -> None:
        self._rng, self._used, self._years = rng, used, years
        self._deck: list[int] = []
        self._kinds: dict[str, Callable[[], str]] = {
            "name": self._word,
            "person": lambda: f"{self._word()} {self._word()}",
            "place": self._word,
            "company": lambda: pick(rng, _COMPANIES).format(self._word()),
            "year": self._year,
            "count": self._count,
        }

    def draw(self, kind: str) -> str:
        """Draw a name, person, place, company, year or count.

        Raises:
            KeyError: There is no such kind.
        """
        return self._kinds[kind]()

    def _word(self) -> str:
        return self._fresh(self._syllables)

    def _syllables(self) -> str:
        parts = (_ONSETS, _VOWELS, _ONSETS, _VOWELS, _CODAS)
        return "".join(pick(self._rng, part) for part in parts).capitalize()

    def _year(self) -> str:
        self._deck = self._deck or shuffled(self._rng, self._years)
        return str(self._deck.pop())

    def _count(self) -> str:
        # With a comma, so that no amount looks like a year.
        return self._fresh(lambda: f"{2 + int(self._rng.random() * 97)},{int(self._rng.random() * 1000):03d}")

    def _fresh(self, draw: Callable[[], str]) -> str:
        while (name := draw()) in self._used:
            pass
        self._used.add(name)
        return name


def pick(rng: random.Random, choices: Sequence[T]) -> T:
    """Choose one item; of ``random``, only ``random()`` itself is promised to stay the same."""
    return choices[int(rng.random() * len(choices))]


def shuffled(rng: random.Random, items: Sequence[T]) -> list[T]:
    """Return the items in a random order, for the same reason as :func:`pick`."""
    order = sorted((rng.random(), index) for index in range(len(items)))
    return [items[index] for _, index in order]
