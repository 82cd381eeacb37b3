"""The events that a rank reports: one model for each, for those who read them.

Ranks write events without these models (:func:`manycpu.pipeline.spec.events.encode`), so that no rank waits
for an import of pydantic. A script may print anything: a line that does not fit its event's model is ordinary
output.

>>> event = decode('::manycpu:: {"event": "progress", "step": 2, "total_steps": 8, "loss": 1.5}')
>>> event.sentence()
'step 2 of 8, loss 1.5'
>>> decode('::manycpu:: {"event": "progress", "step": "two"}') is None
True
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from manycpu.pipeline.spec.events import PREFIX, RankLine, is_shallow

_LARGEST: Final = (1 << 63) - 1

Whole = Annotated[int, Field(ge=-_LARGEST, le=_LARGEST)]
Number = Whole | float
Count = (
    Annotated[int, Field(ge=0, le=_LARGEST)] | Annotated[float, Field(ge=0, lt=1 << 63, allow_inf_nan=False)]
)


class Event(BaseModel):
    """A report of a rank in one line. A later version may add fields that its model does not have."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    event: str
    time: Whole | Annotated[float, Field(allow_inf_nan=False)] | None = None
    """When it was written, in seconds since the epoch by the rank's clock; None: not recorded."""

    def sentence(self) -> str:
        """Write the event as a sentence for people."""
        fields = self.model_dump(exclude_unset=True, exclude={"event", "time"})
        return f"{self.event}: {_listed(fields)}"


class MessageEvent(Event):
    """An event with a message."""

    message: str

    def sentence(self) -> str:
        """Write the message."""
        return f"{self.event}: {self.message}"


class ProofEvent(Event):
    """A rank has met all other ranks."""

    event: Literal["proof"] = "proof"
    rank: Whole
    world_size: Whole
    host: str
    """The machine: on Kubernetes the node."""
    hostname: str | None = None
    """Its own host name: on Kubernetes the pod."""
    meeting: str | None = None
    """Name of the meeting, the same for every rank; None: from an older version of manycpu."""
    round: Whole | None = None
    """Number of restarts before."""
    backend: str | None = None
    backend_reason: str | None = None
    """Why the ranks chose it, from rank 0; None: the run names its backend."""
    cpus: Number | None = None
    threads: Number | None = None
    devices: Whole | None = None
    """Devices of XLA that it drives; None on CPUs."""

    def sentence(self) -> str:
        """Write the world size, and the rank's cores and threads."""
        return "met: " + ", ".join(_formatted(self, _MEETING))


class BackendEvent(Event):
    """The script has initialised its default process group."""

    event: Literal["backend"] = "backend"
    observed: str
    requested: str | None = None
    world_size: Whole | None = None


class StartEvent(MessageEvent):
    """What the start of the run waits for."""

    event: Literal["start"] = "start"


class ProgressEvent(Event):
    """The progress of the training: its step, and metrics of that step."""

    event: Literal["progress"] = "progress"
    step: Count | None = None
    total_steps: Count | None = None
    epoch: Number | None = None
    loss: Number | None = None
    grad_norm: Number | None = None
    learning_rate: Number | None = None
    samples_per_second: Number | None = None
    seconds_left: Number | None = None

    def sentence(self) -> str:
        """Write the step and its metrics."""
        total = f" of {self.total_steps}" if self.total_steps else ""
        step = [f"step {self.step}{total}"] if self.step is not None else []
        return ", ".join([*step, *_formatted(self, _STEP)])


class PaceEvent(Event):
    """How long the latest steps of a rank took."""

    event: Literal["pace"] = "pace"
    step: Count
    """Steps that this process has made."""
    step_seconds: Count
    samples_per_second: Count | None = None
    """Samples that the rank takes; None: its program does not report them."""
    wait_seconds: Count | None = None
    """Seconds of a step in which gradients were on their way and nothing was computed; None: not known."""

    def sentence(self) -> str:
        """Write the time of a step."""
        return ", ".join(_formatted(self, _PACE))


class MetricsEvent(Event):
    """Results by name; the last value of a name counts."""

    event: Literal["metrics"] = "metrics"
    step: Count | None = None
    """The step that they belong to; None for what belongs to the training as a whole."""
    values: dict[str, Any]


