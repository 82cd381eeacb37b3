"""Draw the results of the benchmarks for docs/benchmarks.md."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
SIZE = (7.0, 3.4)  # inches
COLOURS = {"ccl": "#0068b5", "gloo": "#d1770d", "no communication": "#808080"}
OTHER = "#0068b5"


def main() -> None:
    """Draw every result there is a drawing for."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "bench", "font.size": 9, "axes.spines.top": False})
    mpl.rcParams.update(
        {"axes.spines.right": False, "figure.figsize": SIZE, "figure.constrained_layout.use": True}
    )
    for name, draw in DRAWINGS.items():
        result = RESULTS / f"{name}.json"
        if result.exists():
            _save(name, draw, json.loads(result.read_text())["figures"])


def _save(name: str, draw: Callable[[Any, Mapping[str, Any]], None], figures: Mapping[str, Any]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    draw(axes, figures)
    # No date: drawn again from the same figures, the file is the same.
    figure.savefig(picture(name), metadata={"Date": None})
    plt.close(figure)


def picture(name: str) -> Path:
    """Return the file name of a benchmark's drawing."""
    return IMAGES / f"bench-{name.replace('_', '-')}.svg"


def _allreduce(axes: Any, figures: Mapping[str, Any]) -> None:
    """Draw speeds as parts of a memory copy's, which no allreduce can beat."""
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for name, part in figures.items():
        if match := re.fullmatch(r"(\w+) (\d+) KiB: ccl, part of a memory copy's speed", name):
            gain = figures[f"{match[1]} {match[2]} KiB: ccl over gloo"]
            curves.setdefault(match[1], []).append(
                (float(match[2]), _median(part), _median(part) / _median(gain))
            )
    for (dtype, points), style in zip(curves.items(), ("-", "--"), strict=False):
        sizes, ccl, gloo = zip(*points, strict=True)
        axes.plot(sizes, ccl, style, marker="o", color=COLOURS["ccl"], label=f"ccl, {dtype}")
        axes.plot(sizes, gloo, style, marker="s", color=COLOURS["gloo"], label=f"gloo, {dtype}")
    axes.axhline(1, color=COLOURS["no communication"], label="a memory copy of as many bytes")
    axes.set(xscale="log", yscale="log", xlabel="KiB", ylabel="speed, memory copy = 1")
    axes.legend(fontsize=8)


def _median(value: Any) -> float:
    return float(value["median"] if isinstance(value, dict) else value)


def _rates(axes: Any, figures: Mapping[str, Any]) -> None:
    """Draw rates as bars, from the least to the greatest."""
    rates = dict(reversed(figures["rates"].items()))
    medians = [rate["median"] for rate in rates.values()]
    around = [[rate["median"] - rate["low"] for rate in rates.values()]]
    around.append([rate["high"] - rate["median"] for rate in rates.values()])
    colours = [next((COLOURS[key] for key in COLOURS if key in name), OTHER) for name in rates]
    axes.barh(list(rates), medians, xerr=around, color=colours, capsize=2)
    axes.set(xlabel=figures["unit"])


DRAWINGS: dict[str, Callable[[Any, Mapping[str, Any]], None]] = {
    "allreduce": _allreduce,
    "ddp_step": _rates,
    "step": _rates,
    "threads": _rates,
    "scaling": _rates,
    "ipex": _rates,
    "preload": _rates,
}
