"""Data behind a web server: a file is data, a page that lists files is not."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any, cast

import pytest
from support.helper_process import pod
from support.web_server import served

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.pod import client
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.verbs.preflight import preflight

Type = Callable[..., tuple[int, str]]
SAYS = """
import os, pathlib
print(os.environ["MANYCPU_DATA"])
pathlib.Path(os.environ["MANYCPU_OUTPUT"], "model").write_bytes(open(os.environ["MANYCPU_DATA"], "rb").read())
"""
pytestmark = pytest.mark.usefixtures("home")


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, as `python -m http.server` does."""

    def log_message(self, *_: Any) -> None:
        pass


class Whole(Quiet):
    """Sends whole files only, as `python -m http.server` does, and breaks off after some bytes."""

    accept_ranges: str | None = None
    limit: int | None = None

    def end_headers(self) -> None:
        if self.accept_ranges:
            self.send_header("Accept-Ranges", self.accept_ranges)
        super().end_headers()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with suppress(OSError):  # the client has read enough
            outputfile.write(source.read(self.limit))


class Silent(BaseHTTPRequestHandler):
    """Refuses everything."""

    def do_HEAD(self) -> None:
        self.send_error(503)

    do_GET = do_HEAD  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def host(tmp_path: Path) -> Iterator[str]:
    """Serve a folder with a data set."""
    folder = tmp_path / "www" / "set"
    folder.mkdir(parents=True)
    (folder / "train.csv").write_text("1,2\n")
    (folder / "a b.csv").write_text("1,2\n")
    (folder / "page.html").write_text("<p>text to train on</p>")
    (tmp_path / "www" / "set.zip").write_bytes(b"PK")
    handler = cast("type[BaseHTTPRequestHandler]", partial(Quiet, directory=str(tmp_path / "www")))
    with served(handler) as address:
        yield f"http://{address}"


@pytest.mark.parametrize("path", ["", "/", "/set", "/set/"])
def test_a_list_of_files_is_no_data_set(
    manycpu: Type, script: Callable[..., str], tmp_path: Path, host: str, path: str
) -> None:
    url, home = host + path, tmp_path / "copy"
    with pytest.raises(OSError, match="is a web page, such as a list of files"):
        transfer.identity(Location.of(url, "run.data"))
    with pytest.raises(OSError, match="is a web page, such as a list of files"):
        transfer.fetch(Location.of(url, "run.data"), home / "set")
    assert [path.name for path in home.rglob("*") if not path.name.endswith(".lock")] == []
    words = ["--program", script(), "--data", url, "--output", str(tmp_path / "out"), "--nproc-per-node", "1"]
    code, printed = manycpu("preflight", *words)
    assert (code, f"run.data: {url} is a web page" in printed) == (2, True), printed