class ReturnedEvent(Event):
    """The return value of a task's function as JSON, which may take several events."""

    event: Literal["returned"] = "returned"
    part: Whole
    """Number of this part, from 1 on."""
    parts: Whole
    text: str

    def sentence(self) -> str:
        """Write the JSON, or a part of it."""
        part = "" if self.parts == 1 else f" ({self.part}/{self.parts})"
        return f"returned{part}: {self.text}"


class ResultEvent(Event):
    """The return value of a notebook's function: the value, or its file, or why neither can be sent."""

    event: Literal["result"] = "result"
    value: Any = None
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Digest of the pickled value, and name of its file in ``returned/``."""
    message: str | None = None

    def sentence(self) -> str:
        """Write why it cannot be sent, or its file, or the value."""
        if self.message:
            return f"returned: {self.message}"
        return f"returned: file {self.sha256}" if self.sha256 else f"returned: {self.value}"


class WarningEvent(MessageEvent):
    """A condition that the user may not expect."""

    event: Literal["warning"] = "warning"


class ErrorEvent(MessageEvent):
    """Why a rank ends."""

    event: Literal["error"] = "error"
    kind: str | None = None
    """Name of the exception's class."""
    rank: Whole | None = None


class FinishedEvent(MessageEvent):
    """All ranks of an earlier meeting had ended with 0, so the program does not run again."""

    event: Literal["finished"] = "finished"
    meeting: str


class ExitEvent(Event):
    """How a rank ended: its exit code, negative for a signal."""

    event: Literal["exit"] = "exit"
    code: Whole
    host: str
    hostname: str | None = None
    rank: Whole | None = None
    meeting: str | None = None
    """The meeting that it joined, in an exit record; None in a log, where the time tells."""


class OwnEvent(Event):
    """An event that a script defines itself, with any fields."""

    time: Any = None

    def sentence(self) -> str:
        """List its fields."""
        return f"{self.event}: {_listed(self.model_dump(exclude_unset=True, exclude={'event'}))}"


EVENTS: Final[Mapping[str, type[Event]]] = {
    model.model_fields["event"].default: model
    for model in (
        ProofEvent,
        BackendEvent,
        StartEvent,
        ProgressEvent,
        PaceEvent,
        MetricsEvent,
        ReturnedEvent,
        ResultEvent,
        WarningEvent,
        ErrorEvent,
        FinishedEvent,
        ExitEvent,
    )
}
"""Name of an event of manycpu -> its model."""


def decode(text: str) -> Event | None:
    """Read an event from a rank's line (without its rank prefix); None when it is ordinary output."""
    if not text.startswith(PREFIX):
        return None
    try:
        fields = json.loads(text[len(PREFIX) :])
        if "\\u" in text:
            # Raises ValueError if an escape is half of a character, which no file can hold.
            json.dumps(fields, ensure_ascii=False).encode()
        # Libraries cannot serialize again what is nested too deeply.
        if not isinstance(fields, dict) or not is_shallow(fields):
            return None
        kind = fields.get("event")
        # Any other name is that of an event of the program's own.
        model = EVENTS.get(kind, OwnEvent) if isinstance(kind, str) else OwnEvent
        return model.model_validate(fields)
    except (ValueError, RecursionError):
        return None


def readable(line: RankLine, event: Event | None = None) -> str:
    """Write a line for people: events as sentences, ordinary output as it is, each with its rank."""
    event = event or decode(line.text)
    return str(line if event is None else line._replace(text=event.sentence()))


def _listed(fields: Mapping[str, Any]) -> str:
    """Write fields as ``name value, name value``."""
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _formatted(event: Event, formats: Mapping[str, str]) -> list[str]:
    """Format the fields of an event that are not None; ``formats``: name of a field -> its format."""
    values = ((text, getattr(event, name)) for name, text in formats.items())
    return [text.format(value) for text, value in values if value is not None]


_MEETING: Final = {
    "world_size": "world size {}",
    "backend": "backend {}",
    "cpus": "{:g} cores",
    "threads": "{} threads",
    "devices": "{} devices of XLA",
    "backend_reason": "this backend because {}",
}
_PACE: Final = {
    "step_seconds": "{:.3g} s a step",
    "samples_per_second": "{:.1f} samples/s",
    "wait_seconds": "of each step {:.3g} s waiting for gradients",
}
_STEP: Final = {
    "epoch": "epoch {:.2f}",
    "loss": "loss {:.4g}",
    "grad_norm": "gradient norm {:.3g}",
    "learning_rate": "learning rate {:.3g}",
    "samples_per_second": "{:.1f} samples/s",
    "seconds_left": "{:.0f} s left",
}
