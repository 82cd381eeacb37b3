"""Folders over a channel: a list of files goes ahead, the other end says what it has, and gets the rest.

The rest of each file is followed by the sha256 of all of it, as its sender saw it.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from manycpu.pipeline.adapters.storage import Block, Item, Reading
from manycpu.pipeline.pod.channel import Channel, Message
from manycpu.pipeline.transfer import File, Hashing, Manifest, TransferError

__all__ = ["Incoming", "items_of", "manifest_of", "pour", "spelled"]

_Wanted = Sequence[tuple[Item, int]]
_DIGEST: Final = 32  # bytes


def items_of(message: Message) -> list[Item]:
    """Read a list of files from a message.

    Raises:
        TransferError: A path leads out of the folder.
    """
    items = [Item(*each) for each in message["files"]]
    for item in items:
        if item.path.startswith("/") or ".." in item.path.split("/"):
            raise TransferError(f"the path {item.path!r} leads out of its folder")
    return items


def spelled(manifest: Manifest) -> list[Item]:
    """Spell a manifest for a message: what a file's content is, is its version."""
    return [Item(file.path, file.size, file.sha256) for file in manifest.files]


def manifest_of(message: Message) -> Manifest:
    """Read a manifest from a message.

    Raises:
        TransferError: A path leads out of the folder.
    """
    items = items_of(message)
    return Manifest(files=tuple(File(path=i.path, size=i.size, sha256=i.version) for i in items))


class Incoming:
    """Listed files as they come from the other end: a source to copy from."""

    def __init__(self, channel: Channel, items: list[Item]) -> None:
        self._channel, self._items = channel, items
        self._rest = memoryview(b"")

    def items(self) -> list[Item]:
        """List every file."""
        return self._items

    def read(self, wanted: _Wanted) -> Iterator[Reading]:
        """Say how much of each file is there, and take the rest of each in turn."""
        starts = {str(number): start for number, (_, start) in enumerate(wanted) if start}
        self._channel.say("have", starts=starts)
        return (Reading(self._take(item.size - start), self._digest) for item, start in wanted)

    def _take(self, size: int) -> Iterator[Block]:
        while size:
            if not self._rest:
                self._rest = memoryview(self._channel.take())
            block, self._rest = self._rest[:size], self._rest[size:]
            size -= len(block)
            yield block

    def _digest(self) -> str:
        return b"".join(self._take(_DIGEST)).hex()


def pour(channel: Channel, source: Hashing, items: Sequence[Item], have: Message) -> None:
    """Send what the other end does not have.

    Args:
        channel: Leads to the other end.
        source: What it is read from.
        items: The files that the other end was told of.
        have: What it has of them.

    Raises:
        TransferError: A file is longer or shorter than was listed, or changed otherwise.
    """
    wanted = [(item, have["starts"].get(str(number), 0)) for number, item in enumerate(items)]
    for (item, start), reading in zip(wanted, source.read(wanted), strict=True):
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
