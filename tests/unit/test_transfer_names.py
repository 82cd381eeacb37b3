"""What of a folder is kept, whatever its names are, and what is refused before anything is trained."""

import json
import os
import socket
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import fsspec
import pytest
from support.folder_contents import contents, location
from support.helper_process import pod
from support.web_server import served

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.listing import Item, OddFileError, Rows
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.pod import client
from manycpu.pipeline.pod.channel import RemoteError
from manycpu.pipeline.spec.errors import StageError
from manycpu.pipeline.targets.machines.context import is_on_machines
from manycpu.pipeline.targets.machines.stage import stage
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.transfer import TransferError
from manycpu.pipeline.verbs.preflight import preflight

NOT_UTF8 = os.fsdecode(b"caf\xe9.bin")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"alpha")
    return folder


@pytest.mark.parametrize("name", [".journal", "manifest.json", "x.partial", "a\nb", "a\\b", "'", NOT_UTF8])
def test_a_file_may_have_any_name(source: Path, tmp_path: Path, name: str) -> None:
    (source / name).write_bytes(b"mine")
    transfer.fetch(location(source), tmp_path / "copy")
    transfer.publish(source, location(tmp_path / "out"), "key")
    assert contents(tmp_path / "copy") == contents(source)
    assert contents(tmp_path / "out").items() >= contents(source).items()
    assert len(contents(tmp_path / "out")) == 3


