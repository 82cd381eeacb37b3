"""Trials: a scene's command meets one fault, the same command must repair everything, and a judge looks."""

import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from support.fault_judge import Found, Point, Trial, breaches, drawn, unlike
from support.fault_scenes import Scene, Server
from support.request_faults import BESIDE

_ASKED: Final = os.environ.get("MANYCPU_FAULTS", "")
REPLAYED: Final = _ASKED.partition(" at ")[::2]
"""The fault and the place of the only trial; if the place is empty, trials are chosen as usual."""
ALL: Final = _ASKED == "all" or _ASKED.isdecimal()
"""Whether all campaigns run, as in `make faults`: ``all`` means every trial, a number so many of each."""
ASKED: Final = bool(_ASKED)
"""Whether MANYCPU_FAULTS asks for trials that `make test` leaves out."""
AT_ONCE: Final = 6 if ALL else 1
"""Number of teams, whose trials run at the same time: a command mostly waits. Each team has a usual run."""
RESULTS: Final = Path(__file__).parents[1] / "faults" / "results.json"
Team = tuple[Scene, Server]
"""A scene, and the server that runs its commands."""


class Usual(NamedTuple):
    """A run of a scene's command without a fault: what trials of the scene are compared with."""

    places: list[str]
    """Where the command could meet a fault."""
    found: Found
    """What is found after it."""
    said: str
    """What it prints."""


_USUAL: Final = WeakKeyDictionary[Scene, Usual]()


def usual(scene: Scene, server: Server) -> Usual:
    """Run a scene's command without a fault; all campaigns of the scene share the result of one run."""
    if scene not in _USUAL:
        scene.reset()
        scene.prepare(server)
        ended = scene.meet(server, None)
        assert ended.code == 0, ended.said
        _USUAL[scene] = Usual(scene.places(), scene.found(), scene.said)
    return _USUAL[scene]


def trial(scene: Scene, server: Server, point: Point | None, expected: Found) -> Trial:
    """Run a scene's command with a fault, and again without one if it did not succeed; judge both.

    ``point`` None: without a fault. ``expected`` is what is found after a run without a fault.
    """
    scene.reset()
    scene.prepare(server)
    first = scene.meet(server, point)
    struck = point is None or scene.struck(point)
    again = first if first.code == 0 else scene.repeat(server)
    found = scene.found()
    if point is not None and point[0] == "silence":  # a run that has ended does not wait for a silent log
        found = found | {name: expected[name] for name in expected if name == "lines not shown"}
    return Trial(first.code, struck, breaches(first, again, found, expected, endures=scene.endures))


def tried(teams: Sequence[Team], few: int, *, crashes: bool) -> list[str]:
    """Try a scene's command with faults; return the breaches, each with its fault and its place.

    Args:
        teams: The same scene in several folders, each with the server of its commands; they share the trials.
        few: Number of trials, unless MANYCPU_FAULTS asks for more.
        crashes: True: faults that kill the command. False: errors of its calls.
    """
    scene, title = teams[0][0], teams[0][0].title("crashes" if crashes else "errors")
    return _campaign(teams, title, few, lambda places: scene.points(places, crashes=crashes), _breaches)


def disturbed(teams: Sequence[Team], faults: Sequence[str], few: int) -> list[str]:
    """Try a scene's command with faults that must change nothing; return what they have changed."""
    title = teams[0][0].title("harmless")
    return _campaign(teams, title, few, lambda places: list(itertools.product(faults, places)), _changes)


def accompanied(teams: Sequence[Team], few: int) -> list[str]:
    """Run other commands on the same run while a scene's command runs; return the breaches."""
    title = teams[0][0].title("interleavings")
    return _campaign(teams, title, few, lambda places: list(itertools.product(BESIDE, places)), _breaches)


def _breaches(done: Trial, _said: str, _usual: str) -> list[str]:
    return done.breaches


def _changes(done: Trial, said: str, usual: str) -> list[str]:
    return [*done.breaches, *unlike(said, usual), *([f"it ended with {done.code}"] if done.code else [])]


