"""Folders over a channel: a manifest goes ahead, the other end says what it has, and gets the rest."""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from manycpu.pipeline.adapters.storage import Block, Item, Location
from manycpu.pipeline.pod.channel import Channel, Message
from manycpu.pipeline.transfer import Manifest, TransferError

__all__ = ["Incoming", "manifest_of", "pour", "spelled"]

_Wanted = Sequence[tuple[Item, int]]


def spelled(manifest: Manifest) -> list[list[Any]]:
    """Spell a manifest for a message."""
    return [[file.path, file.size, file.sha256] for file in manifest.files]


def manifest_of(message: Message) -> Manifest:
    """Read a manifest from a message.

    Raises:
        TransferError: A path leads out of the folder.
    """
    for path, _, _ in message["files"]:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts:
            raise TransferError(f"the path {path!r} leads out of its folder")
    return Manifest.model_validate(
        {"files": [{"path": path, "size": size, "sha256": digest} for path, size, digest in message["files"]]}
    )


class Incoming:
    """The files of a manifest as they come from the other end: a source to copy from."""

    def __init__(self, channel: Channel, manifest: Manifest) -> None:
        self._channel, self._manifest = channel, manifest
        self._rest = memoryview(b"")

    def items(self) -> list[Item]:
        """List every file, with what it must turn out to be."""
        return [Item(file.path, file.size, file.sha256, file.sha256) for file in self._manifest.files]

    def read(self, wanted: _Wanted) -> Iterator[Iterator[Block]]:
        """Say how much of each file is there, and take the rest of each in turn."""
        starts = {str(number): start for number, (_, start) in enumerate(wanted) if start}
        self._channel.say("have", starts=starts)
        return (self._take(item.size - start) for item, start in wanted)

    def _take(self, size: int) -> Iterator[Block]:
        while size:
            if not self._rest:
                self._rest = memoryview(self._channel.take())
            block, self._rest = self._rest[:size], self._rest[size:]
            size -= len(block)
            yield block


def pour(channel: Channel, source: Location, manifest: Manifest, have: Message) -> None:
    """Send what the other end does not have.

    Raises:
        TransferError: A file is longer or shorter than the manifest says.
    """
    starts = have["starts"]
    wanted = [
        (Item(file.path, file.size, file.sha256), starts.get(str(number), 0))
        for number, file in enumerate(manifest.files)
    ]
    for (item, start), blocks in zip(wanted, source.read(wanted), strict=True):
        size = start
        for block in blocks:
            size += len(block)
            if size <= item.size:
                channel.pour(block)
        if size != item.size:
            raise TransferError(f"{item.path} had {item.size} bytes when it was hashed and {size} when sent")
