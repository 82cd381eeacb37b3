"""The judge of campaigns of faults on the test cluster: a pure function of the history of a round.

A history is a list of lines. ``what`` in a line says what happened, and ``at`` when, in seconds.

``python tests/support/campaign_judge.py .cache/campaign/SEED...`` judges kept histories of seeds again, and
writes their figures to tests/faults/results.json. See docs/testing.md.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

Line = Mapping[str, Any]
BOUND_S: Final = 600
"""A command must end within this time after it began and the last fault ended, even on a busy machine."""
_TRACEBACK: Final = re.compile(r"^Traceback \(most recent call last\)", re.MULTILINE)
"""The beginning of a traceback of the command itself: a rank's name precedes the tracebacks of ranks."""
_LATE_S: Final = 1.0
"""How late a rank's line may come."""
_AT_THE_END_S: Final = 5.0
"""A fault in this time before or after the end of a training may be a reason to train again."""
_RESULTS: Final = Path(__file__).parents[1] / "faults" / "results.json"


def breaches(history: Sequence[Line]) -> list[str]:
    """Judge a round: return a sentence for each rule that a run, or what is left after all runs, breaks."""
    runs = [line for line in history if line["what"] == "user"]
    found = [f"{run['run']}: {wrong}" for run in runs for wrong in _of_run(run, history)]
    return [*found, *_left(history)]


def _of_run(user: Line, history: Sequence[Line]) -> Iterator[str]:
    """Judge one run, which the line ``user`` describes."""
    of: defaultdict[str, list[Line]] = defaultdict(list)
    for line in history:
        if line.get("run") == user["run"]:
            of[line["what"]].append(line)
    yield from _commands(user["run"], of, history)
    yield from _at_once(of)
    yield from _resumed(of)
    yield from _twice(of, history)
    yield from _model(user, of)


def _commands(run: str, of: Mapping[str, Sequence[Line]], history: Sequence[Line]) -> Iterator[str]:
    """Judge the commands: each ends in time, says why it failed, and fails only if a fault struck."""
    for ended in of["ended"]:
        name = f"command {ended['number']}"
        faults = [fault for fault in history if fault["what"] == "fault" and _during(fault, ended)]
        healed = max([ended["begun"], *(fault["healed"] for fault in faults)])
        if ended["code"] is None or ended["at"] - healed > BOUND_S:
            yield f"{name} had not ended {ended['at'] - healed:.0f} s after all was healed"
        if _TRACEBACK.search(ended["said"]) and "\nmanycpu: " not in ended["said"]:
            yield f"{name} ended with a traceback"
        if ended["code"] and ended["code"] > 0 and not ended["last"]:
            yield f"{name} failed without a word"
        is_try = ended["number"].isdecimal()
        if is_try and ended["code"] and not any(_harms(fault, run) for fault in faults):
            yield f"{name} ended with {ended['code']}, and no fault struck it: {ended['last']}"
    began = len({line["process"] for line in of["start"] if line["rank"] == 0})
    if began > 1 and not any(_harms_training(fault, run) for fault in history):
        yield f"it trained {began} times, and no fault struck its training"


def _during(fault: Line, ended: Line) -> bool:
    """Return whether a fault lasted for a part of the time of a command that ended."""
    return bool(ended["begun"] <= fault["healed"] and fault["begun"] <= ended["at"])


def _harms(line: Line, run: str) -> bool:
    """Return whether a line tells of a fault that may harm a run."""
    if line["what"] != "fault" or line["scope"] == "nothing":
        return False
    return bool(line["scope"] == "all" or line["run"] == run)


def _harms_training(line: Line, run: str) -> bool:
    """Return whether a line tells of a fault that may end the training, and not only the command."""
    return _harms(line, run) and line["scope"] != "command"


def _at_once(of: Mapping[str, Sequence[Line]]) -> Iterator[str]:
    """Yield a breach for each rank number of which two processes trained at the same time."""
    spans: dict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
    for line in sorted([*of["start"], *of["beat"], *of["end"]], key=lambda line: float(line["at"])):
        rank = spans[line["rank"]]
        rank[line["process"]] = (rank.get(line["process"], (line["at"],))[0], line["at"])
    for number, processes in spans.items():
        ordered = sorted(processes.values())
        for (_, last), (first, _) in pairwise(ordered):
            if first < last - _LATE_S:
                yield f"two ranks {number} trained at once for {last - first:.1f} s"


