"""Work that only reads, counts or lists shows progress: a process without progress is given up."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from support.folder_contents import location

from manycpu.pipeline import transfer
from manycpu.pipeline.pod import client, commands
from manycpu.pipeline.pod.channel import Channel
from manycpu.pipeline.transfer import Hashing

BLOCK = 1 << 18
BLOCKS = 12
FILES = 200


class BrokenError(OSError):
    pass


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Make a folder with a file of some blocks, and a small one after it."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "a.bin").write_bytes(bytes(BLOCKS * BLOCK))
    (folder / "b.bin").write_bytes(b"beta")
    return folder


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Make a folder with many small files."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number:03}").write_bytes(b"x")
    return folder


def broken(source: Path, stem: Path, at: int) -> None:
    """Leave what a fetch leaves that breaks after so many bytes."""

    def breaking(done: int, _: int) -> None:
        if done >= at:
            raise BrokenError

    with pytest.raises(BrokenError):
        transfer.fetch(location(source), stem, breaking)


def told(source: Path, stem: Path) -> list[int | None]:
    """Fetch, and list what was told meanwhile: the bytes done, and None for each tick."""
    heard: list[int | None] = []
    transfer.fetch(
        location(source), stem, lambda done, _: heard.append(done), tick=lambda: heard.append(None)
    )
    return heard


def test_reading_what_the_other_end_has_is_work(large: Path) -> None:
    items, ticks = location(large).items(), [0]
    reading = next(Hashing(location(large), lambda: ticks.append(0)).read(items, [BLOCKS * BLOCK, 0]))
    before = len(ticks)
    assert not list(reading.blocks)
    assert len(ticks) - before == BLOCKS


def test_reading_back_what_a_broken_copy_left_is_work(large: Path, tmp_path: Path) -> None:
    size = BLOCKS * BLOCK
    broken(large, tmp_path / "copy", size)
    heard = told(large, tmp_path / "copy")
    assert heard[heard.index(size) + 1 :].index(size) >= BLOCKS - 1


def test_counting_what_a_broken_copy_left_is_work(many: Path, tmp_path: Path) -> None:
    broken(many, tmp_path / "copy", FILES)
    heard = told(many, tmp_path / "copy")
    assert next(at for at, done in enumerate(heard) if done is not None) >= FILES


def test_looking_at_each_file_of_a_finished_copy_is_work(many: Path, tmp_path: Path) -> None:
    heard = told(many, tmp_path / "copy")
    assert heard[-FILES:] == [None] * FILES


class SaidError(Exception):
    pass


class Listing(Channel):
    """The end of a channel that counts its ticks until it sends a message."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), io.BytesIO(), lambda: None)
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1

    def send_message(self, kind: str, **fields: object) -> None:
        raise SaidError(kind, fields)


@pytest.mark.parametrize(
    "begin",
    [
        lambda channel, folder: client.push(channel, location(folder), "/data"),
        lambda channel, folder: commands.send(channel, str(folder)),
    ],
    ids=["stage", "export"],
)
def test_listing_what_is_to_be_sent_is_work(many: Path, begin: Callable[[Channel, Path], object]) -> None:
    channel = Listing()
    with pytest.raises(SaidError):
        begin(channel, many)
    assert channel.ticks >= FILES
