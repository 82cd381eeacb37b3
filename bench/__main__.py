"""Run benchmarks side by side: ``python -m bench [NAME ...]``; each module here with a ``main`` is one."""

import json
import platform
import sys
from importlib import import_module
from pathlib import Path

from manycpu.pipeline.spec.machine import Machine

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """List the benchmarks."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


def main(chosen: list[str]) -> None:
    """Run the chosen ones, all by default, and keep what they saw in ``results/``."""
    unknown = set(chosen) - set(names())
    if unknown:
        sys.exit(f"bench: there is no {', '.join(sorted(unknown))}; choose from: {', '.join(names())}")
    results = FOLDER / "results"
    results.mkdir(exist_ok=True)
    for name in chosen or names():
        print(f"{name}: running", flush=True)
        figures = import_module(f"bench.{name}").main()
        for figure, value in figures.items():
            print(f"  {figure}: {value}", flush=True)
        record = {"machine": _machine(), "figures": figures}
        (results / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def _machine() -> dict[str, object]:
    model = next((line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    return {"cores": Machine.observe().processors, "processor": model, "python": platform.python_version()}


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


if __name__ == "__main__":
    main(sys.argv[1:])
