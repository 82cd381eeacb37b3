"""What is used again is what was copied; what another holder did meanwhile spoils nothing."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.folder_contents import contents, location

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters import lock as locks
from manycpu.pipeline.adapters.storage import Reading

SIZE = 24 << 20


class BrokenError(OSError):
    pass


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.bin").write_bytes(os.urandom(SIZE))
    (folder / "deep" / "b.txt").write_bytes(b"beta")
    return folder


class Thief:
    """A source of somebody who holds the same lease: is slow to begin, and dies at the first byte."""

    tells_sha256 = False

    def __init__(self, source: Path) -> None:
        self._source = location(source)
        self.listed, self.go = threading.Event(), threading.Event()

    def items(self) -> Any:
        return self._source.items()

    def read(self, *_: Any) -> Iterator[Reading]:
        self.listed.set()
        self.go.wait(60)
        return iter([Reading(self._die(), str)] * 2)

    def _die(self) -> Iterator[bytes]:
        raise BrokenError
        yield


def test_a_copy_that_gets_on_is_waited_for_however_long_it_takes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_SILENCE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(locks, "_SIGN_INTERVAL_S", 0.0)
    begun, results = threading.Event(), []

    def slow(*_: int) -> None:  # a disk that takes longer for all than others wait without a sign
        begun.set()
        time.sleep(0.03)

    def copy() -> None:
        results.append(transfer.fetch(location(source), tmp_path / "copy", slow))

    copying = threading.Thread(target=copy)
    copying.start()
    begun.wait(60)
    assert transfer.fetch(location(source), tmp_path / "copy").reused
    copying.join()
    assert [found.reused for found in results] == [False]


def test_a_thief_that_dies_leaves_no_hole_under_a_marker(source: Path, tmp_path: Path) -> None:
    thief, failed = Thief(source), []

    def steal() -> None:
        try:
            transfer.fetch(thief, tmp_path / "copy", lock=lambda _: nullcontext())
        except (OSError, transfer.TransferError) as error:
            failed.append(error)

    def meanwhile(done: int, _: int) -> None:
        if done > SIZE // 2 and not thief.go.is_set():
            thief.go.set()
            stealing.join()

    stealing = threading.Thread(target=steal)
    stealing.start()
    thief.listed.wait(60)
    transfer.fetch(location(source), tmp_path / "copy", meanwhile, lambda _: nullcontext())
    assert failed
    assert contents(tmp_path / "copy") == contents(source)


def test_a_holder_that_was_slow_finds_its_copy_taken_over(source: Path, tmp_path: Path) -> None:
    taken: list[bool] = []

    def meanwhile(*_: int) -> None:
        if not taken:
            taken.append(True)
            transfer.fetch(location(source), tmp_path / "copy", lock=lambda _: nullcontext())

    with pytest.raises(transfer.TakenOverError):
        transfer.fetch(location(source), tmp_path / "copy", meanwhile, lambda _: nullcontext())
    assert contents(tmp_path / "copy") == contents(source)
    assert transfer.fetch(location(source), tmp_path / "copy").reused
    assert list(tmp_path.glob("*.partial")) == []


def test_a_holder_that_was_slow_does_not_make_its_folder_again(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a" / "first").write_text("1")
    (source / "last").write_text("2")
    taken: list[bool] = []

    def meanwhile(done: int, _: int) -> None:
        if done and not taken:  # the folder `a` is complete; the next file is at the top
            taken.append(True)
            transfer.fetch(location(source), tmp_path / "copy", lock=lambda _: nullcontext())

    with pytest.raises(transfer.TakenOverError):
        transfer.fetch(location(source), tmp_path / "copy", meanwhile, lambda _: nullcontext())
    assert contents(tmp_path / "copy") == contents(source)


def test_what_was_taken_over_is_read_once_more_before_it_has_its_name(source: Path, tmp_path: Path) -> None:
    def breaking(done: int, _: int) -> None:
        if done > SIZE:
            raise BrokenError

    with pytest.raises(BrokenError):
        transfer.fetch(location(source), tmp_path / "copy", breaking)

    def late(done: int, _: int) -> None:
        if done > SIZE:  # the first file was verified already
            (partial,) = tmp_path.glob("copy.*.partial")
            with (partial / "a.bin").open("r+b") as file:
                file.write(b"late")

    with pytest.raises(transfer.TransferError, match=r"damaged: 'a\.bin' has other content"):
        transfer.fetch(location(source), tmp_path / "copy", late)
    assert not (tmp_path / "copy").exists()


def _rewrite(folder: Path) -> None:
    (folder / "deep" / "b.txt").write_bytes(b"BETA")


def _truncate(folder: Path) -> None:
    os.truncate(folder / "a.bin", 5)


def _remove(folder: Path) -> None:
    (folder / "deep" / "b.txt").unlink()


def _replace(folder: Path) -> None:
    (folder / "a.bin").unlink()
    (folder / "a.bin").symlink_to("deep/b.txt")


@pytest.mark.parametrize("poison", [_rewrite, _truncate, _remove, _replace])
@pytest.mark.parametrize("how", ["fetch", "store"])
def test_what_a_program_wrote_into_is_never_used_again(
    source: Path, tmp_path: Path, poison: Any, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    digest = transfer.scan(location(source)).digest

    def stage() -> transfer.Stored:
        if how == "fetch":
            return transfer.fetch(location(source), tmp_path / "data" / digest[:16])
        return transfer.store(location(source), tmp_path / "data", lambda: digest)

    first = stage()
    poison(first.path)
    again = stage()
    assert (again.path, again.reused, again.manifest.digest) == (first.path, False, digest)
    assert contents(again.path) == contents(source)
    assert "is not what was staged" in caplog.text
    assert stage().reused
    assert {path.name for path in (tmp_path / "data").iterdir() if path.name[0] != "."} == {
        first.path.name,
        f"{first.path.name}.manifest.json",
    }


def test_what_a_program_put_beside_staged_files_is_gone_but_not_what_links_lead_to(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("x")
    first = transfer.fetch(location(source), tmp_path / "copy")
    (first.path / "cache").mkdir()
    (first.path / "cache" / "tokens").write_text("of other parameters")
    (first.path / "link").symlink_to(tmp_path / "mine")
    os.mkfifo(first.path / "pipe")
    assert transfer.fetch(location(source), tmp_path / "copy").reused
    assert contents(first.path) == contents(source)
    assert (tmp_path / "mine" / "precious").exists()


def test_a_file_that_only_looks_newer_is_read_once(source: Path, tmp_path: Path) -> None:
    first = transfer.fetch(location(source), tmp_path / "copy")
    os.utime(first.path / "a.bin", (1, 1))
    assert transfer.fetch(location(source), tmp_path / "copy").reused
    marker = json.loads((tmp_path / "copy.manifest.json").read_text())
    assert marker["files"][0]["mtime_ns"] == 10**9


def test_what_is_to_be_read_only_cannot_be_written_to(source: Path, tmp_path: Path) -> None:
    (source / "deep" / "b.txt").chmod(0o755)
    copy = transfer.fetch(location(source), tmp_path / "copy", read_only=True).path
    assert [path.stat().st_mode & 0o222 for path in copy.rglob("*") if path.is_file()] == [0, 0]
    assert (copy / "deep" / "b.txt").stat().st_mode & 0o100
    assert transfer.fetch(location(source), tmp_path / "copy", read_only=True).reused


def test_what_somebody_works_with_is_left_as_it_is(source: Path, tmp_path: Path) -> None:
    copy = transfer.fetch(location(source), tmp_path / "copy").path
    assert transfer.fetch(location(source), tmp_path / "copy", in_use=lambda: True).reused
    (copy / "cache.arrow").write_text("of a program")
    for _ in range(2):
        with pytest.raises(transfer.InUseError, match=r"'cache\.arrow' is none of it"):
            transfer.fetch(location(source), tmp_path / "copy", in_use=lambda: True)
    assert (copy / "cache.arrow").read_text() == "of a program"
    assert transfer.fetch(location(source), tmp_path / "copy").reused
    assert contents(copy) == contents(source)


def test_a_broken_copy_that_no_process_has_worked_on_for_a_day_is_deleted(
    source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    old, locked, written, young = (
        folder / f"{digit * 16}.{'d' * 16}.{'0' * 8}.partial" for digit in ("a", "b", "c", "e")
    )
    for broken in (old, locked, written, young):
        broken.mkdir(parents=True)
        (broken / "part").write_text("x")
    old_lock, renewed_lock = folder / f".{'a' * 16}.lock", folder / f".{'b' * 16}.lock"
    old_lock.touch()
    renewed_lock.touch()  # just now: a long copy
    days_ago = renewed_lock.stat().st_mtime - 2 * 86_400  # by the clock of the disk
    for path in (old, old / "part", old_lock, locked, locked / "part", written):
        os.utime(path, (days_ago, days_ago))
    transfer.store(location(source), folder, str, lock=locks.leased)
    assert not old.exists()
    assert all(broken.exists() for broken in (locked, written, young))
