"""The judge of a trial of a fault, and the choice of trials; all functions are pure.

In a trial, a command meets one fault. If it does not succeed, the same command runs again without a fault.
What is found then must be what the command leaves when there is no fault at all.
"""

import random
import re
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

Found = Mapping[str, object]
"""What is found after a command: name of a thing that is looked at -> its value."""
Point = tuple[str, str]
"""A fault, and where the command meets it."""
_TRACEBACK: Final = "Traceback (most recent call last)"
_OF_FILES: Final = ("os.mkdir", "os.rename", "os.link", "os.symlink", "open")
_FITS: Final[dict[str, tuple[str, ...]]] = {
    "kill": ("",),
    "kill-begun": ("open", "subprocess.Popen"),
    "short": ("open",),
    "ENOSPC": _OF_FILES,
    "EIO": (*_OF_FILES, "os.r", "os.ch", "os.u", "os.t"),
    "EACCES": (*_OF_FILES, "os.r", "os.ch", "os.u", "os.t"),
    "EAGAIN": ("subprocess.Popen",),
}
"""Fault -> beginnings of the names of changes that it can strike."""


class Trial(NamedTuple):
    """The result of a trial."""

    code: int
    """Exit code of the command that met the fault."""
    struck: bool
    """Whether the fault happened."""
    breaches: list[str]
    """What is wrong, in words; empty: nothing."""


class Ended(NamedTuple):
    """A command that ended: its exit code (negative: the signal), and what it printed."""

    code: int
    said: str

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


def breaches(
    first: Ended, again: Ended, found: Found, expected: Found, *, endures: bool = False
) -> list[str]:
    """Judge a trial: return what is wrong with the commands, and with what is found after them.

    Args:
        first: The command that met the fault.
        again: The same command without a fault; ``first`` itself if that succeeded.
        found: What is found after both.
        expected: What is found after the command without faults.
        endures: Whether the command must succeed in spite of one error.

    >>> killed, green = Ended(-9, ""), Ended(0, "done")
    >>> breaches(killed, green, {"trained": 1}, {"trained": 1})
    []
    >>> breaches(killed, Ended(2, "refused"), {"trained": 2}, {"trained": 1})
    ['the second ended with 2: refused', 'trained is 2, and without a fault 1']
    >>> breaches(Ended(-14, ""), green, {}, {})
    ['it did not end']
    >>> breaches(Ended(1, "Traceback (most recent call last):"), green, {}, {})
    ['it ended with a traceback: Traceback (most recent call last):']
    >>> breaches(Ended(1, ""), green, {}, {})
    ['it failed without a word']
    >>> breaches(killed, Ended(0, "Traceback (most recent call last):"), {}, {})
    ['the second printed a traceback']
    >>> breaches(Ended(1, "away"), green, {}, {}, endures=True)
    ['one error made it fail: away']
    """
    wrong = _wrong_with(first, endures=endures)
    if again is not first:
        wrong += ["the second printed a traceback"] if _TRACEBACK in again.said else []
    if again.code:
        wrong.append(f"the second ended with {again.code}: {(again.said.strip().splitlines() or [''])[-1]}")
    for name, usual in expected.items():
        seen = found[name]
        if isinstance(seen, frozenset) and isinstance(usual, frozenset):
            wrong += [f"{name}: {sorted(seen - usual)} left"] if seen - usual else []
            wrong += [f"{name}: {sorted(usual - seen)} missing"] if usual - seen else []
        elif seen != usual:
            wrong.append(f"{name} is {seen}, and without a fault {usual}")
    return wrong


def _wrong_with(first: Ended, *, endures: bool) -> list[str]:
    """Judge how the command ended that met the fault; return at most one breach."""
    last = (first.said.strip().splitlines() or [""])[-1]
    if first.code == -signal.SIGALRM:
        return ["it did not end"]
    if _TRACEBACK in first.said:
        return [f"it ended with a traceback: {last}"]
    if not first.killed and first.code not in (0, 1, 2):
        return [f"it ended with {first.code}: {last}"]
    if first.code > 0 and not last:
        return ["it failed without a word"]
    return [f"one error made it fail: {last}"] if first.code > 0 and endures else []


def unlike(said: str, usual: str) -> list[str]:
    r"""List the lines of a command that it does not print without a fault; numbers and widths may differ.

    >>> unlike("launch done in 0.1 s\nwarning: away", "launch done in 12.1 s")
    ['warning: away']
    """
    known = {_shape(line) for line in usual.splitlines()}
    return [line for line in said.splitlines() if _shape(line) not in known]


def _shape(line: str) -> str:
    """Replace what may differ from run to run: numbers, hashes and spaces."""
    return " ".join(re.sub(r"\b[0-9a-f]{8,}\b|[\d.]+", "0", line).split())


def points(changes: Sequence[str], *, crashes: bool) -> list[Point]:
    """List each change of a command with each fault that can strike it.

    Args:
        changes: The changes that the command makes without a fault, each with its number.
        crashes: True: faults that kill the command. False: errors of its calls.

    >>> points(["1 open x", "2 os.kill y"], crashes=True)
    [('kill', '1 open x'), ('kill', '2 os.kill y'), ('kill-begun', '1 open x')]
    >>> ("short", "1 open told.a w") in points(["1 open told.a w"], crashes=False)  # never has ten bytes
    False
    """
    return [
        (fault, change)
        for fault, beginnings in _FITS.items()
        for change in changes
        if fault.startswith("kill") == crashes and change.partition(" ")[2].startswith(beginnings)
        if fault != "short" or "told." not in change
    ]


def drawn(every: Sequence[Point], seed: str) -> list[Point]:
    """Shuffle points so that all faults take turns, and so do all kinds of places of one fault.

    The first points of the result therefore contain rare faults and rare kinds of places too.

    >>> every = [("kill", f"PATCH a #{number}") for number in range(3)] + [("kill", "POST b #1")]
    >>> sorted(drawn([*every, ("reset", "POST b #1")], "seed")[:3])[1:]
    [('kill', 'POST b #1'), ('reset', 'POST b #1')]
    """
    shuffled = random.Random(seed).sample(every, len(every))  # noqa: S311 - to be repeated
    return _in_turns(_in_turns(shuffled, lambda point: _kind(point[1])), lambda point: point[0])


def _kind(place: str) -> str:
    """Return what is done at a place: the change with the first folder, or the method with the resource.

    >>> _kind("12 open home/runs/x"), _kind("GET pods/x?watch=true #1")
    ('open home', 'GET pods')
    """
    found = re.match(r"(\d+ )?(\S+( \w+)?)", place)
    return found[2] if found else place


def _in_turns(every: Sequence[Point], kind: Callable[[Point], str]) -> list[Point]:
    """Reorder points so that their kinds take turns: first one of each kind, then a second one of each."""
    kinds: defaultdict[str, list[Point]] = defaultdict(list)
    for point in every:
        kinds[kind(point)].append(point)
    return [point for turn in zip_longest(*kinds.values()) for point in turn if point is not None]
