"""What holds at scale: ``python -m bench.scale [NAME ...]``; each module is one, and has limits.

All is measured and written before a figure beyond its limit makes this fail.
"""

import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import __main__ as bench
from bench import _measure, _page

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "results" / "scale"


def names() -> list[str]:
    """List what is measured, in the order in which it is."""
    return [name for name in ("job", "lines", "waiting", "staging") if (FOLDER / f"{name}.py").exists()]


def main(words: list[str]) -> int:
    """Measure what is named, all by default, and write it down; return how many figures are beyond limits."""
    if unknown := set(words) - set(names()):
        sys.exit(f"scale: there is no {', '.join(sorted(unknown))}; choose from: {', '.join(names())}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    beyond: list[str] = []
    for name in words or names():
        print(f"{name}: running", flush=True)
        try:
            record = bench.measured(f"scale.{name}")
        except _measure.SkippedError as reason:
            sys.exit(f"scale: {reason}")
        except Exception:  # noqa: BLE001 - the others are measured all the same
            beyond.append(f"{name}: not measured\n{traceback.format_exc()}")
            continue
        (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        beyond += [f"{name}: {text}" for text in exceeded(record["figures"])]
    _page.main()
    print("\n".join(["beyond a limit:", *beyond] if beyond else ["all within their limits"]))
    return len(beyond)


def exceeded(figures: Any) -> Iterator[str]:
    """Name the figures that are beyond their limits, or lack."""
    limits: Mapping[str, float] = figures.get("limit", {})
    for name, limit in limits.items():
        if figures.get(name) is None or figures[name] > limit:
            yield f"{name} is {figures.get(name)}, and may be {limit}"


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
