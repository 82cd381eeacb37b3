"""The kinds of tracker: how each is opened, and what preflight finds that it lacks."""

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from manycpu.pipeline.adapters.tracking_mlflow import MlflowTracker, silence
from manycpu.pipeline.adapters.tracking_tensorboard import TensorBoardTracker
from manycpu.pipeline.spec.errors import BadInputError, Finding
from manycpu.pipeline.spec.tracking import Tracker
from manycpu.pipeline.targets.context import RunContext, home

__all__ = ["EXTRA", "TRACKERS", "Kind", "findings", "open_tracker"]

EXTRA: Final = "pip install 'manycpu[tracking]'"
_FIELD: Final = "run.tracking"


class Kind(NamedTuple):
    """A kind of tracker."""

    label: str
    module: str
    """What must be installed."""
    open: Callable[[RunContext], Tracker]
    absence: Callable[[RunContext], str | None]
    """Return why it does not answer; None if nothing is known to be wrong."""


def open_tracker(name: str, ctx: RunContext) -> Tracker:
    """Open a tracker.

    Raises:
        BadInputError: Its package is not installed, or a variable that it needs is not set.
    """
    kind = TRACKERS[name]
    if find_spec(kind.module) is None:
        raise _uninstalled(name, kind)
    return kind.open(ctx)


def findings(ctx: RunContext) -> Iterator[Finding]:
    """List what the trackers of a run lack; a tracker that does not answer is only a warning."""
    for name in dict.fromkeys(ctx.run.tracking):
        kind = TRACKERS[name]
        try:
            if find_spec(kind.module) is None:
                raise _uninstalled(name, kind)
            if why := kind.absence(ctx):
                fix = "The training runs without it; the end of the run sends it everything"
                yield Finding(_FIELD, f"{kind.label} is away: {why}", fix, fatal=False)
        except BadInputError as error:
            yield Finding(_FIELD, error.message, error.fix or "")


def _uninstalled(name: str, kind: Kind) -> BadInputError:
    message = f"{name} needs the package {kind.module}, which is not installed"
    return BadInputError(message, field=_FIELD, fix=f"Install the extra tracking: {EXTRA}")


def _address() -> str:
    address = os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    if not address:
        raise BadInputError(
            "MLFLOW_TRACKING_URI is not set: MLflow has no address",
            field=_FIELD,
            fix="Set it to the server's address, such as http://mlflow.example.org:5000, where manycpu runs: "
            "with Airflow on every worker and triggerer",
        )
    return address


def _tensorboard_is_away(ctx: RunContext) -> str | None:
    folder = _folder(ctx)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{folder} cannot be made: {error.strerror}"
    return None if os.access(folder, os.W_OK) else f"{folder} cannot be written"


def _folder(ctx: RunContext) -> Path:
    given = os.environ.get("MANYCPU_TENSORBOARD", "").strip()
    return home(given) if given else home(getattr(ctx.target, "directory", None)) / "tensorboard"


TRACKERS: Final[Mapping[str, Kind]] = {
    "tensorboard": Kind(
        "TensorBoard", "tensorboard", lambda ctx: TensorBoardTracker(_folder(ctx)), _tensorboard_is_away
    ),
    "mlflow": Kind("MLflow", "mlflow", lambda _: MlflowTracker(_address()), lambda _: silence(_address())),
}
"""Name in ``run.tracking`` -> the tracker."""
