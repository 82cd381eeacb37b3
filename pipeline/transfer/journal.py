"""Which files of a partial folder are whole, for sources that do not tell what a file should be."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from manycpu.pipeline.adapters.listing import Item
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.transfer.manifest import File, Tick

__all__ = ["Journal"]

_NAME: Final = "~manycpu.journal"  # after most names: what is no part of a copy is deleted in their order


class Journal:
    """A line for each file that was copied, in a file beside them that goes where they go.

    After a crash a file may have its length, and holes: it is whole where it still has what was copied. So
    nothing has to be on the disk before its line is.

    Args:
        folder: The partial folder.
        items: The files that are copied.
    """

    def __init__(self, folder: Path, items: Iterable[Item]) -> None:
        self._copy = Location.of(f"file://{folder}", "run.data")
        self._path = folder / _free(items)
        self._whole = _read(self._path)
        self._file = self._path.open("a", buffering=1)

    def __enter__(self) -> Self:
        self._file.write("\n")  # the last line may be half of one
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self._file.close()
        if failed is None:
            self._path.unlink(missing_ok=True)

    def note(self, file: File) -> None:
        """Write down that a file is whole."""
        self._file.write(json.dumps([file.path, file.sha256]) + "\n")

    def has(self, item: Item, tick: Tick) -> bool:
        """Whether a file that is there is what was copied: it is read."""
        sha256 = self._whole.get(item.path)
        return sha256 is not None and self._copy.sha256(item, tick) == sha256


def _free(items: Iterable[Item]) -> str:
    """Find a name that none of the files has, and no folder of theirs."""
    taken = {top for item in items if (top := item.path.split("/", 1)[0]).endswith(_NAME)}
    name = _NAME
    while name in taken:
        name = f"~{name}"
    return name


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    whole: dict[str, str] = {}
    with path.open(errors="replace") as lines:
        for line in lines:
            with suppress(ValueError, TypeError):  # half a line, or what a crash left in its place
                name, sha256 = json.loads(line)
                whole[name] = sha256
    return whole
