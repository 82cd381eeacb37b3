"""Report a training's progress and its results.

Both functions speak on rank 0 only, and do nothing at all outside of a run: a script that calls them still
runs alone.

    from manycpu.pipeline.node.metrics import metrics, progress

    progress(step=30, total_steps=92, loss=0.71, samples_per_second=20.4, seconds_left=49)
    metrics({"eval_loss": 0.62})  # at step 30
    metrics({"exact_match": 93.1, "f1": 95.0})
"""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.node.emit import say, warn

__all__ = ["has_told", "metrics", "progress", "tell"]

_STEP: Final[list[int | None]] = []
"""The step that progress was reported of last."""
_TOLD: Final[set[str]] = set()
"""What the program has reported."""


def progress(  # noqa: PLR0913 - each is optional and has a name
    *,
    step: int | None = None,
    total_steps: int | None = None,
    epoch: float | None = None,
    loss: float | None = None,
    grad_norm: float | None = None,
    learning_rate: float | None = None,
    samples_per_second: float | None = None,
    seconds_left: float | None = None,
) -> None:
    """Report how far the training is, in one line.

    Args:
        step: Steps done.
        total_steps: Steps in all.
        epoch: Epochs done.
        loss: The loss, as the program defines it.
        grad_norm: The norm of all gradients.
        learning_rate: The learning rate.
        samples_per_second: Samples that all ranks together take in a second.
        seconds_left: Seconds until the last step is done.
    """
    if not _speaks():
        return
    values = {
        "step": step,
        "total_steps": total_steps,
        "epoch": epoch,
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "samples_per_second": samples_per_second,
        "seconds_left": seconds_left,
    }
    _STEP[:] = [step]
    _TOLD.add("progress")
    say("progress", **{name: _plain(name, value) for name, value in values.items() if value is not None})


def metrics(values: Mapping[str, Any], *, step: int | None = None) -> None:
    """Report results, and merge them into ``metrics.json`` of the output: a later value replaces an earlier.

    Args:
        values: Name -> number, also of numpy or torch.
        step: The step that they belong to; default: that of the last :func:`progress`, if there was one.
    """
    plain = tell(values, step=step)
    if plain and (output := os.environ.get("MANYCPU_OUTPUT")):
        _merge(Path(output) / "metrics.json", plain)


def tell(values: Mapping[str, Any], *, step: int | None = None) -> dict[str, Any]:
    """Report results as :func:`metrics` does, into no file; returns them as JSON has them."""
    step = next(iter(_STEP), None) if step is None else step
    if not _speaks():
        return {}
    plain = {str(name): _plain(str(name), value) for name, value in values.items()}
    _TOLD.add("metrics")
    _say(plain, {} if step is None else {"step": step})
    return plain


def has_told() -> bool:
    """Whether this process is one that reports nothing, or has reported something."""
    return not _speaks() or bool(_TOLD)


def _say(values: dict[str, Any], fields: dict[str, Any]) -> None:
    """Write values in as many events as it takes; one that fits into none is in the file only."""
    try:
        say("metrics", values=values, **fields)
    except ValueError:
        items = list(values.items())
        half = len(items) // 2
        if half == 0:
            warn(f"the metric {items[0][0][:100]} is too long to be shown")
            return
        _say(dict(items[:half]), fields)
        _say(dict(items[half:]), fields)


def _speaks() -> bool:
    return "MANYCPU_RUN" in os.environ and os.environ.get("RANK", "0") == "0"


def _plain(name: str, value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        warn(f"{name} is {value}: JSON has no such number, null is recorded")
        return None
    return value


def _merge(path: Path, values: Mapping[str, Any]) -> None:
    recorded: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        recorded = json.loads(path.read_text())
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".metrics-", delete=False) as file:
        json.dump(recorded | dict(values), file, indent=2, sort_keys=True, default=str)
        file.write("\n")
    # Never half written, and readable as other files are: a temporary file is its owner's alone.
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)
