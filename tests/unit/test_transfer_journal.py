"""Of a source that does not tell what a file should be, only what still is what was copied is taken up."""

import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.folder_contents import contents

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.listing import Item, Rows
from manycpu.pipeline.adapters.storage import Location, Reading
from manycpu.pipeline.transfer import partial

SIZE = 1000
FILES = 100
BREAK = 60  # files


class BrokenError(OSError):
    pass


class Remembering:
    """A set behind a URL, and from where on each of its files was read."""

    tells_sha256 = False

    def __init__(self, url: str) -> None:
        self._there = Location.of(url, "run.data")
        self.starts = array("q")

    def items(self) -> Rows[Item]:
        return self._there.items()

    def read(self, items: Rows[Item], starts: Sequence[int]) -> Iterator[Reading]:
        self.starts = array("q", starts)
        return self._there.read(items, starts)

    def whole(self) -> list[int]:
        """Number the files of which nothing was read."""
        return [number for number, start in enumerate(self.starts) if start == SIZE]


@pytest.fixture
def memory() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe({f"/set/{number:03}.bin": os.urandom(SIZE) for number in range(FILES)})
    yield filesystem
    filesystem.rm("/set", recursive=True)


def there(memory: Any) -> dict[str, bytes]:
    return {path.removeprefix("/set/"): memory.cat_file(path) for path in memory.find("/set")}


def broken_after(stem: Path, size: int) -> Path:
    """Break a fetch after so many bytes; what it left."""

    def breaking(done: int, _: int) -> None:
        if done > size:
            raise BrokenError

    with pytest.raises(BrokenError):
        transfer.fetch(Remembering("memory://set"), stem, breaking)
    (left,) = stem.parent.glob(f"{stem.name}.*.partial")
    return left


def broken(stem: Path, files: int = BREAK) -> Path:
    """Break a fetch when so many files are whole, and the next one is half there; what it left."""
    left = broken_after(stem, files * SIZE)
    os.truncate(left / f"{files:03}.bin", SIZE // 2)
    return left


def fetched(stem: Path) -> Remembering:
    source = Remembering("memory://set")
    transfer.fetch(source, stem)
    assert list(stem.parent.glob("*.partial")) == []
    return source


def test_what_was_whole_is_not_read_again_and_what_was_half_there_is_begun_anew(
    memory: Any, tmp_path: Path
) -> None:
    broken(tmp_path / "copy")
    source = fetched(tmp_path / "copy")
    assert source.whole() == list(range(BREAK))
    assert source.starts[BREAK] == 0
    assert contents(tmp_path / "copy") == there(memory)


def test_a_file_with_a_hole_that_has_its_length_is_begun_anew(memory: Any, tmp_path: Path) -> None:
    left = broken(tmp_path / "copy")
    with (left / "007.bin").open("r+b") as file:
        file.write(bytes(SIZE // 2))
    (left / f"{BREAK:03}.bin").write_bytes(bytes(SIZE))  # of right length, and never whole
    assert fetched(tmp_path / "copy").whole() == [number for number in range(BREAK) if number != 7]
    assert contents(tmp_path / "copy") == there(memory)


def test_what_several_breaks_left_is_taken_up(memory: Any, tmp_path: Path) -> None:
    left = broken(tmp_path / "copy", 40)
    (left / "007.bin").unlink()
    broken(tmp_path / "copy", BREAK)
    assert fetched(tmp_path / "copy").whole() == list(range(BREAK))
    assert contents(tmp_path / "copy") == there(memory)


@pytest.mark.parametrize(
    "rest", [b'["059.bin", "4', b"\0" * 50, b"\xff\n", b"3\n", b'[["a"], "b"]\n'], ids=repr
)
def test_a_journal_that_a_crash_cut_or_filled_costs_no_more_than_those_files(
    memory: Any, tmp_path: Path, rest: bytes
) -> None:
    journal = broken(tmp_path / "copy") / "~manycpu.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + rest)
    broken(tmp_path / "copy", BREAK)  # it is gone on with, on a line of its own
    assert fetched(tmp_path / "copy").whole() == list(range(BREAK))
    assert contents(tmp_path / "copy") == there(memory)


@pytest.mark.parametrize("name", ["~manycpu.journal", "~manycpu.journal/x"])
def test_a_file_of_the_journals_name_is_a_file_as_any_other(memory: Any, tmp_path: Path, name: str) -> None:
    memory.pipe(f"/set/{name}", os.urandom(SIZE))
    broken(tmp_path / "copy")
    assert fetched(tmp_path / "copy").whole() == list(range(BREAK))
    assert contents(tmp_path / "copy") == there(memory)


def test_of_a_large_file_the_stretches_that_still_are_what_was_copied_are_not_read_again(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "_STRETCH", 1 << 20)
    memory.rm("/set", recursive=True)
    memory.pipe({"/set/000.bin": os.urandom(5 << 20), "/set/001.bin": os.urandom(5 << 20)})
    left = broken_after(tmp_path / "copy", 8 << 20)
    assert (left / "001.bin").stat().st_size > 2 << 20
    source = fetched(tmp_path / "copy")
    assert source.starts[0] == 5 << 20
    assert 2 << 20 <= source.starts[1] < 4 << 20
    assert contents(tmp_path / "copy") == there(memory)
    left = broken_after(tmp_path / "other", 8 << 20)
    with (left / "001.bin").open("r+b") as file:
        file.write(bytes(SIZE))
    assert list(fetched(tmp_path / "other").starts) == [5 << 20, 0]
    assert contents(tmp_path / "other") == there(memory)


def test_what_no_journal_tells_of_is_begun_anew(memory: Any, tmp_path: Path) -> None:
    (broken(tmp_path / "copy") / "~manycpu.journal").unlink()
    assert fetched(tmp_path / "copy").whole() == []
    assert contents(tmp_path / "copy") == there(memory)
