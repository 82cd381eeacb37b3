"""The kinds of tracker: how each is opened, what preflight finds that it lacks, and what it receives."""

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from manycpu.pipeline.adapters.tracking_mlflow import MlflowTracker, silence
from manycpu.pipeline.adapters.tracking_tensorboard import TensorBoardTracker
from manycpu.pipeline.ledger import Entry
from manycpu.pipeline.spec.credentials import redacted_description
from manycpu.pipeline.spec.errors import BadInputError, Finding
from manycpu.pipeline.spec.event_types import Event
from manycpu.pipeline.spec.observed import is_finite, values_of
from manycpu.pipeline.spec.tracking import Point, Tracked, Tracker
from manycpu.pipeline.targets.context import RunContext, home

_FIELD: Final = "run.tracking"


class Kind(NamedTuple):
    """A kind of tracker."""

    label: str
    module: str
    """What must be installed."""
    open: Callable[[RunContext], Tracker]
    absence: Callable[[RunContext], str | None]
    """Return why it does not answer; None: nothing is known to be wrong. May raise BadInputError."""


def open_tracker(name: str, ctx: RunContext) -> Tracker:
    """Open a tracker.

    Raises:
        BadInputError: Its package is not installed, or a variable that it needs is not set.
    """
    return _installed(name).open(ctx)


def findings(ctx: RunContext) -> Iterator[Finding]:
    """Yield a finding for each tracker of a run that lacks something.

    A tracker that does not answer is a warning. A missing package or variable is an error.
    """
    for name in dict.fromkeys(ctx.run.tracking):
        try:
            kind = _installed(name)
            if why := kind.absence(ctx):  # raises BadInputError if a variable is missing
                fix = "The training runs without it; the end of the run sends it everything"
                yield Finding(_FIELD, f"{kind.label} is away: {why}", fix, fatal=False)
        except BadInputError as error:
            yield Finding(_FIELD, error.message, error.fix or "")


def _installed(name: str) -> Kind:
    """Return the kind of a tracker; raise BadInputError if its package is not installed."""
    kind = TRACKERS[name]
    if find_spec(kind.module) is None:
        message = f"{name} needs the package {kind.module}, which is not installed"
        fix = "Install the extra tracking: pip install 'manycpu[tracking]'"
        raise BadInputError(message, field=_FIELD, fix=fix)
    return kind


def _address() -> str:
    """Return the address of MLflow's server; raise BadInputError if its variable is not set."""
    address = os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    if not address:
        raise BadInputError(
            "MLFLOW_TRACKING_URI is not set: MLflow has no address",
            field=_FIELD,
            fix="Set it to the server's address, such as http://mlflow.example.org:5000, where manycpu runs: "
            "with Airflow on every worker and triggerer",
        )
    return address


def _absence_of_tensorboard(ctx: RunContext) -> str | None:
    """Create TensorBoard's folder; return why it cannot be created or written, else None."""
    folder = _folder(ctx)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}"
    return None if os.access(folder, os.W_OK) else f"{folder} cannot be written"


def _folder(ctx: RunContext) -> Path:
    """Return TensorBoard's folder: $MANYCPU_TENSORBOARD, or else one in the home of the run's target."""
    chosen = os.environ.get("MANYCPU_TENSORBOARD", "").strip()
    if chosen:
        return home(chosen)
    directory = getattr(ctx.target, "directory", None)  # Kubernetes has none: then it is manycpu's default
    return home(directory) / "tensorboard"


TRACKERS: Final[Mapping[str, Kind]] = {
    "tensorboard": Kind(
        "TensorBoard",
        module="tensorboard",
        open=lambda ctx: TensorBoardTracker(_folder(ctx)),
        absence=_absence_of_tensorboard,
    ),
    "mlflow": Kind(
        "MLflow",
        module="mlflow",
        open=lambda _: MlflowTracker(_address()),
        absence=lambda _: silence(_address()),
    ),
}
"""Name in ``run.tracking`` -> the tracker."""


def points_of(event: Event, rank: int | None, step: float | None, now: float) -> list[Point]:
    """Return the points of a rank's event: the values that the curves of the report show.

    Args:
        event: The event.
        rank: The rank.
        step: The training's last step, for events of pace, whose own steps are those of the rank's process.
        now: Time of an event that has none, in seconds since the epoch.
    """
    event_step, values = values_of(event, rank, last_reported_step=step)
    time = float(now if event.time is None else event.time)
    return [
        Point(name, int(event_step or 0), time, float(value))
        for name, value in values.items()
        if is_finite(value)
    ]


def tracked(entry: Entry, attempt: int) -> Tracked:
    """Describe an attempt for a tracker: its run, its group, its parameters and tags."""
    described = entry.described(attempt)
    started = entry.created
    # The entry has the handle of one attempt only.
    if entry.handle is not None and entry.handle.attempt == attempt:
        started = entry.handle.began
    # The program's name: without its folder, `.py`, or the `-m` of a module.
    script = described.run["program"].rsplit("/", 1)[-1].removesuffix(".py").removeprefix("-m").strip()
    tags = {
        "manycpu.key": entry.key,
        "manycpu.name": entry.name,
        "manycpu.dag_id": entry.dag.get("dag_id"),
        "manycpu.dag_run_id": entry.dag.get("run_id"),
        "manycpu.partition_key": entry.dag.get("partition_key"),
        "manycpu.task": entry.tasks.get("train"),
        "manycpu.image": described.image,
        **{f"manycpu.{name}": digest for name, digest in described.digests.items()},
    }
    return Tracked(
        key=entry.key,
        name=entry.name,
        began=entry.created,
        attempt=attempt,
        started=started,
        group=entry.dag.get("dag_id") or described.run.get("job_name") or script,
        params=_params(described.run, described.target),
        tags={name: value for name, value in tags.items() if value},
    )


def _params(run: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, str]:
    """Return a run's parameters as texts: its fields by dotted names, and the options of its program.

    Of the environment there are only the names. No credentials are among the parameters.
    """
    shown = redacted_description(run)
    params = {
        name: value for name, value in shown.items() if name not in ("env", "tracking", "registered_model")
    }
    params |= {"env": sorted(run.get("env") or {})}
    params |= {f"target.{name}": target[name] for name in ("kind", "launch") if name in target}
    # Of the program's arguments: --name value, --name=value, and --name, which is true.
    words = [*(shown.get("args") or ()), "--"]  # the added "--" is what follows the last word
    for word, following in pairwise(words):
        name, equals, value = word.partition("=")
        if not name.startswith("--") or not name.strip("-"):  # a value, or dashes alone
            continue
        if not equals:
            value = "true" if following.startswith("--") else following
        params[f"args.{name.lstrip('-')}"] = value
    return {name: text for name, text in _flat(params) if text}


def _flat(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each field as its dotted name and a text; a list is written as in a shell."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", text) for inner, text in _flat(value))
        elif isinstance(value, (list, tuple)):
            yield name, shlex.join(map(str, value))
        elif value is not None:
            yield name, str(value)
