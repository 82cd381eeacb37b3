"""Copies are whole or absent, go on after a break, and are what their source is."""

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.folder_contents import contents, location

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.transfer import destination, manifest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"alpha")
    (folder / "deep" / "er" / "b.bin").write_bytes(os.urandom(3 << 20))
    (folder / "empty").write_bytes(b"")
    return folder


def test_a_folder_is_fetched_whole(source: Path, tmp_path: Path) -> None:
    manifest = transfer.fetch(location(source), tmp_path / "copy").manifest
    assert contents(tmp_path / "copy") == contents(source)
    assert manifest == transfer.scan(location(source)) == transfer.staged(tmp_path / "copy")


def test_what_is_there_is_not_copied_again(source: Path, tmp_path: Path) -> None:
    first = transfer.fetch(location(source), tmp_path / "copy")
    (tmp_path / "copy" / "a.txt").stat()
    before = (tmp_path / "copy").stat().st_ino
    assert transfer.fetch(location(source), tmp_path / "copy") == first._replace(reused=True)
    assert (tmp_path / "copy").stat().st_ino == before


def test_identity_follows_content_and_names(source: Path) -> None:
    before = transfer.identity(location(source))
    (source / "a.txt").write_bytes(b"alphA")
    changed = transfer.identity(location(source))
    (source / "a.txt").rename(source / "c.txt")
    assert len({before, changed, transfer.identity(location(source))}) == 3


