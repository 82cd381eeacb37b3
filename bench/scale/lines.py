"""A job whose 64 ranks write 1,000 lines a second each, for ten seconds: what a triggerer passes on of them.

Lines come faster than they can be read: the kubelets keep them meanwhile. A task's log shows 1,000 of them a
second, and says how many it dropped.
"""

import re
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from bench.scale import _triggerer
from bench.scale._child import child, progress

RANKS, RATE, LASTS = 64, 1000, 10.0
SECONDS = 300.0  # in which it must be done
_LINE = re.compile(r"line (\d+)")
_DROPPED = re.compile(r"(\d+) lines were dropped here")
WORDS = {
    "title": "64 ranks that write 1,000 lines a second each",
    "meaning": "A talkative job fills no memory: each line is read, and shown once or counted as dropped.",
    "figures": {
        "written": ("Lines that the ranks wrote", "", ""),
        "told": ("Lines that the task's log shows", "", ""),
        "dropped": ("Lines that it says it dropped", "", ""),
        "not accounted for": ("Lines that are neither shown nor counted", "", "[limit: not accounted for]"),
        "told twice": ("Lines that are shown twice", "", "[limit: told twice]"),
        "lines a second": ("Lines that the triggerer reads a second", "", ""),
        "memory": ("Memory of the triggerer for it, at most", "MiB", "at most [limit: memory]"),
        "cpu": ("Processor time of the triggerer for all lines", "s", ""),
        "longest turn": (
            "The longest turn of its event loop, in which no other task is served",
            "ms",
            "at most [limit: longest turn]",
        ),
        "last line to event": (
            "From the last rank's end to the end of the waiting task's wait",
            "s",
            "at most [limit: last line to event]",
        ),
    },
}
LIMITS = {
    "not accounted for": 0,
    "told twice": 0,
    "memory": 150.0,
    "longest turn": 500.0,
    "last line to event": 60.0,
}


def main() -> dict[str, Any]:
    """Measure."""
    from cluster import hollow, images
    from support.handmade_jobs import begin
    from support.hollow_logs import Ranks, logs

    from bench._cluster import namespace, target

    with (
        namespace("scale-lines") as (cluster, space),
        TemporaryDirectory() as name,
        logs(Ranks(RANKS, RATE, LASTS)) as ranks,
        hollow.nodes(cluster, RANKS, ranks.kubelet) as nodes,
    ):
        folder = Path(name)
        waiting = begin(target(space), images.reference("base"), folder, nnodes=RANKS)

        def place(job: dict[str, Any]) -> None:
            job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"] |= nodes.place

        handle = waiting.create(change=place)
        config = {"handle": handle.model_dump(mode="json")}
        with child("bench.scale.lines", folder, config, SECONDS) as process:
            began = process.hear("met")["time"]
            progress(f"all ranks have met; they write for {LASTS:g} s")
            time.sleep(max(0.0, began + LASTS - time.time()))
            pods = [waiting.pod_of(handle, number) for number in range(RANKS)]
            ranks.end()
            nodes.end(space.name, pods[1:])
            nodes.end(space.name, pods[:1])
            ended = time.time()
            end, done = process.hear("end"), process.hear("done")
            progress(f"{end['state']} {end['reason']}")
            if end["state"] != "succeeded":
                raise RuntimeError(end)
        return _figures(done, end["time"] - ended)


def _figures(done: dict[str, Any], late: float) -> dict[str, Any]:
    written = int(RANKS * RATE * LASTS)
    return {
        "unit": "lines, s, ms and MiB",
        "written": written,
        **done["figures"],
        "not accounted for": written - done["figures"]["told"] - done["figures"]["dropped"],
        "last line to event": round(late, 2),
        "limit": LIMITS,
    }


class _Counted:
    """Counts the lines that a task's log gets."""

    def __init__(self) -> None:
        self.lines: Counter[tuple[int, int]] = Counter()
        self.dropped = 0

    def hear(self, line: Any) -> None:
        if found := _LINE.fullmatch(line.text):
            self.lines[line.rank, int(found[1])] += 1
        elif found := _DROPPED.match(line.text):
            self.dropped += int(found[1])


async def _follow(meter: _triggerer.Meter, config: dict[str, Any]) -> None:
    from manycpu.operators.job_trigger import JobTrigger

    counted = _Counted()

    def hear(_: Any, lines: Any) -> None:
        for line in lines:
            counted.hear(line)

    before, cpu, began = _triggerer.memory()[0], _triggerer.cpu(), time.monotonic()
    with mock.patch.object(JobTrigger, "_deliver", hear):
        triggerer = _triggerer.Triggerer([config["handle"]])
        await _triggerer.until(lambda: meter.met() == RANKS)
        _triggerer.say("met")
        await triggerer.join()
    told, dropped = len(counted.lines), counted.dropped
    figures = {
        "told": told,
        "dropped": dropped,
        "told twice": sum(counted.lines.values()) - told,
        "lines a second": round((told + dropped) / (time.monotonic() - began)),
        "memory": round(_triggerer.memory()[1] - before, 1),
        "cpu": round(_triggerer.cpu() - cpu, 2),
        "longest turn": round(1e3 * max(meter.turns), 1),
    }
    _triggerer.say("done", figures=figures)


if __name__ == "__main__":
    _triggerer.main(_follow)
