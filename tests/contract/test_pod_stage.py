"""Data on its way to a volume through a helper pod, which is a process of this machine here."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.folder_contents import contents, location
from support.helper_process import LARGE, pod, push
from support.waiting import until

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.listing import Item, Rows
from manycpu.pipeline.adapters.storage import Block
from manycpu.pipeline.pod import client
from manycpu.pipeline.pod.channel import BLOCK, Channel, LostError, RemoteError, send_rows
from manycpu.pipeline.transfer import TransferError

DIGEST = 32
LARGEST = Path("deep er", "große\nDatei.bin")


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """Name the folder of the volume that data goes to."""
    return tmp_path / "volume" / "data"


def counted(channel: Channel) -> Callable[[], int]:
    """Count the bytes of files that are sent."""
    sent, whole = 0, channel.send_content

    def pour(block: Block) -> None:
        nonlocal sent
        sent += len(block)
        whole(block)

    channel.send_content = pour  # type: ignore[method-assign]
    return lambda: sent


def test_a_folder_reaches_the_volume_whole_with_its_marker(source: Path, volume: Path) -> None:
    done = push(source, volume)
    manifest = transfer.scan(location(source))
    place = volume / manifest.digest[: transfer.DIGITS]
    assert (done["sha256"], done["path"], done["reused"]) == (manifest.digest, str(place), False)
    assert contents(place) == contents(source)
    assert transfer.staged(place) == manifest
    assert {path.name for path in volume.iterdir()} == {place.name, f"{place.name}.manifest.json"}


def test_the_volume_holds_what_a_copy_on_this_machine_would_hold(source: Path, volume: Path) -> None:
    done = push(source, volume)
    transfer.fetch(location(source), volume / "here")
    assert contents(Path(done["path"])) == contents(volume / "here")


def test_what_is_there_is_not_sent_again(source: Path, volume: Path) -> None:
    first = push(source, volume)
    before = Path(first["path"], "a.txt").stat()
    os.utime(source / "a.txt", (1, 1))  # its content is what counts
    with pod("receive") as (channel, _):
        sent = counted(channel)
        again = client.push(channel, location(source), str(volume))
    assert sent() == len(location(source).items().content)
    assert (again["path"], again["sha256"], again["reused"]) == (first["path"], first["sha256"], True)
    assert Path(first["path"], "a.txt").stat().st_ino == before.st_ino


def test_other_content_of_the_same_sizes_is_sent(source: Path, volume: Path) -> None:
    first = push(source, volume)
    (source / "a.txt").write_bytes(b"ALPHA")
    second = push(source, volume)
    assert second["reused"] is False
    assert Path(first["path"], "a.txt").read_bytes() == b"alpha"
    assert contents(Path(second["path"])) == contents(source)


def test_a_break_in_the_middle_of_a_file_is_taken_up_there(source: Path, volume: Path) -> None:
    def partial() -> Path | None:
        return next((path for path in volume.glob(f"*.partial/{LARGEST}") if path.stat().st_size), None)

    with pod("receive") as (channel, process):
        whole = channel.send_content

        def breaking(block: Block) -> None:
            whole(block)
            if len(block) >= BLOCK:
                channel.flush()
                until(partial)
                process.kill()
                process.wait()

        channel.send_content = breaking  # type: ignore[method-assign]
        with pytest.raises(LostError):
            client.push(channel, location(source), str(volume))
    large = partial()
    assert large
    kept = large.stat()
    assert 0 < kept.st_size < LARGE
    assert list(volume.glob("*.manifest.json")) == []
    for lock in volume.glob(".*.lock"):
        lock.unlink()  # the lease of the killed pod, which ends by itself after half a minute
    with pod("receive") as (channel, _):
        sent = counted(channel)
        done = client.push(channel, location(source), str(volume))
    manifest = transfer.scan(location(source))
    listed = len(location(source).items().content)
    assert sent() == listed + manifest.size - kept.st_size - len(b"alpha") + DIGEST * len(manifest.files)
    assert Path(done["path"], LARGEST).stat().st_ino == kept.st_ino
    assert contents(Path(done["path"])) == contents(source)


def test_a_partial_file_that_rotted_is_sent_anew(source: Path, volume: Path) -> None:
    with pod("receive") as (channel, process):
        send_rows(channel, "request", location(source).items(), folder=str(volume))
        channel.receive_message("have")
        (partial,) = volume.glob("*.partial")
        process.kill()
    (partial / "a.txt").write_bytes(b"beta")
    for lock in volume.glob(".*.lock"):
        lock.unlink()
    with pytest.raises(RemoteError, match=r"a\.txt had sha256"):
        push(source, volume)
    assert contents(Path(push(source, volume)["path"])) == contents(source)


@pytest.mark.parametrize(
    "change", [b"longer than it was", b"al", b"ALPHA"], ids=["longer", "shorter", "other"]
)
def test_a_source_that_changes_meanwhile_is_refused(source: Path, volume: Path, change: bytes) -> None:
    with pod("receive") as (channel, _):
        hear = channel.receive_message

        def changing(*kinds: str) -> dict[str, Any]:
            said = hear(*kinds)
            (source / "a.txt").write_bytes(change)
            return said

        channel.receive_message = changing  # type: ignore[method-assign]
        with pytest.raises(TransferError, match=r"a\.txt (had|was written to)"):
            client.push(channel, location(source), str(volume))
    assert list(volume.glob("*.manifest.json")) == []


def test_several_who_stage_the_same_at_once_share_one_copy(source: Path, volume: Path) -> None:
    done: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: done.append(push(source, volume))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer["reused"] for answer in done) == [False, True, True]
    assert len({answer["path"] for answer in done}) == 1
    place = Path(done[0]["path"])
    assert contents(place) == contents(source)
    assert {path.name for path in volume.iterdir()} == {place.name, f"{place.name}.manifest.json"}


def test_a_list_of_files_does_not_lead_out_of_the_volume(volume: Path) -> None:
    with pod("receive") as (channel, _):
        send_rows(channel, "request", Rows(Item, [Item("../outside", 1, "0")]), folder=str(volume))
        with pytest.raises(RemoteError, match="leads out"):
            channel.receive_message("have")
    assert not volume.exists()