def test_a_broken_copy_goes_on_where_it_stopped(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenError(OSError):
        pass

    read: list[int] = []

    def breaking(file: object) -> object:
        for block in iter(lambda: file.read(1 << 20), b""):  # type: ignore[attr-defined]
            if len(read) == 2:
                raise BrokenError
            read.append(len(block))
            yield block

    monkeypatch.setattr(manifest, "blocks", breaking)
    with pytest.raises(BrokenError):
        transfer.fetch(transfer.Hashing(location(source)), tmp_path / "copy")
    monkeypatch.undo()
    assert not (tmp_path / "copy").exists()
    assert transfer.staged(tmp_path / "copy") is None
    (kept,) = tmp_path.glob("copy.*.partial/deep/er/b.bin")
    inode, size = kept.stat().st_ino, kept.stat().st_size
    assert size > 0
    transfer.fetch(transfer.Hashing(location(source)), tmp_path / "copy")
    assert (tmp_path / "copy" / "deep" / "er" / "b.bin").stat().st_ino == inode
    assert contents(tmp_path / "copy") == contents(source)


def broken(source: Path, stem: Path) -> Path:
    """Break a copy in its largest file; what it left."""

    class BrokenError(OSError):
        pass

    def breaking(done: int, _: int) -> None:
        if done > 2 << 20:
            raise BrokenError

    with pytest.raises(BrokenError):
        transfer.fetch(location(source), stem, breaking)
    (left,) = stem.parent.glob(f"{stem.name}.*.partial")
    return left


def test_what_a_broken_copy_left_of_another_version_is_dropped(source: Path, tmp_path: Path) -> None:
    left = broken(source, tmp_path / "copy")
    (left / "a.txt").write_bytes(b"al from an older version")
    (source / "a.txt").write_bytes(b"alphA")
    transfer.fetch(location(source), tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(source)
    assert list(tmp_path.glob("*.partial")) == []


def test_strangers_in_a_broken_copy_do_not_reach_the_result(source: Path, tmp_path: Path) -> None:
    (broken(source, tmp_path / "copy") / "stranger").write_text("of a file since deleted")
    transfer.fetch(location(source), tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(source)


def test_what_an_earlier_version_left_of_a_broken_copy_goes(source: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.partial").mkdir()
    (tmp_path / "copy.partial" / ".journal").write_text('["a.txt", 24, "1.0"]\n')
    transfer.fetch(location(source), tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(source)
    assert list(tmp_path.glob("*.partial")) == []


def test_a_folder_without_its_marker_is_not_trusted(source: Path, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "a.txt").write_text("half")
    transfer.fetch(location(source), tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(source)


def test_two_who_fetch_the_same_share_one_copy(source: Path, tmp_path: Path) -> None:
    results: list[transfer.Stored] = []
    threads = [
        threading.Thread(target=lambda: results.append(transfer.fetch(location(source), tmp_path / "copy")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.manifest for found in results] == [transfer.scan(location(source))] * 4
    assert sorted(found.reused for found in results) == [False, True, True, True]
    assert contents(tmp_path / "copy") == contents(source)


def test_a_single_file_is_a_source_too(source: Path, tmp_path: Path) -> None:
    transfer.fetch(location(source / "a.txt"), tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"a.txt": b"alpha"}


def test_a_source_behind_a_url_is_fetched(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({"/set/train.json": b"{}", "/set/deep/dev.json": b"[]"})
    try:
        transfer.fetch(Location.of("memory://set", "run.data"), tmp_path / "copy")
    finally:
        memory.rm("/set", recursive=True)
    assert contents(tmp_path / "copy") == {"train.json": b"{}", "deep/dev.json": b"[]"}


def test_publishing_puts_a_manifest_beside_the_model(source: Path, tmp_path: Path) -> None:
    manifest = transfer.publish(source, location(tmp_path / "out" / "model"), "key")
    published = contents(tmp_path / "out" / "model")
    assert transfer.Manifest.read(tmp_path / "out" / "model" / "manifest.json") == manifest
    assert published.keys() == contents(source).keys() | {"manifest.json"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]


def test_publishing_to_a_url_verifies_and_marks_the_end(source: Path) -> None:
    memory = fsspec.filesystem("memory")
    try:
        manifest = transfer.publish(source, Location.of("memory://models/qa", "run.output"), "key")
        found = {
            path.removeprefix("/models/qa/"): memory.cat_file(path) for path in memory.find("/models/qa")
        }
    finally:
        memory.rm("/models", recursive=True)
    described = json.loads(found.pop("manifest.json"))["files"]
    assert [transfer.File(**fields) for fields in described] == list(manifest.files)
    assert found == contents(source)


def test_publishing_again_replaces_what_this_run_published(source: Path, tmp_path: Path) -> None:
    transfer.publish(source, location(tmp_path / "out"), "key")
    (source / "a.txt").unlink()
    transfer.publish(source, location(tmp_path / "out"), "key")
    assert "a.txt" not in contents(tmp_path / "out")


def test_a_file_that_is_written_to_while_it_is_published_is_an_error(source: Path, tmp_path: Path) -> None:
    written = source / "deep" / "er" / "b.bin"

    def meanwhile(*_: int) -> None:
        with written.open("r+b") as file:
            file.write(b"another")

    with pytest.raises(transfer.TransferError, match=r"b\.bin was written to"):
        transfer.publish(source, location(tmp_path / "out"), "key", meanwhile)
    assert not (tmp_path / "out").exists()


def test_what_reads_back_otherwise_is_an_error_and_is_copied_anew(source: Path, tmp_path: Path) -> None:
    def rot(*_: int) -> None:
        for copy in tmp_path.glob(".out.key.*.partial/deep/er/b.bin"):
            if copy.stat().st_size == 3 << 20:
                with copy.open("r+b") as file:
                    file.write(b"rotten")

    with pytest.raises(transfer.TransferError, match=r"b\.bin had sha256 .* the copy has"):
        transfer.publish(source, location(tmp_path / "out"), "key", rot)
    assert not (tmp_path / "out").exists()
    transfer.publish(source, location(tmp_path / "out"), "key")
    assert contents(tmp_path / "out").items() >= contents(source).items()


def test_a_rotten_beginning_of_a_broken_copy_is_an_error(source: Path, tmp_path: Path) -> None:
    class BrokenError(OSError):
        pass

    def breaking(done: int, _: int) -> None:
        if done > 2 << 20:
            raise BrokenError

    with pytest.raises(BrokenError):
        transfer.publish(source, location(tmp_path / "out"), "key", breaking)
    (copy,) = tmp_path.glob(".out.key.*.partial/deep/er/b.bin")
    with copy.open("r+b") as file:
        file.write(b"rotten")
    with pytest.raises(transfer.TransferError, match=r"b\.bin had sha256"):
        transfer.publish(source, location(tmp_path / "out"), "key")


def test_what_a_broken_copy_left_goes_as_a_whole_where_some_of_it_is_damaged(
    source: Path, tmp_path: Path
) -> None:
    left = broken(source, tmp_path / "copy")
    for path in (left / "a.txt", left / "deep" / "er" / "b.bin"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(transfer.TransferError, match=r"damaged: a\.txt had sha256 .*; it was deleted"):
        transfer.fetch(transfer.Hashing(location(source)), tmp_path / "copy")
    assert list(tmp_path.glob("*.partial")) == []
    transfer.fetch(transfer.Hashing(location(source)), tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(source)


def test_files_are_listed_by_path_and_links_are_followed(source: Path) -> None:
    (source / "link").symlink_to(source / "a.txt")
    listed = list(location(source).items())
    assert [item.path for item in listed] == ["a.txt", "deep/er/b.bin", "empty", "link"]
    assert listed[3].size == len(b"alpha")
    assert listed[3].version == listed[0].version
    (source / "lost").symlink_to(source / "nowhere")
    with pytest.raises(OSError, match="'lost' is a link that leads nowhere"):
        transfer.scan(location(source))


def test_a_protocol_that_nobody_knows_is_named() -> None:
    with pytest.raises(BadInputError, match=r"^run\.data: 'nope://x' cannot be opened"):
        Location.of("nope://x", "run.data")


def test_discarding_leaves_nothing(source: Path, tmp_path: Path) -> None:
    transfer.fetch(location(source), tmp_path / "staged" / "copy")
    transfer.discard(tmp_path / "staged" / "copy")
    assert list((tmp_path / "staged").iterdir()) == []


def test_what_this_run_did_not_write_is_never_replaced(source: Path, tmp_path: Path) -> None:
    """Files that somebody put there, a folder of theirs, or what they changed of an earlier export."""
    out = tmp_path / "out"
    for disturb in (
        lambda: (out / "weights.bin").write_bytes(b"theirs"),
        (out / "empty folder").mkdir,
        lambda: transfer.publish(source, location(out), "key") and (out / "a.txt").write_bytes(b"ALPHA"),
        lambda: transfer.publish(source, location(out), "key") and (out / "more").write_bytes(b"theirs"),
        lambda: transfer.publish(source, location(out), "another"),
    ):
        out.mkdir()
        disturb()
        before = contents(out)
        with pytest.raises(transfer.TransferError, match=r"this run did not write"):
            transfer.publish(source, location(out), "key")
        assert contents(out) == before
        assert sorted(path.name for path in tmp_path.iterdir() if "before" in path.name) == []
        shutil.rmtree(out)


@pytest.mark.parametrize("outside", ["{}/precious", "../precious"])
def test_a_manifest_that_names_what_is_outside_of_the_output_deletes_nothing(
    source: Path, tmp_path: Path, outside: str
) -> None:
    (tmp_path / "precious").write_bytes(b"theirs")
    transfer.publish(source, location(tmp_path / "out"), "key")
    marker = tmp_path / "out" / "manifest.json"
    written = json.loads(marker.read_text())
    sha256 = hashlib.sha256(b"theirs").hexdigest()
    written["files"].append({"path": outside.format(tmp_path), "size": 6, "sha256": sha256})
    marker.write_text(json.dumps(written))
    with pytest.raises(transfer.TransferError, match=r"this run did not write"):
        transfer.publish(source, location(tmp_path / "out"), "key")
    assert (tmp_path / "precious").read_bytes() == b"theirs"
    assert contents(tmp_path / "out").items() >= contents(source).items()


def test_what_comes_while_a_model_is_published_is_kept(source: Path, tmp_path: Path) -> None:
    def meanwhile(*_: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "theirs").write_bytes(b"theirs")

    with pytest.raises(transfer.TransferError, match=r"holds theirs, which this run did not write"):
        transfer.publish(source, location(tmp_path / "out"), "key", meanwhile)
    assert contents(tmp_path / "out") == {"theirs": b"theirs"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    copied: list[int] = []
    with pytest.raises(transfer.TransferError, match=r"holds theirs, which this run did not write"):
        transfer.publish(source, location(tmp_path / "out"), "key", lambda done, _: copied.append(done))
    assert not copied
    (tmp_path / "out" / "theirs").unlink()
    transfer.publish(source, location(tmp_path / "out"), "key")
    assert contents(tmp_path / "out").items() >= contents(source).items()


def test_a_killed_replacement_is_made_up_for(source: Path, tmp_path: Path) -> None:
    """Between the two renames the earlier export has a name of its own; the next try gives it back first."""
    transfer.publish(source, location(tmp_path / "out"), "key")
    (tmp_path / "out").rename(tmp_path / ".out.key.before")
    (source / "a.txt").write_bytes(b"newer")
    transfer.publish(source, location(tmp_path / "out"), "key")
    assert contents(tmp_path / "out")["a.txt"] == b"newer"
    assert [path.name for path in tmp_path.iterdir() if path != source] == ["out"]


@pytest.mark.parametrize("theirs", ["folder", "file"])
def test_an_earlier_export_is_kept_where_something_else_took_its_place(
    source: Path, tmp_path: Path, theirs: str
) -> None:
    """A replacement was killed between its two renames, and others wrote to the destination since."""
    out, before = tmp_path / "out", tmp_path / ".out.key.before"
    transfer.publish(source, location(out), "key")
    out.rename(before)
    kept = contents(before)
    if theirs == "folder":
        out.mkdir()
    path = out / "model" if theirs == "folder" else out
    path.write_bytes(b"theirs")
    (tmp_path / "partial").mkdir()
    with pytest.raises(transfer.TransferError) as caught:
        destination.put(tmp_path / "partial", out, "key")
    assert str(out) in str(caught.value)
    assert str(before) in str(caught.value)
    assert contents(before) == kept
    assert path.read_bytes() == b"theirs"


def test_what_came_and_went_while_an_export_was_replaced_is_no_success(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in the way of the new export, and gone when the earlier one came back."""
    out, rename, tries = tmp_path / "out", destination._rename, []  # noqa: SLF001
    transfer.publish(source, location(out), "key")
    (source / "a.txt").write_bytes(b"newer")

    def with_somebody(folder: Path, to: Path) -> bool:
        tries.append(folder)
        return len(tries) != 2 and rename(folder, to)

    monkeypatch.setattr(destination, "_rename", with_somebody)
    with pytest.raises(transfer.TransferError, match=r"something came to .* and went"):
        transfer.publish(source, location(out), "key")
    assert contents(out)["a.txt"] != b"newer"
    transfer.publish(source, location(out), "key")
    assert contents(out)["a.txt"] == b"newer"


def test_an_earlier_export_comes_back_where_only_a_report_took_its_place(
    source: Path, tmp_path: Path
) -> None:
    out, before = tmp_path / "out", tmp_path / ".out.key.before"
    transfer.publish(source, location(out), "key")
    out.rename(before)
    out.mkdir()
    (out / "report.json").write_text('{"key": "key", "state": "failed"}')
    (source / "a.txt").write_bytes(b"newer")
    transfer.publish(source, location(out), "key")
    assert contents(out)["a.txt"] == b"newer"
    assert not before.exists()


def test_a_link_to_a_folder_is_a_destination_too(source: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    transfer.publish(source, location(tmp_path / "out"), "key")
    assert (tmp_path / "out").is_symlink()
    assert contents(tmp_path / "real").items() >= contents(source).items()


@pytest.fixture
def bucket() -> Iterator[Any]:
    memory = fsspec.filesystem("memory")
    yield memory
    if memory.exists("/models"):
        memory.rm("/models", recursive=True)


def at(memory: Any) -> dict[str, bytes]:
    return {path.removeprefix("/models/qa/"): memory.cat_file(path) for path in memory.find("/models/qa")}


@pytest.mark.parametrize("name", ["weights.bin", "a.txt", "manifest.json", "report.json"])
def test_foreign_files_behind_a_url_are_left_alone(source: Path, bucket: Any, name: str) -> None:
    bucket.pipe(f"/models/qa/{name}", b"theirs")
    with pytest.raises(transfer.TransferError, match=rf"holds {name}, which this run did not write"):
        transfer.publish(source, Location.of("memory://models/qa", "run.output"), "key")
    assert at(bucket) == {name: b"theirs"}


def test_a_file_that_comes_while_others_are_uploaded_is_left_alone(source: Path, bucket: Any) -> None:
    def meanwhile(*_: int) -> None:
        bucket.pipe("/models/qa/empty", b"theirs")

    with pytest.raises(transfer.TransferError, match=r"holds empty, which this run did not write"):
        transfer.publish(source, Location.of("memory://models/qa", "run.output"), "key", meanwhile)
    assert at(bucket)["empty"] == b"theirs"


def test_a_broken_upload_goes_on(source: Path, bucket: Any) -> None:
    bucket.pipe({"/models/qa/a.txt": b"alp", "/models/qa/empty": b""})
    transfer.publish(source, Location.of("memory://models/qa", "run.output"), "key")
    assert at(bucket).items() >= contents(source).items()


def test_publishing_to_a_url_again_replaces_all_that_this_run_published(source: Path, bucket: Any) -> None:
    there = Location.of("memory://models/qa", "run.output")
    transfer.publish(source, there, "key")
    (source / "a.txt").unlink()
    (source / "empty").write_bytes(b"no longer")
    manifest = transfer.publish(source, there, "key")
    found = at(bucket)
    assert transfer.Manifest.parse(found.pop("manifest.json").decode()) == (manifest, "key")
    assert found == contents(source)


def test_an_export_of_another_run_is_left_alone_whosever_report_is_beside_it(
    source: Path, bucket: Any
) -> None:
    there = Location.of("memory://models/qa", "run.output")
    transfer.publish(source, there, "another")
    there.write_text("report.json", json.dumps({"key": "key", "state": "failed"}))
    before = at(bucket)
    (source / "a.txt").write_bytes(b"newer")
    with pytest.raises(transfer.TransferError, match=r"this run did not write"):
        transfer.publish(source, there, "key")
    assert at(bucket) == before


def test_a_broken_upload_goes_on_if_the_program_kept_the_manifest_of_another_run(
    source: Path, tmp_path: Path, bucket: Any
) -> None:
    """It fine-tuned an earlier export, and saved its model over a copy of that."""
    transfer.publish(source, location(tmp_path / "base"), "another")
    output, there = tmp_path / "base", Location.of("memory://models/qa", "run.output")
    (output / "a.txt").write_bytes(b"newer")
    bucket.pipe("/models/qa/a.txt", b"newer")
    bucket.pipe("/models/qa/manifest.json", (output / "manifest.json").read_bytes())
    there.write_text("report.json", json.dumps({"key": "key", "state": "running"}))
    transfer.publish(output, there, "key")
    assert at(bucket).items() >= contents(output).items()


@pytest.mark.parametrize(
    ("edit", "missing", "with_sizes"),
    [
        (Path.exists, None, None),
        (lambda file: file.write_bytes(b"edited"), None, "a.txt has 6 bytes, and 5 were exported"),
        (lambda file: file.unlink(), "a.txt is gone", "a.txt is gone"),
    ],
    ids=["whole", "edited", "gone"],
)
def test_what_an_export_lacks_is_named(
    tmp_path: Path, edit: Callable[[Path], object], missing: str | None, with_sizes: str | None
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    (source / "empty").mkdir(parents=True)
    (source / "a.txt").write_bytes(b"alpha")
    exported = transfer.publish(source, Location.of(str(out), "run.output"), "key")
    edit(out / "a.txt")
    there = Location.of(str(out), "run.output")
    assert transfer.why_not_exported(there, exported.digest, sizes=False) == missing
    assert transfer.why_not_exported(there, exported.digest) == with_sizes
    assert transfer.why_not_exported(there, "of another") == "its manifest.json is of another model"
