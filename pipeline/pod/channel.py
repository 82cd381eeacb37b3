"""Messages and file contents between the worker and a helper pod, over two byte streams.

A frame is its kind (one byte), its length (four bytes, big-endian) and its content: a message in JSON, or the
next bytes of the files that are sent, one file after another without boundaries. Each end sends heartbeats,
by which the other end sees that it lives. An end sends them only while its own work makes progress: if its
disk does not answer, it sends an error, and is silent from then on.
"""

import json
import logging
import queue
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol, Self, TypeVar

from manycpu.pipeline.adapters.listing import Item, Rows, leads_out
from manycpu.pipeline.adapters.storage import Block, Reading
from manycpu.pipeline.transfer import Hashing, Progress, TransferError

BEAT_INTERVAL_S: Final = 5.0  # seconds between heartbeats
SILENCE_TIMEOUT_S: Final = 60.0  # seconds without a frame after which the other end is presumed dead
STUCK_AFTER_S: Final = 900.0  # seconds without progress after which an end gives up its own work
BLOCK: Final = 1 << 16  # bytes of file content that are sent in one frame
_HEADER: Final = struct.Struct(">cI")
_MESSAGE, _CONTENT = b"M", b"C"
_ALIVE: Final = b'{"kind": "alive"}'
_FRAMES_AHEAD: Final = 32
_POLL_INTERVAL_S: Final = 0.5  # between two checks of the other end's progress

Message = dict[str, Any]
Content = Block | bytearray
log = logging.getLogger(__name__)


class LostError(ConnectionError):
    """The other end is gone; it may have done the request before."""


class SilentError(LostError):
    """The other end was silent for too long."""


