"""A folder on disk that is hashed while it is copied."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from manycpu.pipeline.adapters.listing import Item, Rows, item_of
from manycpu.pipeline.adapters.storage import Block, Location, Reading, blocks
from manycpu.pipeline.transfer.manifest import Tick, TransferError

__all__ = ["Hashing"]


class Hashing:
    """A source that hashes while it reads: each file once, and all of it.

    Of a file whose beginning is at the other end already, that too is read and hashed, and not given.

    Args:
        folder: The folder.
        tick: Is called while it is listed and read, also where nothing is given.
    """

    tells_sha256 = True

    def __init__(self, folder: Location, tick: Tick = lambda: None) -> None:
        self._folder, self._tick = folder, tick

    def items(self) -> Rows[Item]:
        """List every file; its version is its modification time."""
        return self._folder.items(self._tick)

    def read(self, items: Rows[Item], starts: Sequence[int]) -> Iterator[Reading]:
        """Read each file from its start offset.

        Raises:
            TransferError: It is not what was listed.
        """
        for item, start in zip(items, starts, strict=True):
            self._tick()
            digest = hashlib.sha256()
            yield Reading(self._blocks(item, start, digest), digest.hexdigest)

    def _blocks(self, item: Item, start: int, digest: Any) -> Iterator[Block]:
        if item.is_folder:
            return
        with self._folder.open(item.path) as file:
            for block in blocks(file):
                self._tick()
                digest.update(block)
                if not start:
                    yield block
                    continue
                rest = memoryview(block)[start:]
                start -= len(block) - len(rest)
                if rest:
                    yield rest
            if item_of(item.path, os.fstat(file.fileno())) != item:
                raise TransferError(f"{item.path} was written to after it had been listed")
