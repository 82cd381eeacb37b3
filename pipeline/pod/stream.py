"""Send folders over a channel: first the list of files, then the bytes that the other end does not have.

Lists are sent as they are in memory, and not as messages: a million files take about a hundred megabytes.
After the missing bytes of a file comes the sha256 of the whole file, as the sender read it.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from manycpu.pipeline.adapters.listing import Item, Rows, leads_out
from manycpu.pipeline.adapters.storage import Block, Reading
from manycpu.pipeline.pod.channel import Channel, LostError, Message
from manycpu.pipeline.transfer import Hashing, TransferError

_DIGEST_BYTES: Final = 32
_BLOCK_BYTES: Final = 1 << 18
Row = TypeVar("Row", bound=tuple[Any, ...])


def say_rows(channel: Channel, kind: str, rows: Rows[Row], **fields: Any) -> None:
    """Send a message, followed by a list of files."""
    channel.say(kind, bytes=len(rows.content), **fields)
    _send(channel, memoryview(rows.content))


def take_rows(channel: Channel, message: Message, kind: Callable[[str, int, str, bool], Row]) -> Rows[Row]:
    """Receive the list of files that follows a message.

    Raises:
        TransferError: A path leads out of the folder, or the list is cut off.
    """
    try:
        rows = Rows.of(kind, _take(channel, message["bytes"]))
    except ValueError as error:
        raise TransferError(str(error)) from error
    for path, *_ in rows:
        if leads_out(path):
            raise TransferError(f"the path {path!r} leads out of its folder")
    return rows


def _send(channel: Channel, content: memoryview) -> None:
    for start in range(0, len(content), _BLOCK_BYTES):
        channel.pour(content[start : start + _BLOCK_BYTES])
    channel.flush()


def _take(channel: Channel, size: int) -> bytearray:
    content = bytearray()
    while len(content) < size:
        content += channel.take()
    if len(content) > size:
        raise LostError(f"{size} bytes of a list were to come, and {len(content)} did")
    return content


def take_starts(channel: Channel, message: Message) -> "array[int]":
    """Receive how many bytes of each file the other end has; empty: it has none."""
    starts = array("q")
    starts.frombytes(_take(channel, message["bytes"]))
    return starts


class Incoming:
    """A source whose files come from the other end of a channel."""

    tells_sha256 = True

    def __init__(self, channel: Channel, items: Rows[Item]) -> None:
        self._channel, self._items = channel, items
        self._rest = memoryview(b"")

    def items(self) -> Rows[Item]:
        """List every file."""
        return self._items

    def read(self, items: Rows[Item], starts: Sequence[int]) -> Iterator[Reading]:
        """Send how many bytes of each file exist here, and receive the rest of each in turn."""
        counts = memoryview(array("q", starts if any(starts) else [])).cast("B")
        self._channel.say("have", bytes=len(counts))
        _send(self._channel, counts)
        remaining = zip(items, starts, strict=True)
        return (Reading(self._take(item.size - start), self._digest) for item, start in remaining)

    def _take(self, size: int) -> Iterator[Block]:
        while size:
            if not self._rest:
                self._rest = memoryview(self._channel.take())
            block, self._rest = self._rest[:size], self._rest[size:]
            size -= len(block)
            yield block

    def _digest(self) -> str:
        return b"".join(self._take(_DIGEST_BYTES)).hex()


def pour(channel: Channel, source: Hashing, items: Rows[Item], starts: Sequence[int]) -> None:
    """Send the part of each file that the other end does not have.

    Args:
        channel: The connection to the other end.
        source: The folder to read.
        items: The list of files that was sent.
        starts: How many bytes of each the other end has, see :func:`take_starts`.

    Raises:
        TransferError: A file changed after it was listed.
    """
    starts = starts or array("q", bytes(8 * len(items)))
    for item, start, reading in zip(items, starts, source.read(items, starts), strict=True):
        size = start
        for block in reading.blocks:
            size += len(block)
            if size > item.size:
                break
            channel.pour(block)
        if size != item.size:
            raise TransferError(f"{item.path} had {item.size} bytes when it was listed and {size} when sent")
        channel.pour(bytes.fromhex(reading.sha256()))
    channel.flush()
