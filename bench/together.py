"""Six runs of two nodes that start together where two fit, beside the same runs two by two in their order.

PyTorchJobs, MPIJobs and TrainJobs by turns. Seconds until all are done.
"""

import time
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench._measure import by_turns, ratio, rounds, spread

RUNS = 6
LASTS = (30, 10)  # seconds that each run trains
LONGEST = 900.0  # seconds for all of them
WORDS = {
    "title": "Six runs where two fit",
    "meaning": "Runs that start together, and have no room together, take turns and are done nearly as "
    "soon as if somebody had started them in order.",
    "figures": {
        "each trains for": ("Each run trains for", "s", ""),
        "together": ("All six, started together, take", "s", ""),
        "two by two": ("All six, started two by two, take", "s", ""),
        "together over two by two": ("The first is so many times the second", "x", "at most [target]"),
    },
}


def main() -> dict[str, Any]:
    """Measure."""
    from cluster import images

    from bench._cluster import namespace, target

    with namespace("bench-together") as (_, space), TemporaryDirectory() as folder:
        return _Bench(target(space), images.reference("base"), Path(folder)).measure()


class _Bench:
    def __init__(self, target: dict[str, Any], image: str, folder: Path) -> None:
        self._target, self._image, self._folder = target, image, folder
        self._number = 0

    def measure(self) -> dict[str, Any]:
        lasts = rounds(*LASTS)
        sides = {"together": lambda: self._together(lasts), "two by two": lambda: self._two_by_two(lasts)}
        times = by_turns(sides, 1).times
        return {
            "unit": "s",
            "each trains for": lasts,
            **{name: spread(seconds) for name, seconds in times.items()},
            "together over two by two": ratio(times["together"], times["two by two"]),
            "target": 1.2,
        }

    def _together(self, lasts: int) -> float:
        began = time.monotonic()
        self._all(range(RUNS), lasts)
        return time.monotonic() - began

    def _two_by_two(self, lasts: int) -> float:
        from support.contending_runs import ROOM

        began = time.monotonic()
        for number in range(0, RUNS, ROOM):
            self._all(range(number, number + ROOM), lasts)
        return time.monotonic() - began

    def _all(self, numbers: range, lasts: int) -> None:
        """Start runs at once, and wait until all are done."""
        from cluster.command import wait_for
        from support.contending_runs import start

        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        with ExitStack() as stack:
            started = [start(self._target, self._image, folder, number, lasts) for number in numbers]
            for each in started:
                stack.enter_context(closing(each))
            ended = lambda: all([each.look().state.terminal for each in started])  # noqa: C419, E731
            wait_for("all to end", ended, seconds=LONGEST, every=0.2)
            failed = [each.seen for each in started if each.seen.state != "succeeded"]
            if failed:
                raise RuntimeError(failed)
