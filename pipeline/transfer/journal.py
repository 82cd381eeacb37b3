"""How much of each file of a partial folder was copied, where a source does not tell what it should be."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from manycpu.pipeline.adapters.listing import Item
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.transfer.manifest import Tick

__all__ = ["Journal"]

_NAME: Final = "~manycpu.journal"  # after most names: what is no part of a copy is deleted in their order


class Journal:
    """A line for each stretch of a file that was copied, in a file beside them that goes where they go.

    After a crash a file may have its length, and holes: it is gone on with after what still is what was
    copied. So nothing has to be on the disk before its line is.

    Args:
        folder: The partial folder.
        items: The files that are copied.
    """

    def __init__(self, folder: Path, items: Iterable[Item]) -> None:
        self._copy = Location.of(f"file://{folder}", "run.data")
        self._path = folder / _free(items)
        self._copied = _read(self._path)
        self._file = self._path.open("a", buffering=1)

    def __enter__(self) -> Self:
        self._file.write("\n")  # the last line may be half of one
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self._file.close()
        if failed is None:
            self._path.unlink(missing_ok=True)

    def note(self, path: str, size: int, sha256: str) -> None:
        """Write down the sha256 of a file's first bytes, or of all of them."""
        self._file.write(json.dumps([path, size, sha256]) + "\n")

    def start(self, item: Item, tick: Tick) -> int:
        """Return how many bytes of a file that is there are what was copied: they are read."""
        size, sha256 = self._copied.get(item.path, (0, ""))
        return size if size and self._copy.hashed(item, size, tick) == (size, sha256) else 0


def _free(items: Iterable[Item]) -> str:
    """Find a name that none of the files has, and no folder of theirs."""
    taken = {top for item in items if (top := item.path.split("/", 1)[0]).endswith(_NAME)}
    name = _NAME
    while name in taken:
        name = f"~{name}"
    return name


def _read(path: Path) -> dict[str, tuple[int, str]]:
    if not path.exists():
        return {}
    copied: dict[str, tuple[int, str]] = {}
    with path.open(errors="replace") as lines:
        for line in lines:
            with suppress(ValueError, TypeError):  # half a line, or what a crash left in its place
                name, size, sha256 = json.loads(line)
                copied[name] = int(size), sha256
    return copied
