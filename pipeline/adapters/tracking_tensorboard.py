"""The door to TensorBoard: its files, by tensorboardX, which needs no torch."""

import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.spec.tracking import Ending, Point, Tracked

__all__ = ["TensorBoardTracker"]

_HEADER: Final = struct.Struct("<QI")  # length of a record, and its checksum
_CHECKSUM: Final = 4  # bytes after it
_ABOUT: Final = "run"
Known = set[tuple[str, int, float]]


class TensorBoardTracker:
    """Writes each attempt into a folder of its own, ``<run>/<began>-<attempt>``.

    Every process writes a file of its own there; what is in another one it does not write again.

    Args:
        root: What ``tensorboard --logdir`` is given.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: dict[Path, tuple[Any, Known]] = {}

    def send(self, tracked: Tracked, points: Sequence[Point]) -> None:
        """Write points."""
        from tensorboardX.summary import scalar

        writer, known = self._writer(self._folder(tracked))
        for point in points:
            summary = scalar(point.name, point.value)
            _write(writer, known, summary, point.step, point.time)
        writer.flush()

    def end(self, tracked: Tracked, ending: Ending) -> None:
        """Write what was missed, and what the run was, as text."""
        from tensorboardX.summary import text

        self.send(tracked, ending.points)
        writer, known = self._writer(self._folder(tracked))
        _write(writer, known, text(_ABOUT, _table(tracked, ending)), 0, ending.time)
        writer.close()
        del self._open[self._folder(tracked)]

    def _folder(self, tracked: Tracked) -> Path:
        began = time.strftime("%Y%m%dT%H%M%S", time.gmtime(tracked.began))
        return self._root / tracked.name / f"{began}-{tracked.attempt}"

    def _writer(self, folder: Path) -> tuple[Any, Known]:
        if folder not in self._open:
            from tensorboardX.event_file_writer import EventsWriter

            known = {key for path in sorted(folder.glob("*.tfevents.*")) for key in _keys(path)}
            folder.mkdir(parents=True, exist_ok=True)
            # Others may write there in the same second.
            writer = EventsWriter(str(folder / "events"), f".{secrets.token_hex(4)}")
            self._open[folder] = writer, known
        return self._open[folder]


def _write(writer: Any, known: Known, summary: Any, step: int, when: float) -> None:
    from tensorboardX.proto.event_pb2 import Event

    key = (summary.value[0].tag, step, when)
    if key not in known:
        writer.write_event(Event(wall_time=when, step=step, summary=summary))
        known.add(key)


def _keys(path: Path) -> Iterator[tuple[str, int, float]]:
    from tensorboardX.proto.event_pb2 import Event

    for record in _records(path):
        event = Event.FromString(record)
        yield from ((value.tag, event.step, event.wall_time) for value in event.summary.value)


def _records(path: Path) -> Iterator[bytes]:
    """Read the records of a file; the last one may be half written."""
    with path.open("rb") as file:
        while len(head := file.read(_HEADER.size)) == _HEADER.size:
            length = _HEADER.unpack(head)[0]
            body = file.read(length + _CHECKSUM)
            if len(body) < length + _CHECKSUM:
                return
            yield body[:length]


def _table(tracked: Tracked, ending: Ending) -> str:
    """Write what the run was as a table in Markdown, which TensorBoard shows."""
    rows = {**tracked.params, **tracked.tags, **ending.tags}
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *lines])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
