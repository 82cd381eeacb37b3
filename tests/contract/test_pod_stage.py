"""Data on its way to a volume through a helper pod, which is a process of this machine here."""

import threading
from pathlib import Path

import pytest
from folders import contents, location
from helpers import until
from pod_process import LARGE, pod, push

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Block
from manycpu.pipeline.pod import client
from manycpu.pipeline.pod.channel import BLOCK, LostError, RemoteError
from manycpu.pipeline.transfer import Manifest, TransferError

DIGEST = 32


def test_a_folder_reaches_the_volume_whole_with_its_marker(source: Path, tmp_path: Path) -> None:
    done = push(source, tmp_path / "volume" / "data" / "x")
    manifest = transfer.scan(location(source))
    assert (done["sha256"], done["reused"]) == (manifest.digest, False)
    assert contents(tmp_path / "volume" / "data" / "x") == contents(source)
    assert transfer.staged(tmp_path / "volume" / "data" / "x") == manifest
    assert {path.name for path in (tmp_path / "volume" / "data").iterdir()} == {"x", "x.manifest.json"}


def test_the_volume_holds_what_a_copy_on_this_machine_would_hold(source: Path, tmp_path: Path) -> None:
    push(source, tmp_path / "there")
    transfer.fetch(location(source), tmp_path / "here")
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_what_is_there_is_not_sent_again(source: Path, tmp_path: Path) -> None:
    push(source, tmp_path / "x")
    before = (tmp_path / "x" / "a.txt").stat().st_ino
    manifest = transfer.scan(location(source))
    (source / "a.txt").unlink()  # whoever sent it again would fail
    assert push(source, tmp_path / "x", manifest)["reused"] is True
    assert (tmp_path / "x" / "a.txt").stat().st_ino == before


def test_a_break_in_the_middle_of_a_file_is_taken_up_there(source: Path, tmp_path: Path) -> None:
    manifest, volume = transfer.scan(location(source)), tmp_path / "volume"
    large = volume / "x.partial" / "deep er" / "große\nDatei.bin"
    with pod("receive") as (channel, process):
        whole = channel.pour

        def breaking(block: Block) -> None:
            whole(block)
            if len(block) == BLOCK:
                channel.flush()
                until(lambda: large.exists() and large.stat().st_size)
                process.kill()
                process.wait()

        channel.pour = breaking  # type: ignore[method-assign]
        with pytest.raises(LostError):
            client.push(channel, location(source), manifest, str(volume / "x"))
    kept = large.stat()
    assert 0 < kept.st_size < LARGE
    assert transfer.staged(volume / "x") is None
    (volume / ".x.lock").unlink()  # the lease of the killed pod, which ends by itself after half a minute
    sent = 0
    with pod("receive") as (channel, _):
        whole = channel.pour

        def counting(block: Block) -> None:
            nonlocal sent
            sent += len(block)
            whole(block)

        channel.pour = counting  # type: ignore[method-assign]
        client.push(channel, location(source), manifest, str(volume / "x"))
    assert sent == manifest.size - kept.st_size - len(b"alpha") + DIGEST * len(manifest.files)
    assert (volume / "x" / "deep er" / "große\nDatei.bin").stat().st_ino == kept.st_ino
    assert contents(volume / "x") == contents(source)


def test_a_partial_file_that_rotted_is_sent_anew(source: Path, tmp_path: Path) -> None:
    partial = tmp_path / "x.partial"
    manifest = transfer.scan(location(source))
    first = manifest.files[0]
    partial.mkdir()
    (partial / first.path).write_bytes(b"beta")
    (partial / ".journal").write_text(f'["{first.path}", {first.size}, "{first.sha256}"]\n')
    with pytest.raises(RemoteError, match=r"a\.txt had sha256"):
        push(source, tmp_path / "x")
    push(source, tmp_path / "x")
    assert contents(tmp_path / "x") == contents(source)


@pytest.mark.parametrize(
    "change", [b"longer than it was", b"al", b"ALPHA"], ids=["longer", "shorter", "other"]
)
def test_a_source_that_changes_meanwhile_is_refused(source: Path, tmp_path: Path, change: bytes) -> None:
    manifest = transfer.scan(location(source))
    (source / "a.txt").write_bytes(change)
    with pytest.raises(TransferError, match=r"a\.txt had"):
        push(source, tmp_path / "x", manifest)
    assert transfer.staged(tmp_path / "x") is None


def test_two_who_stage_the_same_at_once_share_one_copy(source: Path, tmp_path: Path) -> None:
    done: list[dict[str, object]] = []
    copy = tmp_path / "volume" / "x"
    threads = [threading.Thread(target=lambda: done.append(push(source, copy))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({str(answer["sha256"]) for answer in done}) == 1
    assert len(done) == 3
    assert contents(tmp_path / "volume" / "x") == contents(source)
    assert {path.name for path in (tmp_path / "volume").iterdir()} == {"x", "x.manifest.json"}


def test_a_manifest_does_not_lead_out_of_the_volume(source: Path, tmp_path: Path) -> None:
    manifest = transfer.scan(location(source))
    outside = manifest.files[0].model_copy(update={"path": "../outside"})
    with pytest.raises(RemoteError, match="leads out"):
        push(source, tmp_path / "x", Manifest(files=(outside,)))
    assert not (tmp_path / "outside").exists()
