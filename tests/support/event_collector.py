"""A listener that collects its lines and events, for tests of their delivery."""

from manycpu.pipeline.listeners import Silent
from manycpu.pipeline.spec.event_types import Event
from manycpu.pipeline.spec.events import RankLine


class EventCollector(Silent):
    """Collects lines, and events with their ranks."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[tuple[int | None, Event]] = []

    def line(self, line: RankLine) -> None:
        """Collect an ordinary line."""
        self.lines.append(line.text)

    def event(self, event: Event, line: RankLine) -> None:
        """Collect an event."""
        self.events.append((line.rank, event))

    @property
    def kinds(self) -> list[str]:
        """Names of the events in their order; a progress event has its step too."""
        return [f"{event.event} {getattr(event, 'step', None) or ''}".strip() for _, event in self.events]