def _campaign(
    teams: Sequence[Team],
    title: str,
    few: int,
    points: Callable[[Sequence[str]], Sequence[Point]],
    judge: Callable[[Trial, str, str], Sequence[str]],
) -> list[str]:
    """Make the trials of a campaign; return what is wrong, each with its fault and its place.

    Args:
        teams: The same scene in several folders, each with the server of its commands.
        title: Name of the campaign, which is also the seed of its choice of trials.
        few: Number of trials, unless MANYCPU_FAULTS asks for more.
        points: Lists the possible trials, given the places where the command could meet a fault.
        judge: Lists what is wrong, given a trial, what was printed in it, and what is usually printed.
    """
    idle: SimpleQueue[tuple[Team, Found, str]] = SimpleQueue()  # teams without a trial at present

    def one(point: Point) -> tuple[Trial, Sequence[str]]:
        team, expected, said = waiting = idle.get()
        try:
            done = trial(*team, point, expected)
            return done, judge(done, team[0].said, said)
        finally:
            idle.put(waiting)

    with ThreadPoolExecutor(len(teams)) as pool:
        usuals = list(pool.map(lambda team: usual(*team), teams))
        for team, seen in zip(teams, usuals, strict=True):
            idle.put((team, seen.found, seen.said))
        every = points(usuals[0].places)
        assert every, "it came to no place for a fault"
        chosen = _chosen(every, title, few)
        print(f"{title}: {len(chosen)} trials", flush=True)  # noqa: T201
        wrong, struck = list[str](), 0
        for (fault, place), (done, breached) in zip(chosen, pool.map(one, chosen), strict=True):
            verdict = "; ".join(breached) or (
                f"well ({done.code})" if done.struck else "it did not come to it"
            )
            print(f"{fault} at {place}: {verdict}", flush=True)  # noqa: T201
            struck += done.struck
            if breached:
                test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
                wrong.append(f"{fault} at {place}: {verdict}")
                print(f"again: MANYCPU_FAULTS='{fault} at {place}' python -m pytest -s '{test}'")  # noqa: T201
    for scene, _ in teams:
        scene.reset()
    figures = {"points": len(every), "trials": len(chosen), "struck": struck, "violations": len(wrong)}
    print(figures)  # noqa: T201
    record("campaigns", title, figures)
    return wrong


def _chosen(every: Sequence[Point], seed: str, few: int) -> Sequence[Point]:
    """Choose among all trials: the replayed one, all, or so many that the seed draws."""
    if REPLAYED[1]:
        known = [point for point in every if _lasting(point[1]) == _lasting(REPLAYED[1])]
        assert known, f"this test does not come to {REPLAYED[1]}"
        return [(REPLAYED[0], place) for _, place in known[:1]]
    return every if _ASKED == "all" else drawn(every, seed)[: int(_ASKED) if _ASKED.isdecimal() else few]


def _lasting(place: str) -> str:
    """Replace the parts of a place's name that differ from run to run: long hexadecimal numbers."""
    return re.sub(r"[0-9a-f]{8,}", "0", place)


def hunted(scene: Scene, servers: tuple[Server, Server], product: Path, bug: str, budget: int) -> str:
    """Try a scene's command with a planted bug until the judge sees a breach; return it, else an empty text.

    Args:
        scene: The scene.
        servers: The server of commands of the product, and the server of those with the bug.
        product: The folder of the product with the bug, from which ranks and pods import it too.
        bug: Name of the bug, which is also the seed of the choice of trials.
        budget: Maximum number of trials; the first one is without a fault.
    """
    clean, planted = servers
    places, expected, said = usual(scene, clean)
    harmless = list(itertools.product(scene.harmless, places))
    both = itertools.zip_longest(
        *(drawn(scene.points(places, crashes=crashes), bug) for crashes in (True, False))
    )
    some = [point for pair in both for point in pair if point is not None]
    some = [None, *drawn(harmless, bug)[: len(scene.harmless)], *some][:budget]
    scene.import_from(product)
    points = [REPLAYED] if REPLAYED[1] else some
    for number, point in enumerate(points, 1):
        done = trial(scene, planted, point, expected)
        breached = _changes(done, scene.said, said) if point in harmless else done.breaches
        if breached:
            what = " at ".join(point).replace(sys.executable, "python") if point else "no fault"
            verdict = breached[0].replace(f"{scene.folder}/", "")
            figures = {"trials": number, "fault": what, "verdict": verdict[:200]}
            print(f"{bug}: {figures}", flush=True)  # noqa: T201
            break
    else:
        breached, figures = [], {"trials": len(points)}
    scene.reset()
    record("planted", bug, figures)
    return breached[0] if breached else ""


def record(part: str, name: str, figures: Mapping[str, Any]) -> None:
    """Save the figures of a campaign for docs/reliability.md, if all campaigns run.

    Figures of fewer trials do not replace those of more trials.
    """
    if ALL:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        kept = results.setdefault(part, {}).get(name, {})
        if part == "campaigns" and kept.get("trials", 0) > figures["trials"]:
            return
        results[part][name] = figures
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
