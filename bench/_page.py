"""Write docs/benchmarks.md from the results of the benchmarks, in the words that each has for its figures.

Each module has a constant ``WORDS``, read without importing the module: ``title``, ``meaning`` (one
sentence, for users), and ``figures``: a pattern for the names of figures -> words, unit and goal.
Words and goal may use the pattern's groups. A goal takes its numbers from the results, ``[target:
NAME]``; without them it is not shown.
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bench import _draw

DOCS: Final = _draw.IMAGES.parent
HEAD: Final = """# Benchmarks

Written by `make bench`, on the [machines](#machines) named at the end. The compared programs take
turns within one run, so that a disturbance affects all of them; the quieter half of the turns is
kept. A value is the median, with the least and the greatest in parentheses. A ratio (x) compares
neighbouring measurements. `make bench-quick` repeats less, starts no cluster and does not change
this page; `python -m bench NAME` runs one.

[Fast on CPUs](speed.md) says what to set. [Scale](scale.md) measures hundreds of pods and runs.
"""
SCALE: Final = """# Scale

Written by `make scale`, on the [machines](#machines) named at the end: jobs of hundreds of pods, a thousand
runs that wait, and data sets of a million files. Figures have limits. If one is exceeded, `make scale` fails,
after everything was measured and written here. `python -m bench.scale NAME` measures one.

It needs what the [test cluster](test-cluster.md) needs, and 45 GiB of disk, and takes about half an hour on
two cores. The API server, the scheduler and the operators are real. Pods of large jobs are on
[hollow nodes](test-cluster.md#hollow-nodes): the cluster says that they run, but no process does. So this
page does not show how fast ranks train. The cluster shares the cores with what is measured.
"""
TABLE = "| figure | value | goal |\n| --- | --- | --- |"
COMMON: Final = {
    "others' part of the cores": ("Processor time that other programs took meanwhile", "part", "")
}
BESIDE: Final = re.compile(r"unit|(limit|target).*")  # figures that stand beside others

Words = Mapping[str, Any]


def main() -> None:
    """Write the pages, and draw their pictures."""
    _draw.main()
    for name, text in pages().items():
        (DOCS / name).write_text(text)


def pages() -> dict[str, str]:
    """Format all results, in the order of their names: by the name of their page."""
    return {"benchmarks.md": _page(HEAD, "*.json"), "scale.md": _page(SCALE, "scale/*.json")}


def _page(head: str, which: str) -> str:
    results = sorted(_draw.RESULTS.glob(which))
    parts = ["\n".join(_part(result)) for result in results]
    return "\n".join([head, *parts, "\n".join(_machines(results))])


def words(name: str) -> Words:
    """Read the words of a benchmark, such as ``pods`` or ``scale/job``.

    Raises:
        LookupError: It has none.
    """
    for node in ast.parse((_draw.RESULTS.parent / f"{name}.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "WORDS":
            literal: Words = ast.literal_eval(node.value)
            return literal
    raise LookupError(f"bench/{name}.py has no WORDS: title, meaning and figures")


def rows(figures: Mapping[str, Any], words: Words) -> Iterator[str]:
    """Write a row for each figure.

    Raises:
        LookupError: There are no words for one.
    """
    flat = dict(_flat(figures))
    for name, value in flat.items():
        if not BESIDE.fullmatch(name):
            text, unit, goal = _figure_words(name, words["figures"] | COMMON)
            yield f"| {text} | {_shown(value, unit)} | {_goal(goal, flat)} |"


def _part(result: Path) -> Iterator[str]:
    name = _name(result)
    page = words(name)
    yield f"## {page['title']}\n\n{page['meaning']}\n"
    yield f"`python -m {_command(name)}`: {_first_line(name)}\n"
    if name in _draw.DRAWINGS:
        yield f"![{page['title']}](images/{_draw.picture(name).name})\n"
    yield TABLE
    yield from rows(json.loads(result.read_text())["figures"], page)
    yield ""


def _name(result: Path) -> str:
    return result.relative_to(_draw.RESULTS).with_suffix("").as_posix()


def _command(name: str) -> str:
    folder, _, module = name.rpartition("/")
    return f"bench.{folder} {module}" if folder else f"bench {module}"


def _first_line(name: str) -> str:
    text = (_draw.RESULTS.parent / f"{name}.py").read_text()
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]


def _flat(figures: Mapping[str, Any], of: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, dict) and "median" not in value:
            yield from _flat(value, f"{of}{name}: ")
        else:
            yield f"{of}{name}", value


def _figure_words(name: str, patterns: Words) -> tuple[str, str, str]:
    for pattern, (text, unit, goal) in patterns.items():
        if match := re.fullmatch(pattern, name):
            return match.expand(text), unit, match.expand(goal)
    raise LookupError(f"WORDS has no words for the figure {name!r}")


def _shown(value: Any, unit: str) -> str:
    if isinstance(value, str):  # such as a version
        return value
    if isinstance(value, dict):
        around = f" ({_number(value['low'])} to {_number(value['high'])})"
        return _shown(value["median"], unit) + (around if value["low"] < value["high"] else "")
    if unit == "part":
        return f"{_number(100 * value)} %"
    return f"x{_number(value)}" if unit == "x" else f"{_number(value)} {unit}".rstrip()


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"  # noqa: PLR2004


def _goal(goal: str, flat: Mapping[str, Any]) -> str:
    names = re.findall(r"\[(.+?)\]", goal)
    if not all(name in flat for name in names):
        return ""
    return re.sub(r"\[(.+?)\]", lambda match: _number(flat[match[1]]), goal)


def _machines(results: list[Path]) -> Iterator[str]:
    """Name each machine once, with the benchmarks that ran on it."""
    ran: dict[str, list[str]] = {}
    for result in results:
        ran.setdefault(_machine(json.loads(result.read_text())["machine"]), []).append(_name(result))
    yield "## Machines\n"
    yield "| machine | benchmarks |\n| --- | --- |"
    yield from (f"| {machine} | {', '.join(names)} |" for machine, names in ran.items())
    yield ""


def _machine(machine: Mapping[str, Any]) -> str:
    facts = {
        "": machine.get("processor"),
        "cores": f"{machine['cores']:g}",
        "instructions": ", ".join(machine.get("instructions", ())),
        "Python": machine.get("python"),
        "torch": machine.get("torch"),
        "oneCCL": machine.get("oneccl-devel"),
    }
    return "; ".join(f"{name} {value}".strip() for name, value in facts.items() if value)


if __name__ == "__main__":
    main()