class RemoteError(TransferError):
    """The other end failed at the request, and sent the reason."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class Reader(Protocol):
    """A byte stream that frames are read from."""

    def read(self, size: int, /) -> Content:
        """Read exactly ``size`` bytes; fewer only at the end of the stream."""


class Writer(Protocol):
    """A byte stream that frames are written to."""

    def writelines(self, parts: Sequence[Content], /) -> object:
        """Write all parts, now or at the next flush."""

    def flush(self) -> None:
        """Write the buffered bytes."""


class Channel:
    """One end of a channel.

    Args:
        reader: The stream with the other end's frames.
        writer: The stream for frames to the other end.
        close: Ends both streams, also while a thread waits for one of them.
        progress: Called with the number of bytes that the other end has done, and of all bytes.
        silence: Seconds without a frame after which the other end is presumed dead.

    Methods that send or wait raise :class:`LostError` if the other end is gone, and :class:`RemoteError` if
    it failed.
    """

    def __init__(
        self,
        reader: Reader,
        writer: Writer,
        close: Callable[[], None],
        progress: Progress = lambda *_: None,
        silence: float = SILENCE_TIMEOUT_S,
    ) -> None:
        self._reader, self._writer, self._close = reader, writer, close
        self._progress, self._silence, self._stuck = progress, silence, STUCK_AFTER_S
        self._frames: queue.Queue[Message | Content | Exception] = queue.Queue(_FRAMES_AHEAD)
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._buffer = bytearray()
        self._last_received = self._last_progress = time.monotonic()
        self._is_waiting = False  # whether this end waits for the other end
        self._failure: Exception | None = None  # the first reason for which the channel ended
        self._unreported: tuple[int, int] | None = None  # progress of the other end: bytes done, and in all

    def __enter__(self) -> Self:
        """Start the threads that read, send heartbeats, and watch for silence."""
        loops = (self._read, self._send_heartbeats, self._watch_silence)
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close both streams, and wait until the threads have ended; unread frames are dropped."""
        self._ended.set()
        self._close()
        for thread in self._threads:
            while thread.is_alive():
                with suppress(queue.Empty):  # the thread may wait for room in the queue
                    self._frames.get(timeout=0.05)

    def tick(self) -> None:
        """Record that this end's own work makes progress."""
        self._last_progress = time.monotonic()

    @property
    def is_progressing(self) -> bool:
        """Whether this end's work makes progress, or waits for the other end."""
        return self._is_waiting or time.monotonic() - self._last_progress < self._stuck

    def send_message(self, kind: str, **fields: Any) -> None:
        """Send a message, after the content that was sent before it."""
        self.flush()
        self._send_and_wait(_MESSAGE, json.dumps({"kind": kind, **fields}).encode())

    def send_content(self, block: Block) -> None:
        """Send bytes of files; small blocks are buffered, and sent together."""
        if len(block) >= BLOCK:
            self.flush()
            self._send_and_wait(_CONTENT, block)
        else:
            self._buffer += block
            if len(self._buffer) >= BLOCK:
                self.flush()
        self._report_progress()

    def flush(self) -> None:
        """Send the buffered bytes."""
        if self._buffer:
            content, self._buffer = self._buffer, bytearray()
            self._send_and_wait(_CONTENT, content)

    def receive_message(self, *kinds: str) -> Message:
        """Wait for a message of one of these kinds; raise LostError if anything else comes."""
        frame = self._next_frame()
        if not isinstance(frame, dict) or frame["kind"] not in kinds:
            raise LostError(f"the other end was to say {' or '.join(kinds)}, and sent {str(frame)[:80]}")
        return frame

    def receive_content(self) -> Content:
        """Wait for the next bytes of files; raise LostError if a message comes instead."""
        frame = self._next_frame()
        if isinstance(frame, dict):
            raise LostError(f"the other end was to send files, and said {str(frame)[:80]}")
        return frame

    def _next_frame(self) -> Message | Content:
        """Wait for the next frame; raise the error if the reading thread has queued one instead."""
        while True:
            self._report_progress()
            try:
                with self._waiting():
                    frame = self._frames.get(timeout=_POLL_INTERVAL_S)
            except queue.Empty:
                if self._failure is not None:
                    raise self._failure from None
                continue  # _watch_silence sets _failure if nothing comes
            self._report_progress()  # what the other end reported before this frame
            if isinstance(frame, Exception):
                raise frame
            return frame

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Mark that the ``with`` block waits for the other end: this end need not make progress meanwhile."""
        self._is_waiting = True
        try:
            yield
        finally:
            self.tick()  # first: else the heartbeat thread would see neither waiting nor progress
            self._is_waiting = False

    def _send_and_wait(self, kind: bytes, content: Content) -> None:
        """Send a frame, which may block until the other end reads; raise the reason if that fails."""
        if self._failure is not None:
            raise self._failure
        with self._waiting():
            try:
                self._send(kind, content)
            except (OSError, ValueError) as error:  # ValueError: _watch_silence closed the stream
                raise self._cause(error) from error

    def _report_progress(self) -> None:
        """Call the progress callback in the caller's thread, so that it need not be thread-safe."""
        unreported, self._unreported = self._unreported, None
        if unreported is not None:
            done, total = unreported
            self._progress(done, total)

    def _send(self, kind: bytes, content: Content) -> None:
        """Write one frame; only one thread writes at a time."""
        with self._writing:
            self._writer.writelines((_HEADER.pack(kind, len(content)), content))
            self._writer.flush()

    def _cause(self, error: Exception) -> Exception:
        """Return the reason why the channel ended, after at most five seconds of waiting; else a LostError.

        The other end may have sent an error before it closed. Frames in the queue are dropped, so that the
        reading thread reaches that error: only the thread that receives frames may call this method.
        ``error`` is the failure of the write; the LostError gets its text.
        """
        deadline = time.monotonic() + BEAT_INTERVAL_S
        while self._failure is None and time.monotonic() < deadline:
            try:
                self._frames.get(timeout=_POLL_INTERVAL_S)
            except queue.Empty:
                continue
        return self._failure or LostError(str(error) or type(error).__name__)

    def _read(self) -> None:
        """Run in a thread: put frames into the queue; when the stream ends, put the error, and return."""
        try:
            while True:
                kind, size = _HEADER.unpack(self._read_exactly(_HEADER.size))
                self._dispatch(kind, self._read_exactly(size))
        except Exception as error:  # noqa: BLE001 - it is raised in the thread that receives frames
            failure = error if isinstance(error, (LostError, RemoteError)) else LostError(str(error))
            self._failure = self._failure or failure  # an earlier one closed the stream, and is the reason
            self._frames.put(self._failure)

    def _dispatch(self, kind: bytes, content: Content) -> None:
        """Handle a message about the connection itself; queue any other frame for the caller."""
        self._last_received = time.monotonic()
        if kind == _CONTENT:
            self._frames.put(content)
            return
        message = json.loads(bytes(content))
        if message["kind"] == "progress":
            self._unreported = message["done"], message["total"]
        elif message["kind"] == "note":
            log.log(message["level"], "%s", message["text"])
        elif message["kind"] == "error":
            raise RemoteError(message["text"], message["reason"])
        elif message["kind"] != "alive":
            self._frames.put(message)

    def _read_exactly(self, size: int) -> Content:
        """Read ``size`` bytes; raise LostError if the stream ends before."""
        content = self._reader.read(size)
        if len(content) < size:
            raise LostError("the stream ended")
        return content

    def _send_heartbeats(self) -> None:
        """Run in a thread: send heartbeats; if this end's work stands still, send an error, and close."""
        text = f"its work has stood still for {self._stuck:g} s: the disk or volume there does not answer"
        stuck = json.dumps({"kind": "error", "reason": "stuck", "text": text}).encode()
        # A quarter of the limit: a short limit, as tests set it, is noticed soon too.
        while not self._ended.wait(min(BEAT_INTERVAL_S, self._stuck / 4)) and self._failure is None:
            is_progressing = self.is_progressing  # read once: work may resume while this sends
            try:
                self._send(_MESSAGE, _ALIVE if is_progressing else stuck)
            except (OSError, ValueError):  # the thread that receives frames sees the error
                return
            if not is_progressing:
                self._failure = LostError("this end's own work stands still")
                self._close()
                return

    def _watch_silence(self) -> None:
        """Run in a thread: close the channel if the other end sends nothing for too long."""
        while not self._ended.wait(min(BEAT_INTERVAL_S, self._silence / 4)):
            if self._frames.full():
                self._last_received = time.monotonic()  # nothing is read while the queue is full
            if time.monotonic() - self._last_received > self._silence:
                self._failure = self._failure or SilentError(f"no sign of life for {self._silence:g} s")
                self._close()
                return


