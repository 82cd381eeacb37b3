"""Write docs/benchmarks.md from the results of the benchmarks."""

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import _draw

PAGE = _draw.IMAGES.parent / "benchmarks.md"
HEAD = """# Benchmarks

Written by `make bench`, on the machine that each result names. Sides take turns within one run, so that what
disturbs one disturbs the others too, and of the turns the quieter half is kept. A figure is the median, with
the least and the greatest in parentheses; a ratio is that of neighbouring measurements. `make bench-quick`
repeats less, starts no cluster and leaves this page as it is; `python -m bench NAME` runs one.

What follows from the figures: [speed.md](speed.md).
"""


def main() -> None:
    """Write the page anew, and draw its pictures."""
    _draw.main()
    PAGE.write_text(page())


def page() -> str:
    """Format all results, in the order of their names."""
    results = sorted(_draw.RESULTS.glob("*.json"))
    return "\n".join([HEAD, *("\n".join(_part(result)) for result in results)])


def _part(result: Path) -> Iterator[str]:
    record = json.loads(result.read_text())
    title = ast.get_docstring(ast.parse((result.parents[1] / f"{result.stem}.py").read_text())) or ""
    yield f"## {result.stem}\n\n{title.splitlines()[0]}\n"
    if result.stem in _draw.DRAWINGS:
        yield f"![{result.stem}](images/{_draw.picture(result.stem).name})\n"
    yield "| | |\n| --- | --- |"
    yield from _rows(record["figures"])
    yield f"\n{_machine(record['machine'])}\n"


def _rows(figures: Mapping[str, Any], of: str = "") -> Iterator[str]:
    for name, value in figures.items():
        if isinstance(value, dict) and "median" not in value:
            yield from _rows(value, f"{of}{name}: ")
        else:
            yield f"| {of}{name} | {_shown(value)} |"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['median']} ({value['low']} to {value['high']})"
    return str(value)


def _machine(machine: Mapping[str, Any]) -> str:
    facts = {
        "processor": machine.get("processor"),
        "cores": machine.get("cores"),
        "instructions": ", ".join(machine.get("instructions", ())),
        "Python": machine.get("python"),
        "torch": machine.get("torch"),
        "oneCCL": machine.get("oneccl-devel"),
        "load before and after": " and ".join(str(load) for load in machine.get("load", {}).values()),
    }
    return "Machine: " + "; ".join(f"{name} {value}" for name, value in facts.items() if value) + "."


if __name__ == "__main__":
    main()
