"""Report a training's progress and its results.

Both functions report on rank 0 only. Outside of a run they do nothing, so that the same script also runs by
itself.

    from manycpu.pipeline.node.metrics import metrics, progress

    progress(step=30, total_steps=92, loss=0.71, samples_per_second=20.4, seconds_left=49)
    metrics({"eval_loss": 0.62})  # at step 30
    metrics({"exact_match": 93.1, "f1": 95.0})

For a script that calls neither, what a Hugging Face Trainer has written to the output is reported in the end.
"""

import functools
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.node.emit import say, warn
from manycpu.pipeline.spec.output import METRICS

_LAST_STEP: Final[list[int | None]] = [None]
"""The step of the last progress report, as the only element; None: there was none, or it gave no step."""
_REPORTED: Final[set[str]] = set()
"""Kinds of events that the program has reported."""
_TRAINER_STATE: Final = "trainer_state.json"
_TRAINER_RESULTS: Final = "all_results.json"
_MAX_POINTS: Final = 300  # of a curve
_CURVES: Final = ("epoch", "loss", "grad_norm", "learning_rate")


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
    if not _is_reporting():
        return
    given = {
        "step": step,
        "total_steps": total_steps,
        "epoch": epoch,
        "loss": loss,
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "samples_per_second": samples_per_second,
        "seconds_left": seconds_left,
    }
    plain = {name: _as_json(name, value) for name, value in given.items() if value is not None}
    _LAST_STEP[0] = plain.get("step")
    _REPORTED.add("progress")
    say("progress", **plain)


def metrics(values: Mapping[str, Any], *, step: int | None = None) -> None:
    """Report results, and merge them into ``metrics.json`` of the output: a later value replaces an earlier.

    If the file is not a JSON object of several lines, the program itself wrote it. Then the file stays as it
    is, with one warning. An object on a single line may be the first line of a file of JSON lines.

    Args:
        values: Name -> number, also of numpy or torch.
        step: The step that they belong to; default: that of the last :func:`progress`, if there was one.
    """
    plain = report(values, step)
    if not plain:  # nothing was reported
        return
    _REPORTED.add("metrics")
    output = os.environ.get("MANYCPU_OUTPUT")
    if not output:
        return
    path = Path(output) / METRICS
    try:
        text = path.read_text()
        # One line: the program may write more lines of JSON to it. metrics() itself writes several lines.
        recorded = json.loads(text) if "\n" in text.strip() else None
    except FileNotFoundError:
        recorded = {}
    except (OSError, ValueError, RecursionError):  # the program wrote it, and no JSON
        recorded = None
    if not isinstance(recorded, dict):
        _warn_that_it_stays(path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".metrics-", delete=False) as file:
        json.dump(recorded | plain, file, indent=2, sort_keys=True, default=str)
        file.write("\n")
    # The rename is atomic. A temporary file is its owner's alone: make it readable as other files are.
    Path(file.name).chmod(0o644)
    Path(file.name).replace(path)


def report_trainer_files() -> None:
    """Report all_results.json and trainer_state.json of the output, if the script has reported nothing.

    If a file does not have the Trainer's format, warn, and report no more.
    """
    output = os.environ.get("MANYCPU_OUTPUT")
    if not output or not _is_reporting() or _REPORTED:
        return
    try:
        state = _read(Path(output), _TRAINER_STATE)
        results = _read(Path(output), _TRAINER_RESULTS)
        logged = state.get("log_history", [])
        steps = [entry for entry in logged if "loss" in entry]
        # Every n-th entry, so that a curve has at most _MAX_POINTS points.
        for entry in steps[:: max(1, math.ceil(len(steps) / _MAX_POINTS))]:
            fields = {name: value for name, value in _numbers(entry).items() if name in _CURVES}
            progress(step=entry["step"], total_steps=state.get("max_steps"), **fields)
        values: dict[str, Any] = {}
        for entry in (*logged, results):  # a later value replaces an earlier one
            values |= _numbers(entry)
        values.pop("step", None)  # it is no result: the event has it as a field
        if values:
            report(values, state.get("global_step"))
    except Exception as error:  # noqa: BLE001 - the files may hold anything; the training has succeeded
        warn(
            f"{_TRAINER_STATE} and {_TRAINER_RESULTS} of the output are not the Trainer's, "
            f"and not in the report: {error!r}"
        )


def report(values: Mapping[str, Any], step: int | None = None) -> dict[str, Any]:
    """Report values as events, and do not write them to ``metrics.json``.

    That is for values that a file of the Trainer has already, or that the program did not make.

    Args:
        values: Name -> number, also of numpy or torch.
        step: The step that they belong to; None: the step of the last progress report, if there was one.

    Returns:
        The values as JSON can hold them. Empty, with nothing reported: this is not rank 0, or not in a run.
    """
    if not _is_reporting():
        return {}
    step = _LAST_STEP[0] if step is None else _as_json("step", step)
    plain = {str(name): _as_json(str(name), value) for name, value in values.items()}
    _say_metrics(plain, {} if step is None else {"step": step})
    return plain


@functools.cache
def _warn_that_it_stays(_: Path) -> None:
    """Warn, once for each file, that the program's own metrics.json stays."""
    warn(f"{METRICS} of the output is not manycpu's: it stays as it is, and metrics() writes none")


def _is_reporting() -> bool:
    return "MANYCPU_RUN" in os.environ and os.environ.get("RANK", "0") == "0"


def _say_metrics(values: dict[str, Any], fields: dict[str, Any]) -> None:
    """Write values in as many events as it takes, each with ``fields``.

    A value that is too long for an event is not shown; :func:`metrics` still writes it to metrics.json.
    """
    try:
        say("metrics", values=values, **fields)
    except ValueError:  # too long for one event: divide the values between two
        items = list(values.items())
        half = len(items) // 2
        if half == 0:
            warn(f"the metric {items[0][0][:100]} is too long to be shown")
            return
        _say_metrics(dict(items[:half]), fields)
        _say_metrics(dict(items[half:]), fields)


def _as_json(name: str, value: Any) -> Any:
    """Return a value as JSON can hold it: a number that is not finite becomes null, with a warning.

    A scalar of numpy or torch becomes Python's number.
    """
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        warn(f"{name} is {value}: JSON has no such number, null is recorded")
        return None
    return value


def _read(output: Path, name: str) -> dict[str, Any]:
    """Read a JSON file of the Trainer: the one directly in the output, else the newest in a folder of it.

    Such a folder is, for example, a checkpoint. Empty: there is no such file.
    """
    candidates = [file for pattern in (name, f"*/{name}", f"*/*/{name}") for file in output.glob(pattern)]
    if not candidates:
        return {}
    direct = output / name
    file = direct if direct in candidates else max(candidates, key=_modified)
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def _modified(file: Path) -> float:
    """Return when a file was modified, in seconds since the epoch; 0: it is gone."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Select the values that are numbers."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
