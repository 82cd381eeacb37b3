"""Record trainings in TensorBoard's files, by its own package, which imports no torch."""

import secrets
import shlex
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from manycpu.pipeline.spec.tracking import Ending, Place, Point, Tracked

_HEADER: Final = struct.Struct("<QI")  # length of a record, and its checksum
_CHECKSUM: Final = 4  # bytes after the record itself
_ABOUT: Final = "run/text_summary"  # tag of the text with parameters and tags
Key = tuple[str, int, float]
"""Tag, step and time (seconds since the epoch) of a value."""


class TensorBoardTracker:
    """Writes each attempt into its own folder, ``<run>/<began>-<attempt>``.

    Every process writes its own file there, and does not repeat values of another file.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[Path, _File] = {}

    def send(self, tracked: Tracked, points: Sequence[Point]) -> None:
        """Write the points of an attempt, except those that one of its files has already.

        Raises:
            OSError: They cannot be written.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = (Summary.Value(tag=point.name, simple_value=point.value) for point in points)
        self._file(tracked).write(
            (value, metric.step, metric.time) for value, metric in zip(values, points, strict=True)
        )

    def end(self, tracked: Tracked, ending: Ending) -> None:
        """Write the points that were not sent; if the whole run has ended, also its parameters and tags."""
        self.send(tracked, ending.points)
        if ending.final:
            self._file(tracked).write([(_text(_ABOUT, _table(tracked, ending)), 0, ending.time)])

    def place_of(self, tracked: Tracked) -> Place:
        """Return the folder of an attempt, and the command that shows all attempts."""
        command = shlex.join(["tensorboard", "--logdir", str(self._root)])
        return {"folder": str(self._folder(tracked)), "command": command}

    def _folder(self, tracked: Tracked) -> Path:
        """Return the folder of an attempt's files."""
        began = time.strftime("%Y%m%dT%H%M%S", time.gmtime(tracked.began))
        return self._root / tracked.name / f"{began}-{tracked.attempt}"

    def _file(self, tracked: Tracked) -> "_File":
        """Return this process's file for an attempt."""
        folder = self._folder(tracked)
        if folder not in self._files:
            self._files[folder] = _File(folder)
        return self._files[folder]


class _File:
    """This process's file for an attempt. It gets only values that no other file in the folder has."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: set[Key] = set()
        self._path: Path | None = None
        self._to_read = True  # nothing was read yet, or the last write failed after a part of its values

    def write(self, values: Iterable[tuple[Any, int, float]]) -> None:
        """Append the values that no file in the folder has yet.

        ``values``: each value with its step, and its time in seconds since the epoch.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._to_read:
            self._known |= {key for path in self._folder.glob("*.tfevents.*") for key in _keys(path)}
            self._to_read = False
        new = {key: entry for entry in values if (key := _key(*entry)) not in self._known}
        if not new:
            return
        # The first record of a file names the version of its format.
        header = [Event(wall_time=time.time(), file_version="brain.Event:2")] if self._path is None else []
        events = [
            Event(wall_time=when, step=step, summary=Summary(value=[value]))
            for value, step, when in new.values()
        ]
        # TensorBoard reads files in the order of their names; others may begin one in the same second.
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{secrets.token_hex(4)}"
        path = self._path or self._folder / name
        self._path, self._to_read = None, True  # if it fails, the next call begins a new file
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            writer = RecordWriter(file)
            for event in [*header, *events]:
                writer.write(event.SerializeToString())
        self._path, self._to_read = path, False
        self._known |= new.keys()


def _key(value: Any, step: int, when: float) -> Key:
    """Return what identifies a value: tag, step and time.

    Every text about a run has the same key, whatever its time: so it is written once.
    """
    return (value.tag, step, round(when, 3)) if value.tag != _ABOUT else (_ABOUT, 0, 0.0)


def _text(tag: str, text: str) -> Any:
    """Make a value that TensorBoard shows as text."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, tensor=tensor, metadata=metadata)


def _keys(path: Path) -> Iterator[Key]:
    """Yield the key of each value in a file. A last record that is cut off is ignored."""
    from tensorboard.compat.proto.event_pb2 import Event

    with path.open("rb") as file:
        while len(head := file.read(_HEADER.size)) == _HEADER.size:
            length = _HEADER.unpack(head)[0]
            body = file.read(length + _CHECKSUM)
            if len(body) < length + _CHECKSUM:
                return
            event = Event.FromString(body[:length])
            yield from (_key(value, event.step, event.wall_time) for value in event.summary.value)


def _table(tracked: Tracked, ending: Ending) -> str:
    """Write parameters and tags as a table in Markdown, which TensorBoard renders."""
    rows = {**tracked.params, **tracked.tags, **ending.tags}
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "| --- | --- |", *lines])


def _cell(text: str) -> str:
    """Write a text as a cell of a table: in one line, with its bars escaped."""
    return " ".join(text.replace("|", "\\|").split())
