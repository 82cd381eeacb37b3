"""Trials: a scene's command meets one fault, the same command again must mend all, and a judge looks."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from support.fault_judge import Found, Point, Trial, breaches, drawn, unlike
from support.fault_scenes import Scene, Server

_ASKED: Final = os.environ.get("MANYCPU_FAULTS", "")
REPLAYED: Final = _ASKED.partition(" at ")[::2]
"""The fault and the place of the only trial; without a place, there are others."""
ALL: Final = _ASKED == "all" or _ASKED.isdecimal()
"""Whether all campaigns run, as in `make faults`: with a trial at every place, or with so many."""
RESULTS: Final = Path(__file__).parents[1] / "faults" / "results.json"


def usual(scene: Scene, server: Server) -> tuple[list[str], Found]:
    """Run a scene's command without a fault; return where it could meet one, and what is found after it."""
    scene.reset()
    scene.prepare(server)
    ended = scene.meet(server, None)
    assert ended.code == 0, ended.said
    return scene.places(), scene.found()


def trial(scene: Scene, server: Server, point: Point | None, expected: Found) -> Trial:
    """Run a scene's command with a fault, then again if it did not end well; judge both."""
    scene.reset()
    scene.prepare(server)
    first = scene.meet(server, point)
    struck = point is None or scene.struck(point)
    again = first if first.code == 0 else scene.repeat(server)
    found = scene.found()
    if point is not None and point[0] == "silence":  # a run that has ended does not wait for a silent log
        found = found | {name: expected[name] for name in expected if name == "lines not shown"}
    return Trial(first.code, struck, breaches(first, again, found, expected, endures=scene.endures))


def tried(scene: Scene, server: Server, few: int, *, crashes: bool) -> list[str]:
    """Try a scene's command with faults; return the breaches, each with its fault and its place.

    Args:
        scene: The scene.
        server: Runs its commands.
        few: How many trials there are, unless MANYCPU_FAULTS asks for more.
        crashes: Whether the faults are crashes of the command, or else errors.
    """
    places, expected = usual(scene, server)
    title = scene.title("crashes" if crashes else "errors")
    every = scene.points(places, crashes=crashes)
    chosen = _chosen(every, title, few)
    failed, struck = list[str](), 0
    for fault, place in chosen:
        done = trial(scene, server, (fault, place), expected)
        wrong = "; ".join(done.breaches)
        verdict = wrong or (f"well ({done.code})" if done.struck else "it did not come to it")
        print(f"{fault} at {place}: {verdict}", flush=True)  # noqa: T201
        struck += done.struck
        failed += [f"{fault} at {place}: {wrong}"] if wrong else []
    scene.reset()
    figures = {"points": len(every), "trials": len(chosen), "struck": struck, "violations": len(failed)}
    print(figures)  # noqa: T201
    record("campaigns", title, figures)
    return failed


def disturbed(scene: Scene, server: Server, faults: Sequence[str], few: int) -> list[str]:
    """Try a scene's command with harmless faults, at a few places; return what they have changed."""
    places, expected = usual(scene, server)
    said = scene.said
    every = [(fault, place) for fault in faults for place in places]
    title = scene.title("harmless")
    chosen = _chosen(every, title, few)
    changed, struck = list[str](), 0
    for point in chosen:
        done = trial(scene, server, point, expected)
        wrong = [*done.breaches, *unlike(scene.said, said)]
        wrong += [f"it ended with {done.code}"] if done.code else []
        print(" at ".join(point), *(wrong or ["nothing"]), flush=True)  # noqa: T201
        struck += done.struck
        changed += [f"{' at '.join(point)}: {what}" for what in wrong]
    scene.reset()
    figures = {"points": len(every), "trials": len(chosen), "struck": struck, "violations": len(changed)}
    record("campaigns", title, figures)
    return changed


def _chosen(every: Sequence[Point], seed: str, few: int) -> Sequence[Point]:
    if REPLAYED[1]:
        return [REPLAYED]
    return every if _ASKED == "all" else drawn(every, seed)[: int(_ASKED) if _ASKED.isdecimal() else few]


def hunted(scene: Scene, servers: tuple[Server, Server], bug: str, budget: int) -> str:
    """Try a scene's command with a planted bug until the judge sees a breach; return it, else an empty text.

    Args:
        scene: The scene.
        servers: Of the product, and of the product with the bug.
        bug: Its name, which is the seed of the trials.
        budget: How many trials there are at most; the first one is without a fault.
    """
    clean, planted = servers
    places, expected = usual(scene, clean)
    both = zip_longest(*(drawn(scene.points(places, crashes=crashes), bug) for crashes in (True, False)))
    some = [point for pair in both for point in pair if point is not None][: budget - 1]
    points = [REPLAYED] if REPLAYED[1] else [None, *some]
    for number, point in enumerate(points, 1):
        done = trial(scene, planted, point, expected)
        if done.breaches:
            what = " at ".join(point).replace(sys.executable, "python") if point else "no fault"
            verdict = done.breaches[0].replace(f"{scene.folder}/", "")
            figures = {"trials": number, "fault": what, "verdict": verdict[:200]}
            print(f"{bug}: {figures}", flush=True)  # noqa: T201
            record("planted", bug, figures)
            return done.breaches[0]
    record("planted", bug, {"trials": len(points)})
    return ""


def record(part: str, name: str, figures: Mapping[str, Any]) -> None:
    """Keep the figures of a campaign for docs/reliability.md, if all campaigns run."""
    if ALL:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results.setdefault(part, {})[name] = figures
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