def test_a_page_that_this_machine_gets_for_data_of_pods_is_a_warning(tmp_path: Path, host: str) -> None:
    (tmp_path / "train.py").touch()
    run = {"program": "train.py", "data": f"{host}/set/", "output": None}
    target = {"kind": "kubernetes", "connection": str(tmp_path / "none"), "image": "registry.example/train:1"}
    found = preflight(open_context(run, target, "test", base=tmp_path))
    (page,) = [each for each in found if each.field == "run.data"]
    assert page.message.startswith(f"from here, {host}/set/ is a web page")
    assert not page.fatal


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("{}/set/train.csv", "train.csv"),
        ("{}/set/train.csv?version=2", "train.csv"),
        ("{}/set/a%20b.csv", "a b.csv"),
        ("simplecache::{}/set.zip?sig=s3/cr3t", "set.zip"),
        ("{}/set/page.html", "page.html"),
        ("{}/set.zip", "set.zip"),
    ],
)
def test_a_file_is_data(
    manycpu: Type, script: Callable[..., str], tmp_path: Path, host: str, url: str, name: str
) -> None:
    url = url.format(host)
    transfer.fetch(Location.of(url, "run.data"), tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == [name]
    words = ["--program", script(), "--data", url, "--output", str(tmp_path / "out"), "--nproc-per-node", "1"]
    code, printed = manycpu("preflight", *words)
    assert code == 0, printed


@pytest.mark.parametrize("path", ["?file=train.csv", "..?x", "%2E", "a%2Fb", "..%2Fb", "a%00b"])
def test_a_file_whose_url_has_no_name_that_fits_gets_one(path: str) -> None:
    assert Location.of(f"https://host/{path}", "run.data").name == "download"


@pytest.mark.usefixtures("light_torch")
def test_a_signature_is_in_no_name_and_no_file_of_a_run(
    manycpu: Type, script: Callable[..., str], tmp_path: Path, home: Path, host: str
) -> None:
    words = ["--program", script(SAYS), "--data", f"{host}/set/train.csv?sig=s3/cr3t"]
    code, printed = manycpu("run", *words, "--output", str(tmp_path / "out"), "--nproc-per-node", "1")
    assert (code, "train.csv\n" in printed, "cr3t" in printed) == (0, True, False), printed
    assert (tmp_path / "out" / "model").read_text() == "1,2\n"
    paths = [*home.rglob("*"), *(tmp_path / "out").rglob("*")]
    assert not [path for path in paths if "cr3t" in path.name]
    assert not [path for path in paths if path.is_file() and b"cr3t" in path.read_bytes()]


def test_a_pod_names_a_file_without_its_signature(tmp_path: Path, host: str) -> None:
    with pod("fetch") as (channel, _):
        url = f"{host}/set/train.csv?sig=s3/cr3t"
        done = client.ask(channel, url=url, folder=str(tmp_path / "data"), field="run.data")
    assert Path(done["path"]).name == "train.csv"
    assert Path(done["path"]).read_text() == "1,2\n"


def test_a_file_that_a_server_does_not_have_is_refused_by_preflight(
    manycpu: Type, script: Callable[..., str], tmp_path: Path, host: str
) -> None:
    url = f"{host}/set/mistyped.csv"
    words = ["--program", script(), "--data", url, "--output", str(tmp_path / "out"), "--nproc-per-node", "1"]
    code, printed = manycpu("preflight", *words)
    assert (code, f"run.data: there is nothing at {url}. " in printed) == (2, True), printed


def test_a_server_that_does_not_answer_is_looked_at_when_data_is_staged(
    manycpu: Type, script: Callable[..., str], tmp_path: Path
) -> None:
    with served(Silent) as address:
        words = ["--program", script(), "--data", f"http://{address}/set", "--output", str(tmp_path / "out")]
        code, printed = manycpu("preflight", *words, "--nproc-per-node", "1")
    assert code == 0, printed


@pytest.mark.parametrize("accept_ranges", [None, "none"])
def test_a_large_file_of_a_server_that_sends_only_whole_files_is_staged_also_after_a_break(
    tmp_path: Path, accept_ranges: str | None
) -> None:
    large = os.urandom(10 << 20)  # more than a request of fsspec asks for
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "large").write_bytes(large)
    made = type("Handler", (Whole,), {"accept_ranges": accept_ranges, "limit": 9 << 20})
    whole = cast("type[Whole]", made)
    handler = cast("type[BaseHTTPRequestHandler]", partial(whole, directory=str(tmp_path / "www")))
    with served(handler) as address:
        source = Location.of(f"http://{address}/large", "run.data")
        with pytest.raises(Exception, match="payload is not completed"):
            transfer.fetch(source, tmp_path / "copies" / "copy")
        (kept,) = tmp_path.glob("copies/copy.*.partial/large")
        inode = kept.stat().st_ino
        whole.limit = None
        transfer.fetch(source, tmp_path / "copies" / "copy")
    copy = tmp_path / "copies" / "copy" / "large"
    assert copy.read_bytes() == large
    assert copy.stat().st_ino == inode  # resumed