def test_no_name_makes_a_folder_look_like_another(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    for name in "xy":
        (two / name).write_bytes(b"same")
    sha256 = next(iter(transfer.scan(location(two)).files)).sha256
    (one / f"x\n{sha256}  y").write_bytes(b"same")
    assert transfer.scan(location(one)).digest != transfer.scan(location(two)).digest
    (one / f"x\n{sha256}  y").rename(one / "x\\n")
    escaped = transfer.scan(location(one)).digest
    (one / "x\\n").rename(one / "x\n")
    assert transfer.scan(location(one)).digest != escaped


@pytest.mark.parametrize("member", ["../../victim", "a/../../victim"])
def test_an_archive_writes_nothing_outside_of_its_folder(tmp_path: Path, member: str) -> None:
    (tmp_path / "data").mkdir()
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        archive.writestr("good.txt", "good")
        archive.writestr(member, "bad")
    packed = Location.of(f"zip://::file://{tmp_path}/set.zip", "run.data")
    with pytest.raises(OddFileError, match="victim' leads out of its folder"):
        transfer.fetch(packed, tmp_path / "data" / "copy")
    assert [path.name for path in tmp_path.rglob("victim*")] == []


def test_a_models_own_manifest_is_kept_and_ours_is_beside_it(source: Path, tmp_path: Path) -> None:
    (source / "manifest.json").write_text("{}")
    published = transfer.publish(source, location(tmp_path / "out"), "key")
    assert (tmp_path / "out" / "manifest.json").read_text() == "{}"
    assert transfer.Manifest.read(tmp_path / "out" / "manifest.manycpu.json") == published


@pytest.mark.parametrize("where", ["disk", "url"])
def test_a_models_own_report_is_kept_beside_the_runs(source: Path, tmp_path: Path, where: str) -> None:
    (source / "report.json").write_text("{}")
    out = tmp_path / "out" if where == "disk" else "dir://out::file://" + str(tmp_path)
    transfer.publish(source, Location.of(str(out), "run.output"), "key")
    assert contents(tmp_path / "out").keys() == {"a.txt", "manifest.json", "report.program.json"}
    assert "report.program.json" in (tmp_path / "out" / "manifest.json").read_text()


@pytest.mark.parametrize("where", ["disk", "url"])
@pytest.mark.parametrize("kind", ["file", "folder", "empty folder"])
def test_all_that_a_program_wrote_is_kept_whatever_it_is_called(
    source: Path, tmp_path: Path, kind: str, where: str
) -> None:
    names = ("manifest.json", "manifest.manycpu.json", "report.json", "report.program.json")
    for name in names:
        if kind != "file":
            (source / name).mkdir()
        if kind != "empty folder":
            (source / name / "x" if kind == "folder" else source / name).write_text(f"my {name}")
    out = Location.of(
        str(tmp_path / "out") if where == "disk" else f"dir://out::file://{tmp_path}", "run.output"
    )
    for _ in range(2):
        manifest = transfer.publish(source, out, "key")
        found = contents(tmp_path / "out")
        assert sorted(found.values(), key=len)[:-1] == sorted(contents(source).values(), key=len)
        assert not transfer.strangers(out, "key")
        assert sorted(path for path in found if "{" not in found[path].decode()) == [
            file.path for file in sorted(manifest.files) if not file.path.endswith("/")
        ]


def test_a_link_to_a_folder_is_what_it_leads_to(source: Path, tmp_path: Path) -> None:
    (source / "step-500").mkdir()
    (source / "step-500" / "model.bin").write_bytes(b"weights")
    (source / "latest").symlink_to("step-500")
    transfer.fetch(location(source), tmp_path / "copy")
    transfer.publish(source, location(tmp_path / "out"), "key")
    for place in ("copy", "out"):
        assert (tmp_path / place / "latest" / "model.bin").read_bytes() == b"weights"
        assert not (tmp_path / place / "latest").is_symlink()


def test_empty_folders_and_what_is_executable_are_kept_and_told_apart(source: Path, tmp_path: Path) -> None:
    before = transfer.identity(location(source))
    (source / "class_2" / "none").mkdir(parents=True)
    folders = transfer.identity(location(source))
    (source / "a.txt").chmod(0o755)
    assert len({before, folders, transfer.identity(location(source))}) == 3
    transfer.fetch(location(source), tmp_path / "copy")
    transfer.publish(source, location(tmp_path / "out"), "key")
    for place in ("copy", "out"):
        assert (tmp_path / place / "class_2" / "none").is_dir()
        assert (tmp_path / place / "a.txt").stat().st_mode & 0o100


def test_a_folder_without_files_is_stored_and_waits_for_no_lock_of_its_own(tmp_path: Path) -> None:
    """It waited ten minutes for itself: the digests of its list and of its content are the same."""
    (tmp_path / "source").mkdir()
    for reused in (False, True):
        stored = transfer.store(location(tmp_path / "source"), tmp_path / "data", lambda: "")
        assert (contents(stored.path), stored.reused) == ({}, reused)


@pytest.mark.parametrize("text", ["", "{", '{"files": 3}', '{"files": [3]}', '{"files": [\n', "\udcff"])
def test_a_broken_marker_breaks_nothing_but_is_not_trusted(source: Path, tmp_path: Path, text: str) -> None:
    place = transfer.store(location(source), tmp_path / "data", lambda: "").path
    marker = place.with_name(f"{place.name}.manifest.json")
    marker.write_text(text, errors="surrogateescape")
    (place / "a.txt").write_bytes(b"spoiled")
    digest = transfer.scan(location(source)).digest
    again = transfer.store(location(source), tmp_path / "data", lambda: digest)
    assert (again.path, again.reused) == (place, False)
    assert contents(place) == contents(source)


def test_a_marker_of_an_earlier_version_is_read(source: Path, tmp_path: Path) -> None:
    place = transfer.fetch(location(source), tmp_path / "copy").path
    marker = place.with_name(f"{place.name}.manifest.json")
    marker.write_text(
        json.dumps({"files": [file.json_fields() for file in transfer.scan(location(source)).files]})
    )
    assert transfer.fetch(location(source), tmp_path / "copy").reused


@pytest.mark.parametrize("url", ["{}", "file://{}"])
def test_colons_in_a_path_are_no_chain_of_protocols(source: Path, tmp_path: Path, url: str) -> None:
    (tmp_path / "source::v2").mkdir()
    (tmp_path / "source::v2" / "b.txt").write_bytes(b"beta")
    there = Location.of(url.format(tmp_path / "source::v2"), "run.data")
    transfer.fetch(there, tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"b.txt": b"beta"}
    transfer.publish(source, Location.of(url.format(tmp_path / "out::1"), "run.output"), "key")
    assert (tmp_path / "out::1" / "a.txt").exists()
    assert not (tmp_path / "out").exists()


def test_a_chain_that_cannot_be_opened_is_bad_input_and_its_password_a_secret(tmp_path: Path) -> None:
    url = "zip://x::http://bob:hunter2secret@127.0.0.1:1/n.zip"
    run = {"program": "question_answering", "data": url, "output": url}
    ctx = open_context(run, {"kind": "local", "directory": str(tmp_path / "home")}, "chain", base=tmp_path)
    found = {finding.field: finding for finding in preflight(ctx)}
    for field in ("run.data", "run.output"):
        assert found[field].fatal
        assert "hunter2secret" not in str(found[field])


@contextmanager
def one_file(
    content: list[bytes], header: str, before_reading: Callable[[], None] = lambda: None
) -> Iterator[Location]:
    """Serve a file over HTTP, whose version stands in a header."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content[0])))
            if header:
                self.send_header(header, content[0].decode())
            self.end_headers()

        def do_GET(self) -> None:
            before_reading()
            self.do_HEAD()
            self.wfile.write(content[0])

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as host:
        yield Location.of(f"http://{host}/train.csv", "run.data")


@pytest.mark.parametrize("header", ["", "ETag", "Last-Modified"])
def test_other_content_of_the_same_size_behind_http_is_another_data_set(header: str) -> None:
    content = [b"label,0"]
    with one_file(content, header) as there:
        before = transfer.identity(there)
        assert transfer.identity(there) == before
        content[0] = b"label,1"
        assert transfer.identity(there) != before


def staged_here(there: Location, folder: Path) -> None:
    run = {"program": "question_answering", "data": there.url, "output": None}
    ctx = open_context(run, {"kind": "local", "directory": str(folder.parent)}, "set", base=folder.parent)
    assert is_on_machines(ctx)
    stage(ctx, {"data": there.url}, lambda *_: None)


def staged_by_a_pod(there: Location, folder: Path) -> None:
    with pod("fetch") as (channel, _):
        client.ask(channel, url=there.url, folder=str(folder), field="run.data")


@pytest.mark.parametrize("fetch", [staged_here, staged_by_a_pod])
@pytest.mark.parametrize("header", ["", "ETag"])
def test_a_set_behind_a_url_that_is_replaced_while_it_is_fetched_is_refused(
    tmp_path: Path, fetch: Callable[[Location, Path], None], header: str
) -> None:
    content, folder = [b"label,0"], tmp_path / "data"

    def replace() -> None:
        if any(folder.glob("*.partial")):
            content[0] = b"label,1"

    with one_file(content, header, replace) as there:
        with pytest.raises((StageError, RemoteError), match="it changed while it was copied"):
            fetch(there, folder)
        assert [path for path in folder.iterdir() if path.name[0] != "."] == []
        fetch(there, folder)
    assert b"label,1" in contents(folder).values()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _loop(path: Path) -> None:
    path.symlink_to("..")


def _nowhere(path: Path) -> None:
    path.symlink_to("nowhere")


ODD = pytest.mark.parametrize(
    ("make", "said"),
    [
        (_fifo, "is a FIFO"),
        (_socket, "is a socket"),
        (_loop, "is a link to a folder that it is in itself"),
        (_nowhere, "is a link that leads nowhere"),
    ],
)


@ODD
def test_what_cannot_be_copied_is_refused_by_preflight_and_by_name(
    source: Path, tmp_path: Path, make: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (source / "deep").mkdir()
    make(source / "deep" / "odd")  # type: ignore[operator]
    run = {"program": "question_answering", "data": str(source), "output": str(tmp_path / "out")}
    ctx = open_context(run, {"kind": "local", "directory": str(tmp_path / "home")}, "odd", base=tmp_path)
    found = [finding for finding in preflight(ctx) if finding.field == "run.data"]
    assert any(finding.fatal and f"'deep/odd' {said}" in finding.message for finding in found)


@ODD
def test_what_is_no_file_in_an_output_costs_no_model(
    source: Path, tmp_path: Path, make: object, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    (source / "deep").mkdir()
    make(source / "deep" / "odd")  # type: ignore[operator]
    manifest = transfer.publish(source, location(tmp_path / "out"), "key")
    assert [file.path for file in manifest.files] in (["a.txt"], ["a.txt", "deep/"])
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"alpha"
    assert f"'deep/odd' in the output {said}" in caplog.text


def test_what_becomes_a_fifo_after_it_was_listed_is_not_waited_for(source: Path, tmp_path: Path) -> None:
    (source / "b.txt").write_bytes(b"beta")

    def meanwhile(*_: int) -> None:
        if (source / "b.txt").is_file():
            (source / "b.txt").unlink()
            os.mkfifo(source / "b.txt")

    with pytest.raises((OSError, TransferError), match="is no regular file"):
        transfer.fetch(location(source), tmp_path / "copy", meanwhile)


def test_a_name_that_is_not_utf8_reaches_a_url_as_python_writes_it(source: Path) -> None:
    (source / NOT_UTF8).write_bytes(b"mine")
    memory = fsspec.filesystem("memory")
    try:
        transfer.publish(source, Location.of("memory://models/qa", "run.output"), "key")
        assert memory.cat_file("/models/qa/caf\\xe9.bin") == b"mine"
    finally:
        memory.rm("/models", recursive=True)


@pytest.mark.parametrize("url", ["memory://nowhere", "http://127.0.0.1:9/set"])
def test_a_url_with_nothing_behind_it_is_no_data_set(url: str) -> None:
    with pytest.raises(FileNotFoundError, match="nothing at"):
        transfer.identity(Location.of(url, "run.data"))


@pytest.mark.parametrize("item", [Item("a\0b", 1, "c"), Item("a", 1, "a\0b")])
def test_the_text_with_a_nul_is_named(item: Item) -> None:
    with pytest.raises(ValueError, match=r"there is a NUL in 'a\\x00b'"):
        Rows(Item, [item])