def _resumed(of: Mapping[str, Sequence[Line]]) -> Iterator[str]:
    """Yield a breach for each rank that began from an older checkpoint than the last saved one."""
    for start in of["start"]:
        saved = [line["done"] for line in of["saved"] if line["at"] < start["at"] - _LATE_S]
        others = [line for line in of["start"] if line["process"] != start["process"]]
        if others and start["done"] < max(saved, default=0):
            yield f"rank {start['rank']} began after step {start['done']}, and step {max(saved)} was saved"


def _twice(of: Mapping[str, Sequence[Line]], history: Sequence[Line]) -> Iterator[str]:
    """Yield a breach for each end of a training before the last one, unless a fault struck near that end."""
    ends = [line for line in of["end"] if line["rank"] == 0]
    for end in ends[:-1]:
        near = (end["at"] - _AT_THE_END_S, end["at"] + _AT_THE_END_S)
        faults = [fault for fault in history if _harms_training(fault, end["run"])]
        if not any(fault["begun"] <= near[1] and fault["healed"] >= near[0] for fault in faults):
            yield f"it trained to the end {len(ends)} times"


def _model(user: Line, of: Mapping[str, Sequence[Line]]) -> Iterator[str]:
    """Judge the end: the last command succeeded, and its output has the model that the last rank 0 wrote."""
    last = [ended for ended in of["ended"] if ended["number"].isdecimal()][-1]
    if last["code"] != 0:
        yield f"it is not green after {last['number']} tries: {last['last']}"
        return
    (found,) = of["found"]
    written = [line["digest"] for line in of["end"] if line["digest"]]
    if found["digest"] not in written[-1:]:
        older = "an older one" if found["digest"] in written else "none that a rank reported"
        yield f"its model is not the one that the last rank 0 wrote, but {older}"
    if found["sum"] != user["steps"] * (user["steps"] + 1) // 2:
        yield f"the sum of its {user['steps']} steps is {found['sum']}"
    if found["state"] != "succeeded" or found["left_behind"] or found["world"] not in user["worlds"]:
        yield f"its report has {found['state']}, {found['world']} ranks, left behind {found['left_behind']}"


def _left(history: Sequence[Line]) -> Iterator[str]:
    """Judge what is left: exactly the objects from before and the decoys; a fault may have deleted some."""
    others: dict[str, str] = {}
    for line in history:
        if line["what"] in ("before", "decoys"):
            others |= line["objects"]
    changed = {line["object"] for line in history if line["what"] == "deleted by a fault"}
    (after,) = (line for line in history if line["what"] == "after")
    gone = sorted(name for name, uid in others.items() if after["objects"].get(name) != uid)
    if gone := [name for name in gone if name not in changed]:
        yield f"objects of others are gone: {', '.join(gone)}"
    if left := sorted({*after["objects"], *after["processes"]} - set(others)):
        yield f"left: {', '.join(left)}"


def figures(histories: Sequence[Sequence[Line]]) -> dict[str, Any]:
    """Count the trials, the faults that struck by name, and the breaches in all rounds of one seed."""
    lines = [line for history in histories for line in history]
    struck = {line["run"] for line in lines if line["what"] == "fault" and line["struck"]}
    names = Counter(line["fault"] for line in lines if line["what"] == "fault" and line["struck"])
    commits = sorted({line["commit"] for line in lines if line["what"] == "round"})
    return {
        "commit": ", ".join(commits),
        "runs": dict(sorted(Counter(line["kind"] for line in lines if line["what"] == "user").items())),
        "struck": dict(sorted(names.items())),
        "trials": len(struck),
        "violations": sum(len(breaches(history)) for history in histories),
    }


def read(folder: Path) -> list[list[Line]]:
    """Read the histories of a seed, without those of rounds that were ended early."""
    files = sorted(folder.glob("*.jsonl"))
    histories = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [history for history in histories if history and history[-1]["what"] == "after"]


def _main(folders: Sequence[Path]) -> int:
    """Judge the histories of some seeds, and keep their figures; return 1 if there are breaches, else 0."""
    results, wrong = json.loads(_RESULTS.read_text()), list[str]()
    for folder in folders:
        histories = read(folder)
        wrong += [f"{folder.name}: {breach}" for history in histories for breach in breaches(history)]
        results.setdefault("cluster", {})[folder.name] = figures(histories)
    _RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    print("\n".join([*wrong, f"{len(wrong)} breaches"]))  # noqa: T201
    return min(len(wrong), 1)


if __name__ == "__main__":
    sys.exit(_main([Path(word) for word in sys.argv[1:]]))
