"""Tell what a Hugging Face Trainer has written of its results, where its script tells nothing by itself."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.node.emit import warn
from manycpu.pipeline.node.metrics import has_told, progress, tell

__all__ = ["tell_results"]

_STATE: Final = "trainer_state.json"
_RESULTS: Final = "all_results.json"
_MOST: Final = 300  # points of a curve
_CURVES: Final = ("epoch", "loss", "grad_norm", "learning_rate")


def tell_results() -> None:
    """Read all_results.json and trainer_state.json of the output, and report what is in them."""
    output = os.environ.get("MANYCPU_OUTPUT")
    if not output or has_told():
        return
    try:
        _tell(_read(Path(output), _STATE), _read(Path(output), _RESULTS))
    except Exception as error:  # noqa: BLE001 - whatever is in them, the training has succeeded
        warn(f"{_STATE} and {_RESULTS} of the output are not the Trainer's, and not in the report: {error!r}")


def _tell(state: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    logged = state.get("log_history", [])
    steps = [entry for entry in logged if "loss" in entry]
    for entry in steps[:: max(1, math.ceil(len(steps) / _MOST))]:
        fields = {name: value for name, value in _numbers(entry).items() if name in _CURVES}
        progress(step=entry["step"], total_steps=state.get("max_steps"), **fields)
    values: dict[str, Any] = {}
    for entry in (*logged, results):
        values |= _numbers(entry)
    values.pop("step", None)
    if values:
        tell(values, step=state.get("global_step"))


def _read(output: Path, name: str) -> dict[str, Any]:
    """Read a file of the Trainer's: of the output, or the newest of a folder in it, such as a checkpoint."""
    below = [file for pattern in (name, f"*/{name}", f"*/*/{name}") for file in output.glob(pattern)]
    file = output / name if output / name in below else max(below, key=_moment, default=None)
    content: dict[str, Any] = {} if file is None else json.loads(file.read_text())
    return content


def _moment(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