_DIGEST_BYTES: Final = 32
_BLOCK_BYTES: Final = 1 << 18
Row = TypeVar("Row", bound=tuple[Any, ...])


def send_rows(channel: Channel, kind: str, rows: Rows[Row], **fields: Any) -> None:
    """Send a message, followed by a list of files."""
    channel.send_message(kind, bytes=len(rows.content), **fields)
    _send_blocks(channel, memoryview(rows.content))


def receive_rows(
    channel: Channel, message: Message, row_class: Callable[[str, int, str, bool], Row]
) -> Rows[Row]:
    """Receive the list of files that follows a message; ``row_class`` is Item or File.

    Raises:
        TransferError: A path leads out of the folder, or the list is cut off.
    """
    try:
        rows = Rows.of(row_class, _receive_bytes(channel, message["bytes"]))
    except ValueError as error:
        raise TransferError(str(error)) from error
    for path, *_ in rows:
        if leads_out(path):
            raise TransferError(f"the path {path!r} leads out of its folder")
    return rows


def _send_blocks(channel: Channel, content: memoryview) -> None:
    """Send bytes in blocks: after each, :meth:`Channel.send_content` reports the other end's progress."""
    for start in range(0, len(content), _BLOCK_BYTES):
        channel.send_content(content[start : start + _BLOCK_BYTES])
    channel.flush()


def _receive_bytes(channel: Channel, size: int) -> bytearray:
    """Receive exactly ``size`` bytes; raise LostError if a frame has more.

    The other end must flush them before it sends anything else.
    """
    content = bytearray()
    while len(content) < size:
        content += channel.receive_content()
    if len(content) > size:
        raise LostError(f"{size} bytes of a list were to come, and {len(content)} did")
    return content


def receive_starts(channel: Channel, message: Message) -> "array[int]":
    """Receive how many bytes of each file the other end has; empty array: it has no byte of any file."""
    starts = array("q")
    starts.frombytes(_receive_bytes(channel, message["bytes"]))
    return starts


class Incoming:
    """A source (see ``transfer.Source``) whose files come from the other end of a channel."""

    tells_sha256 = True  # the other end sends it after each file

    def __init__(self, channel: Channel, items: Rows[Item]) -> None:
        self._channel, self._items = channel, items
        self._rest = memoryview(b"")  # bytes that were received, and are of the next file

    def items(self) -> Rows[Item]:
        """List every file."""
        return self._items

    def read(self, items: Rows[Item], starts: Sequence[int]) -> Iterator[Reading]:
        """Send how many bytes of each file exist here; the rest of each file is received as it is read."""
        numbers = array("q", starts) if any(starts) else array("q")  # empty: none of any file
        content = memoryview(numbers).cast("B")
        self._channel.send_message("have", bytes=len(content))
        _send_blocks(self._channel, content)
        return self._receive_files(items, starts)

    def _receive_files(self, items: Rows[Item], starts: Sequence[int]) -> Iterator[Reading]:
        """Yield each file; its bytes are received while the caller reads the blocks."""
        for item, start in zip(items, starts, strict=True):
            yield Reading(self._receive(item.size - start), self._receive_sha256)

    def _receive(self, size: int) -> Iterator[Block]:
        """Yield the next ``size`` bytes; frames have no boundaries between files."""
        while size:
            if not self._rest:
                self._rest = memoryview(self._channel.receive_content())
            block, self._rest = self._rest[:size], self._rest[size:]
            size -= len(block)
            yield block

    def _receive_sha256(self) -> str:
        """Receive the sha256 that follows the content of each file."""
        return b"".join(self._receive(_DIGEST_BYTES)).hex()


def send_files(channel: Channel, source: Hashing, items: Rows[Item], starts: Sequence[int]) -> None:
    """Send the part of each file that the other end does not have, followed by the sha256 of the whole file.

    Args:
        channel: The connection to the other end.
        source: The folder to read.
        items: The list of files that was sent.
        starts: How many bytes of each file the other end has; empty: no byte of any file.

    Raises:
        TransferError: A file changed after it was listed.
    """
    if not starts:  # the other end has no byte of any file: a zero, of 8 bytes, for each
        starts = array("q", bytes(8 * len(items)))
    for item, start, reading in zip(items, starts, source.read(items, starts), strict=True):
        end = start  # of what was read of this file
        for block in reading.blocks:
            end += len(block)
            if end > item.size:  # it grew since it was listed
                break
            channel.send_content(block)
        if end != item.size:
            raise TransferError(f"{item.path} had {item.size} bytes when it was listed and {end} when sent")
        channel.send_content(bytes.fromhex(reading.sha256()))
    channel.flush()
