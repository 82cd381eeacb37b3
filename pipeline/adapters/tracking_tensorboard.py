"""The door to TensorBoard: its files, by its own package, which imports no torch."""

import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.spec.tracking import Ending, Point, Tracked

__all__ = ["TensorBoardTracker"]

_HEADER: Final = struct.Struct("<QI")  # length of a record, and its checksum
_CHECKSUM: Final = 4  # bytes after it
_VERSION: Final = "brain.Event:2"
_ABOUT: Final = "run/text_summary"
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
        from tensorboard.compat.proto.summary_pb2 import Summary

        writer, known = self._writer(self._folder(tracked))
        for point in points:
            value = Summary.Value(tag=point.name, simple_value=point.value)
            _write(writer, known, value, point.step, point.time)
        writer.flush()

    def end(self, tracked: Tracked, ending: Ending) -> None:
        """Write what was missed, and what the run was, as text."""
        self.send(tracked, ending.points)
        writer, known = self._writer(self._folder(tracked))
        if _ABOUT not in {tag for tag, _, _ in known}:
            _write(writer, known, _text(_ABOUT, _table(tracked, ending)), 0, ending.time)
        writer.close()
        del self._open[self._folder(tracked)]

    def _folder(self, tracked: Tracked) -> Path:
        began = time.strftime("%Y%m%dT%H%M%S", time.gmtime(tracked.began))
        return self._root / tracked.name / f"{began}-{tracked.attempt}"

    def _writer(self, folder: Path) -> tuple[Any, Known]:
        if folder not in self._open:
            known = {key for path in folder.glob("*.tfevents.*") for key in _keys(path)}
            self._open[folder] = _new_file(folder), known
        return self._open[folder]


def _new_file(folder: Path) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    # TensorBoard reads them in the order of their names; others may begin one in the same second.
    name = f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}.{secrets.token_hex(4)}"
    writer = RecordWriter((folder / name).open("wb"))
    writer.write(Event(wall_time=now, file_version=_VERSION).SerializeToString())
    return writer


def _write(writer: Any, known: Known, value: Any, step: int, when: float) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    key = (value.tag, step, when)
    if key not in known:
        event = Event(wall_time=when, step=step, summary=Summary(value=[value]))
        writer.write(event.SerializeToString())
        known.add(key)


def _text(tag: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, tensor=tensor, metadata=metadata)


def _keys(path: Path) -> Iterator[tuple[str, int, float]]:
    from tensorboard.compat.proto.event_pb2 import Event

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
