"""Run benchmarks side by side: ``python -m bench [--quick] [--scripts FOLDER] [NAME ...]``.

Each module is one; ``--scripts`` names transformers' ``examples/pytorch`` for those that run public scripts.
With ``--quick`` and no names, those that need the test cluster are left out: it takes minutes by itself.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path

from bench import _measure, _page

FOLDER = Path(__file__).parent
ON_CLUSTER = {"ending", "launching", "pods", "together", "transfer", "waiting"}
sys.path.insert(0, str(FOLDER.parent / "tests"))  # the test cluster is there


def names() -> list[str]:
    """List the benchmarks."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def main(words: list[str]) -> None:
    """Run the chosen benchmarks, all by default; write ``results/``, and draw them for the docs."""
    quick = "--quick" in words
    if quick:
        os.environ[_measure.QUICK] = "1"
    chosen = [word for word in words if word != "--quick"]
    if "--scripts" in chosen:  # public scripts, for finetune
        at = chosen.index("--scripts")
        if at + 1 == len(chosen):
            sys.exit("bench: --scripts needs a folder: transformers' examples/pytorch")
        os.environ["MANYCPU_BENCH_SCRIPTS"] = str(Path(chosen[at + 1]).resolve())
        del chosen[at : at + 2]
    unknown = set(chosen) - set(names())
    if unknown:
        sys.exit(f"bench: there is no {', '.join(sorted(unknown))}; choose from: {', '.join(names())}")
    results = FOLDER / ("quick" if quick else "results")
    results.mkdir(exist_ok=True)
    every = sorted(set(names()) - ON_CLUSTER) if quick else names()
    for name in chosen or every:
        print(f"{name}: running", flush=True)
        try:
            record = measured(name)
        except _measure.SkippedError as reason:
            print(f"  skipped: {reason}")
            continue
        (results / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    if not quick:
        _page.main()


def measured(name: str) -> dict[str, object]:
    """Run a benchmark, and add the machine and how busy it was."""
    before = os.getloadavg()[0]
    figures = import_module(f"bench.{name}").main()
    show(figures)
    load = {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)}
    return {"machine": _measure.machine() | {"load": load}, "figures": figures}


def show(figures: dict[str, object], indent: str = "  ") -> None:
    """Print figures, a group of them under its name."""
    for name, value in figures.items():
        if isinstance(value, dict) and "median" in value:
            print(f"{indent}{name}: {value['median']} ({value['low']} to {value['high']})", flush=True)
        elif isinstance(value, dict):
            print(f"{indent}{name}", flush=True)
            show(value, indent + "  ")
        else:
            print(f"{indent}{name}: {value}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
