"""Data, model and output on S3, on a real server: credentials, odd keys, refusals and broken connections."""

import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from itertools import chain, count
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support import s3_server
from support.folder_contents import contents
from support.rank_launches import free_port
from support.s3_server import KEY, SECRET, Proxy, Server
from support.web_server import served

from manycpu.pipeline import transfer
from manycpu.pipeline.adapters import storage
from manycpu.pipeline.adapters.listing import OddFileError
from manycpu.pipeline.adapters.storage import Location
from manycpu.pipeline.spec.errors import BadInputError
from manycpu.pipeline.targets.open_run import open_context
from manycpu.pipeline.transfer.claims import Claimant, ClaimedError
from manycpu.pipeline.verbs import preflight

Type = Callable[..., tuple[int, str]]
Script = Callable[..., str]
pytestmark = pytest.mark.usefixtures("home", "light_torch", "alone_in_its_environment")
PART = 5 << 20  # the least that S3 allows
TRAINS = """
import os, pathlib
data, model, out = (pathlib.Path(os.environ[f"MANYCPU_{name}"]) for name in ("DATA", "MODEL", "OUTPUT"))
(out / "deep").mkdir()
(out / "deep" / "learnt ü.bin").write_bytes((model / "weights.bin").read_bytes() + data.read_bytes())
(out / "empty").touch()
"""
WRITES = f"""
import os, pathlib
out = pathlib.Path(os.environ["MANYCPU_OUTPUT"])
(out / "large.bin").write_bytes(os.urandom({5 * PART // 2}))
(out.parent.parent / "trained.txt").open("a").write("once ")
"""
WRITES_TWO = """
import os, pathlib
out = pathlib.Path(os.environ["MANYCPU_OUTPUT"])
(out / "first").write_text("1")
(out / "second").write_text("2")
open({trained!r}, "a").write("once ")
"""
PIPELINE = """
from airflow.sdk import dag
from manycpu.operators import training_pipeline

@dag(schedule=None)
def own():
    training_pipeline(run={run!r}, default_args={{"retries": 0}})

own()
"""
FETCHES = """
import sys, pathlib
from manycpu.pipeline import transfer
from manycpu.pipeline.adapters.storage import Location
transfer.fetch(Location.of(sys.argv[1], "run.data"), pathlib.Path(sys.argv[2]))
"""
_numbers = count(1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with s3_server.running(tmp_path_factory.mktemp("plain")) as server:
        yield server


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with s3_server.running(tmp_path_factory.mktemp("secure"), with_tls=True) as server:
        yield server


@pytest.fixture
def proxy(plain: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Put a proxy between the server and this process, whose requests are tried a few times."""
    with s3_server.proxy(plain) as made:
        use(made.server, monkeypatch)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # of botocore
        # s3fs tries five times, with growing pauses.
        monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 2)
        yield made


@pytest.fixture
def alone_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep credentials of this machine, and file systems of other tests, out of a test."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    cached = fsspec.get_filesystem_class("s3")
    cached.clear_instance_cache()
    yield
    cached.clear_instance_cache()


def use(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.variables.items():
        monkeypatch.setenv(name, value)


def bucket(server: Server, files: dict[str, bytes] | None = None) -> str:
    """Make a bucket with some files; return its name."""
    name = f"bucket-{next(_numbers)}"
    client = server.client()
    client.mkdir(name)
    for key, content in (files or {}).items():
        client.pipe_file(f"{name}/{key}", content)
    return name


def objects(server: Server, folder: str) -> dict[str, bytes]:
    client = server.client()
    return {path.removeprefix(f"{folder}/"): client.cat_file(path) for path in client.find(folder)}


def uploads(server: Server, name: str) -> list[Any]:
    """List the multipart uploads that were neither completed nor aborted."""
    found: list[Any] = server.client().list_multipart_uploads(name)
    return found


def there(url: str) -> Location:
    return Location.of(url, "run.data")


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": PART})


def test_an_output_in_that_of_a_run_that_trains_is_refused(
    plain: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That run would find its output taken, after the whole of its training."""
    use(plain, monkeypatch)
    name = bucket(plain, {"models/of-before": b""})

    def claim(folder: str, key: str) -> None:
        transfer.claim(Location.of(f"s3://{name}/{folder}", "run.output"), Claimant(key, f"run-{key}"))

    claim("models/qa", "aaaaaaaaaa")
    with pytest.raises(ClaimedError, match=rf"another run has {name}/models/qa: run-aaaaaaaaaa"):
        claim("models/qa/deep/v2", "bbbbbbbbbb")
    for folder in ("models/qa2", "models/v2", "models"):  # a run refuses the last one because of its files
        claim(folder, "cccccccccc")


@pytest.mark.parametrize("following", ["", "<NextContinuationToken>x</NextContinuationToken>"])
def test_a_list_that_does_not_end_is_an_error_and_needs_no_etags(
    monkeypatch: pytest.MonkeyPatch, following: str
) -> None:
    """Servers that speak a part of S3's protocol only."""
    entry = "<Contents><Key>set/t.txt</Key><Size>1</Size></Contents>"

    class Lists(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = f"<R><IsTruncated>true</IsTruncated>{entry}{following}</R>".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    with served(Lists) as host:
        for name, value in {
            "ENDPOINT_URL": f"http://{host}",
            "ACCESS_KEY_ID": "a",
            "SECRET_ACCESS_KEY": "b",
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        listed = Location.of("s3://bucket/set", "run.data")._s3_objects()  # noqa: SLF001 - of no ended list
        assert next(listed) == ("bucket/set/t.txt", {"size": 1, "ETag": None})
        with pytest.raises(OSError, match="is cut, and it names no further page"):
            list(listed)


def test_a_login_and_a_server_count_as_they_are_now(
    plain: Server, secure: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook names another server, or keys are replaced while a training runs."""
    use(plain, monkeypatch)
    output = f"s3://{bucket(plain, {'model': b'1'})}"
    ctx = open_context({"program": "-m x", "output": output}, None, "test", base=tmp_path)
    assert ctx.output.has("model")
    use(secure, monkeypatch)
    assert not ctx.output.has("model")
    use(plain, monkeypatch)
    logins = tmp_path / "logins"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(logins))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for key in ("over", KEY):
        logins.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {SECRET}\n")
        with nullcontext() if key == KEY else pytest.raises(PermissionError):
            assert ctx.output.has("model")


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.long), "secure"])
def test_data_model_and_output_of_a_run_are_on_s3(
    manycpu: Type,
    script: Script,
    kind: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server: Server = request.getfixturevalue(kind)
    use(server, monkeypatch)
    name = bucket(server, {"set/train.txt": b"data", "base/weights.bin": b"model, "})
    words = ["--program", script(TRAINS), "--data", f"s3://{name}/set/train.txt", "--nproc-per-node", "1"]
    words += ["--model", f"s3://{name}/base", "--output", f"s3://{name}/out"]
    code, printed = manycpu("run", *words, "--run-id", "first")
    assert code == 0, printed
    found = objects(server, f"{name}/out")
    report, manifest = (json.loads(found.pop(f"{each}.json")) for each in ("report", "manifest"))
    assert b"[rank 0 " in found.pop("run.log")
    assert found == {"deep/learnt ü.bin": b"model, data", "empty": b""}
    assert {file["path"]: file["sha256"] for file in manifest["files"]} == {
        path: hashlib.sha256(content).hexdigest() for path, content in found.items()
    }
    assert report["state"] == "succeeded"
    assert manycpu("report", f"s3://{name}/out", "--html", str(tmp_path / "shown.html"))[0] == 0
    code, printed = manycpu("run", *words, "--run-id", "second")
    assert (code, f"s3://{name}/out is not empty: another run, " in printed) == (2, True), printed
    assert objects(server, f"{name}/out").keys() == {*found, "report.json", "manifest.json", "run.log"}
    assert manycpu("run", *words, "--run-id", "first")[0] == 0


def test_a_server_is_trusted_by_its_authority(secure: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    name = bucket(secure, {"set/a.txt": b"alpha"})
    use(secure, monkeypatch)
    monkeypatch.delenv("AWS_CA_BUNDLE")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(Exception, match="certificate verify failed"):
        transfer.identity(there(f"s3://{name}/set"))


KEYS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
OF_FSSPEC = {"FSSPEC_S3_KEY": KEY, "FSSPEC_S3_SECRET": SECRET, "FSSPEC_S3_ENDPOINT_URL": "URL"}


@pytest.fixture
def profile(plain: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give AWS' configuration a profile, which is not its default."""
    text = f"aws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\nendpoint_url = {plain.url}\n"
    (tmp_path / "config").write_text(f"[profile mine]\n{text}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


@pytest.mark.usefixtures("alone_in_its_environment", "profile")
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (KEYS | {"AWS_ENDPOINT_URL_S3": "URL"}, ""),
        ({"AWS_PROFILE": "mine"}, ""),
        ({"AWS_ENDPOINT_URL": "URL"}, "Unable to locate credentials"),
    ],
    ids=["variables", "profile", "nothing"],
)
def test_credentials_and_endpoint_come_from(
    plain: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, plain.url if value == "URL" else value)
    url = f"s3://{bucket(plain, {'set/a.txt': b'alpha'})}/set"
    with pytest.raises(Exception, match=said) if said else nullcontext():
        transfer.fetch(there(url), tmp_path / "copy")
    assert said or contents(tmp_path / "copy") == {"a.txt": b"alpha"}


@pytest.mark.usefixtures("alone_in_its_environment", "profile")
@pytest.mark.parametrize(
    ("variables", "login", "said"),
    [
        ({}, "mine@", ""),
        ({}, "other@", "config profile (other) could not be found"),
        # fsspec reads them as it is imported.
        (OF_FSSPEC, "", ""),
        pytest.param({"FSSPEC_S3": '{"profile": "mine"}'}, "", "", marks=pytest.mark.long),
    ],
    ids=["login", "unknown", "fsspec's variables", "fsspec's profile"],
)
def test_credentials_of_a_process_without_airflow_come_from(
    plain: Server, tmp_path: Path, variables: dict[str, str], login: str, said: str
) -> None:
    env = os.environ | {name: plain.url if value == "URL" else value for name, value in variables.items()}
    url = f"s3://{login}{bucket(plain, {'set/a.txt': b'alpha'})}/set"
    words = [sys.executable, "-c", FETCHES, url, str(tmp_path / "copy")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, said in done.stderr) == (int(bool(said)), True), done.stderr
    assert said or contents(tmp_path / "copy") == {"a.txt": b"alpha"}


def test_an_airflow_connection_is_a_login(
    run_dag: Callable[..., Any], plain: Server, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"endpoint_url": plain.url, "region_name": "us-east-1"}
    connection = {"conn_type": "aws", "login": KEY, "password": SECRET, "extra": extra}
    name = bucket(plain, {"set/train.txt": b"data", "base/weights.bin": b"model, "})
    fields = {"program": script(TRAINS), "data": f"s3://storage@{name}/set/train.txt", "nproc_per_node": 1}
    fields |= {"model": f"s3://storage@{name}/base", "output": f"s3://storage@{name}/out"}
    monkeypatch.setenv("AIRFLOW_CONN_STORAGE", json.dumps(connection))
    ran = run_dag("own", PIPELINE.format(run=fields))
    assert (ran.state, SECRET in ran.said) == ("success", False), ran.said
    assert objects(plain, f"{name}/out")["deep/learnt ü.bin"] == b"model, data"
    for wrong, said in (({"conn_type": "http"}, "is of type http"), ({"role_arn": "arn"}, "assumes a role")):
        changed = connection | {"extra": extra | wrong} if "role_arn" in wrong else connection | wrong
        monkeypatch.setenv("AIRFLOW_CONN_STORAGE", json.dumps(changed))
        with pytest.raises(BadInputError, match=f"^run.data: connection 'storage' {said}"):
            storage.login_options("storage", "run.data")
    monkeypatch.setenv("AIRFLOW_CONN_STORAGE", json.dumps(connection | {"conn_type": "generic"}))
    with pytest.raises(BadInputError, match=r"type generic.*apache-airflow-providers-amazon.*or in the UI"):
        storage.login_options("storage", "run.data")


ODD_NAMES = [
    *("a b", " begins and ends ", "100%", "%41", "a+b&c=d", "line\nbreak", "tab\there", "..hidden", "a..b"),
    *(
        "q?x#y",
        'it\'s "quoted"',
        "[a]*",
        "a::b",
        "日本/ü",
        "u\u0308",
        "{curly}",
        "back\\slash",
        "~",
        "<x>&amp;",
    ),
]


def test_odd_names_arrive_as_they_are(plain: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(plain, monkeypatch)
    source, name = tmp_path / "source", bucket(plain)
    for each in ODD_NAMES:
        (source / each).parent.mkdir(parents=True, exist_ok=True)
        (source / each).write_bytes(each.encode())
    transfer.publish(source, there(f"s3://{name}/a b/%41"), "key")
    transfer.fetch(there(f"s3://{name}/a b/%41"), tmp_path / "copy")
    copied = contents(tmp_path / "copy")
    assert copied.pop("manifest.json")
    assert copied == {each: each.encode() for each in ODD_NAMES}
    assert transfer.fetch(there(f"s3://{name}/a b/%41"), tmp_path / "copy").reused
    transfer.publish(source, there(f"s3://{name}/a b/%41"), "key")


def test_empty_objects_are_files_and_folder_markers_are_none(
    plain: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(plain, monkeypatch)
    name = bucket(
        plain, {"set/": b"", "set/deep/": b"", "set/none/": b"", "set/deep/a": b"alpha", "set/e": b""}
    )
    transfer.fetch(there(f"s3://{name}/set"), tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"deep/a": b"alpha", "e": b""}
    with pytest.raises(FileNotFoundError, match=f"there is nothing at s3://{name}/set/none"):
        transfer.identity(there(f"s3://{name}/set/none"))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["set/../a"], r"'\.\./a' leads out of its folder"),
        (["set//a"], "'/a' leads out of its folder"),
        (["set/a/b", "set/a//b"], "'a//b' is no name of a file on disk"),
        (["set/./b"], r"'\./b' is no name of a file on disk"),
        (["set/full/"], "'bucket/set/full/' is named like a folder, and holds 1 bytes"),
        (["set/a", "set/a.b", "set/a/b"], "'a' is both a file and a folder"),
        (["set", "set/a"], "it is both a file and a folder"),
    ],
)
def test_keys_that_no_folder_can_hold_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str], said: str
) -> None:
    with s3_server.listing(keys) as server:
        use(server, monkeypatch)
        with pytest.raises(OddFileError, match=f"^{said}"):
            transfer.fetch(there("s3://bucket/set"), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_list_of_many_objects_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [f"set/{number:07d}.jpg" for number in range(2_100)]  # three pages
    with s3_server.listing(keys) as server:
        use(server, monkeypatch)
        assert there("s3://bucket/nothing").names("") == []  # imports what is imported later
        tracemalloc.start()
        items = there("s3://bucket/set").items()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert [item.path for item in items] == [key.removeprefix("set/") for key in keys]
    assert kept < 400 * len(keys), kept


@pytest.mark.parametrize(
    ("source", "output", "is_refused"),
    [
        ("s3://{}/set", "s3://{}/set/models/1", True),
        ("s3://{}/set/", "s3://mine@{}/set", True),
        ("s3a://{}", "s3://{}/models", True),
        ("s3://{}/set", "s3://{}/set-models", False),
        ("s3://{}/set/train.txt", "s3://{}/set/models", False),
    ],
)
@pytest.mark.parametrize("field", ["--data", "--model"])
def test_an_output_in_a_source_on_s3_is_refused(
    manycpu: Type,
    script: Script,
    plain: Server,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    source: str,
    output: str,
    is_refused: bool,
) -> None:
    name = bucket(plain, {"set/train.txt": b"data"})
    use(plain, monkeypatch)
    monkeypatch.setattr(storage, "login_options", lambda *_: {})
    words = ["--program", script(), field, source.format(name), "--output", output.format(name)]
    code, printed = manycpu("preflight", *words, "--nproc-per-node", "1")
    is_named = f"{output.format(name)} is in run.{field[2:]}" in " ".join(printed.split())
    assert (code, is_named) == ((2, True) if is_refused else (0, False)), printed


def test_a_missing_bucket_is_named_and_not_made(
    plain: Server, manycpu: Type, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(plain, monkeypatch)
    with pytest.raises(FileNotFoundError, match="bucket does not exist"):
        transfer.identity(there("s3://mistyped/set"))
    words = ["--program", script(WRITES), "--output", "s3://mistyped/out", "--nproc-per-node", "1"]
    code, printed = manycpu("preflight", *words, "--data", "s3://mistyped/set")
    assert (code, "run.data: there is nothing at s3://mistyped/set: " in printed) == (2, True), printed
    for command in ("preflight", "run"):
        code, printed = manycpu(command, *words)
        assert (code, "the bucket of s3://mistyped/out does not exist" in printed) == (2, True), printed
    assert not list(tmp_path.rglob("trained.txt"))
    assert not (plain.folder / "mistyped").exists()


def test_a_key_that_is_missing_is_refused_by_preflight(
    plain: Server, manycpu: Type, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = bucket(plain, {"set/a.txt": b"alpha"})
    use(plain, monkeypatch)
    words = ["--program", script(WRITES), "--output", str(tmp_path / "out"), "--nproc-per-node", "1"]
    for key, expected in (("set", 0), ("set/a.txt", 0), ("se", 2), ("set/a.txt2", 2)):
        code, printed = manycpu("preflight", *words, "--data", f"s3://{name}/{key}")
        assert (code, f"there is nothing at s3://{name}/{key}. " in printed) == (expected, code > 0), printed


OF_A_LOGIN = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to a login with rights there"


@pytest.mark.parametrize("field", ["--data", "--output"])
@pytest.mark.parametrize(
    ("variables", "login", "said", "fix"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "mistyped"}, "", "signature we calculated does not match", OF_A_LOGIN),
        (dict.fromkeys(KEYS, ""), "", "Unable to locate credentials", OF_A_LOGIN),
        (
            {},
            "other@",
            "config profile (other) could not be found",
            f"'other', or leave it out and set {OF_A_LOGIN}",
        ),
        (
            {"AWS_ENDPOINT_URL": "CLOSED"},
            "",
            "Could not connect to the endpoint URL",
            "Set AWS_ENDPOINT_URL to",
        ),
        ({"AWS_ENDPOINT_URL": "no-url"}, "", "Invalid endpoint: no-url", "Set AWS_ENDPOINT_URL to"),
    ],
    ids=["wrong secret", "no keys", "no profile", "closed port", "no address"],
)
def test_storage_that_cannot_be_read_is_refused_before_anything_is_made(
    plain: Server,
    manycpu: Type,
    script: Script,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    field: str,
    variables: dict[str, str],
    login: str,
    said: str,
    fix: str,
) -> None:
    url = f"s3://{login}{bucket(plain, {'set/a.txt': b'alpha'})}/set"
    use(plain, monkeypatch)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1" if field == "--output" else "5")
    monkeypatch.setattr(storage, "login_options", lambda name, _: {"profile": name})  # Airflow replaces it
    for name, value in variables.items():
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}" if value == "CLOSED" else value)
    options = {"--output": str(tmp_path / "out"), field: url}
    words = ["--program", script(WRITES), "--nproc-per-node", "1", *chain(*options.items())]
    caplog.set_level(logging.DEBUG, "botocore.endpoint")
    code, printed = manycpu("run", *words)
    printed = " ".join(printed.split())
    assert (code, f"run.{field[2:]}: it cannot be read: " in printed, said in printed) == (2, True, True), (
        printed
    )
    assert (f"{fix} " in printed, "(docs/object_storage.md)" in printed) == (True, True), printed
    assert ("mistyped" in printed, list(home.rglob("*"))) == (False, [])
    requests = [record for record in caplog.records if record.getMessage().startswith("Sending http request")]
    assert len(requests) <= 4, requests  # of HEAD and GET: a closed port is not asked again


def test_a_source_of_pods_is_not_judged_by_a_login_of_this_machine(
    plain: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    use(plain, monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mistyped")
    run = {"program": "train.py", "data": f"s3://{bucket(plain, {'set/a': b'alpha'})}/set", "output": None}
    target = {"kind": "kubernetes", "connection": str(tmp_path / "none"), "image": "registry.example/train:1"}
    found = preflight.preflight(open_context(run, target, "test", base=tmp_path))
    assert "run.data" not in {each.field for each in found}


def test_a_server_that_does_not_answer_holds_preflight_up_for_seconds(
    manycpu: Type, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--program", script(WRITES), "--output", str(tmp_path / "out"), "--nproc-per-node", "1"]
    monkeypatch.setattr(preflight, "_WEB_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections
        use(Server(f"http://127.0.0.1:{silent.getsockname()[1]}", Path()), monkeypatch)
        began = time.monotonic()
        code, printed = manycpu("preflight", *words, "--data", "s3://bucket/set")
        taken = time.monotonic() - began
    said = "warning: run.data: the storage of s3://bucket/set has not answered within 0.5 s"
    assert (code, said in " ".join(printed.split())) == (0, True), printed
    assert taken < 60


def test_a_server_that_is_busy_and_an_account_that_only_lists_are_left_to_staging(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = bucket(proxy.server, {"set/a.txt": b"alpha"})
    proxy.rule = lambda _: "slow down"
    assert there(f"s3://{name}/set").fault(timeout_s=300) is None
    proxy.rule = lambda _: "cut"
    assert there(f"s3://{name}/set").fault(timeout_s=300) is None
    proxy.rule = lambda _: None
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "_info", _refuses)
    assert there(f"s3://{name}/set").fault(timeout_s=300) is None


async def _refuses(*_: object, **__: object) -> None:
    """Answer as S3 does to an account that may not read an object: without a reason."""
    raise PermissionError("Forbidden")


def test_a_wrong_secret_is_refused_before_the_training_and_not_shown(
    plain: Server, manycpu: Type, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = bucket(plain, {"set/a.txt": b"alpha"})
    use(plain, monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mistyped-secret")
    for url in (f"s3://{name}/set", f"s3://{name}/set/a.txt"):
        with pytest.raises(PermissionError, match="request signature we calculated does not match"):
            transfer.identity(there(url))
    words = ["--program", script(WRITES), "--output", f"s3://{name}/out", "--nproc-per-node", "1"]
    code, printed = manycpu("run", *words)
    assert (code, "request signature we calculated does not match" in printed) == (2, True), printed
    assert "mistyped-secret" not in printed
    assert not list(tmp_path.rglob("trained.txt"))


def test_a_clock_that_is_off_is_named(plain: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import botocore.auth

    name, now = bucket(plain, {"set/a.txt": b"alpha"}), botocore.auth.get_current_datetime
    use(plain, monkeypatch)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *args: now(*args) + timedelta(hours=1))
    for url in (f"s3://{name}/set", f"s3://{name}/set/a.txt"):
        with pytest.raises(PermissionError, match="difference between the request time and the"):
            transfer.identity(there(url))


def test_a_bucket_that_may_be_listed_and_not_read(
    plain: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = bucket(plain, {"set/a.txt": b"alpha"})
    plain.add_user("lister")
    grant = {"Effect": "Allow", "Principal": {"AWS": ["lister"]}, "Action": ["s3:ListBucket"]}
    policy = {"Version": "2012-10-17", "Statement": [grant | {"Resource": [f"arn:aws:s3:::{name}"]}]}
    plain.client().call_s3("put_bucket_policy", Bucket=name, Policy=json.dumps(policy))
    use(plain, monkeypatch)
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "lister")
    assert [item.path for item in there(f"s3://{name}/set").items()] == ["a.txt"]
    with pytest.raises(PermissionError, match="Access Denied"):
        transfer.fetch(there(f"s3://{name}/set"), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    with pytest.raises(PermissionError, match="Access Denied"):
        transfer.fetch(there(f"s3://{name}/set/a.txt"), tmp_path / "copy")


def test_of_a_versioned_bucket_the_latest_versions_are_data(
    plain: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, client = bucket(plain), plain.client()
    client.make_bucket_versioned(name)
    for content in (b"old", b"new"):
        client.pipe({f"{name}/set/{each}": content for each in ("kept", "deleted")})
    client.rm_file(f"{name}/set/deleted")
    use(plain, monkeypatch)
    transfer.fetch(there(f"s3://{name}/set"), tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"kept": b"new"}
    for content in (b"first", b"second"):
        (tmp_path / "copy" / "kept").write_bytes(content)
        transfer.publish(tmp_path / "copy", there(f"s3://{name}/out"), "key")
    assert objects(plain, f"{name}/out")["kept"] == b"second"


def test_a_server_that_asks_to_slow_down_is_asked_again(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    name, refused = bucket(proxy.server), set()

    def once_for_each_method(request: str) -> s3_server.Fault | None:
        kind = request.split(maxsplit=1)[0] + str("list-type" in request)
        is_first = kind not in refused
        refused.add(kind)
        return "slow down" if is_first else None

    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_bytes(b"alpha")
    proxy.rule = once_for_each_method
    transfer.publish(tmp_path / "source", there(f"s3://{name}/out"), "key")
    transfer.fetch(there(f"s3://{name}/out"), tmp_path / "copy")
    assert contents(tmp_path / "copy").keys() == {"a.txt", "manifest.json"}
    assert len(refused) == 5, refused


@pytest.mark.parametrize(
    ("fault", "said"), [("slow down", "reduce your request rate"), ("half", "payload is not completed")]
)
def test_a_download_that_fails_leaves_no_file_and_is_resumed(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: s3_server.Fault, said: str
) -> None:
    small_parts(monkeypatch)
    content = os.urandom(4 * PART)
    name = bucket(proxy.server, {"set/a": b"alpha", "set/large.bin": content})

    def parts() -> int:
        return sum(each.startswith("GET") and "large.bin" in each for each in proxy.requests)

    proxy.rule = lambda request: fault if f"large.bin bytes={2 * PART}-" in request else None
    with pytest.raises(Exception, match=said):
        transfer.fetch(there(f"s3://{name}/set"), tmp_path / "copy")
    assert transfer.staged(tmp_path / "copy") is None
    assert not (tmp_path / "copy").exists()
    proxy.rule = lambda _: None
    proxy.requests.clear()
    transfer.fetch(there(f"s3://{name}/set"), tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"a": b"alpha", "large.bin": content}
    assert 0 < parts() < 4  # not from the start


@pytest.mark.parametrize("files", [{"large.bin": 3}, {"a": 1, "b": 1, "c": 1}], ids=["parts", "files"])
def test_data_is_asked_for_ahead_of_its_use(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, int]
) -> None:
    small_parts(monkeypatch)
    content = {file: os.urandom(parts * PART) for file, parts in files.items()}
    name = bucket(proxy.server, {f"set/{file}": each for file, each in content.items()})
    all_at_once = threading.Barrier(3)

    def meets(request: str) -> None:
        if request.startswith("GET") and "bytes=" in request:
            all_at_once.wait(300)

    proxy.rule = meets
    transfer.fetch(there(f"s3://{name}/set"), tmp_path / "copy")
    assert contents(tmp_path / "copy") == content


def test_one_broken_answer_is_no_end(proxy: Proxy, tmp_path: Path) -> None:
    name = bucket(proxy.server, {"set/a": b"alpha" * 1000})
    broken: list[str] = []

    def once(request: str) -> s3_server.Fault | None:
        broken.extend([request] if request.startswith(f"GET /{name}/set/a ") else [])
        return "half" if broken == [request] else None

    proxy.rule = once
    transfer.fetch(there(f"s3://{name}/set"), tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"a": b"alpha" * 1000}
    assert len(broken) > 1


def test_a_file_is_no_folder_because_the_server_breaks_off(
    proxy: Proxy, manycpu: Type, script: Script, home: Path
) -> None:
    name = bucket(proxy.server, {"set/train.txt": b"data"})

    def after_the_copy(request: str) -> s3_server.Fault | None:
        is_copied = any((home / "data").glob("*.manifest.json"))
        return "cut" if is_copied and request.startswith("HEAD") else None

    proxy.rule = after_the_copy
    reads = "import os; open(os.environ['MANYCPU_DATA']).read()\n"
    words = ["--program", script(reads), "--data", f"s3://{name}/set/train.txt", "--nproc-per-node", "1"]
    code, printed = manycpu("run", *words, "--output", "null")
    assert code == 0, printed


def test_an_upload_that_breaks_off_leaves_nothing_and_the_model_is_kept(
    proxy: Proxy, manycpu: Type, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch)
    name = bucket(proxy.server)
    proxy.rule = lambda request: "cut" if "partNumber=3" in request else None
    words = ["--program", script(WRITES), "--output", f"s3://{name}/out", "--nproc-per-node", "1"]
    code, printed = manycpu("run", *words, "--run-id", "one")
    assert (code != 0, "The model is kept in " in printed) == (True, True), printed
    assert any("partNumber=2" in request for request in proxy.requests)
    assert not {"large.bin", "manifest.json"} & objects(proxy.server, f"{name}/out").keys()
    assert uploads(proxy.server, name) == []
    kept = [path.read_bytes() for path in tmp_path.rglob("large.bin")]
    assert [len(content) for content in kept] == [5 * PART // 2]
    proxy.rule = lambda _: None
    code, printed = manycpu("run", *words, "--run-id", "one")
    assert code == 0, printed
    assert objects(proxy.server, f"{name}/out")["large.bin"] == kept[0]  # no second training


def test_an_upload_whose_answer_is_lost_is_no_file_of_another_run(proxy: Proxy, tmp_path: Path) -> None:
    name = bucket(proxy.server)
    asked: list[str] = []

    def once(request: str) -> s3_server.Fault | None:
        asked.extend([request] if request == f"PUT /{name}/out/model" else [])
        return "lost" if asked == [request] else None

    proxy.rule = once
    transfer.publish(folder(tmp_path / "source", model=b"ours"), there(f"s3://{name}/out"), "key")
    assert len(asked) > 1  # the client has repeated it
    assert objects(proxy.server, f"{name}/out")["model"] == b"ours"


def killed_at(proxy: Proxy, part: str, command: list[str], after: str = "") -> None:
    """Run a command, and kill it at its first request with a text, after the first with another text."""
    running: list[subprocess.Popen[bytes]] = []
    before = [""]

    def kill(request: str) -> s3_server.Fault | None:
        before.append(request)
        if part not in request or not any(after in earlier for earlier in before):
            return None
        running[0].kill()
        return "cut"

    proxy.rule = kill
    running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    assert running[0].wait(300) == -signal.SIGKILL
    proxy.rule = lambda _: None


def test_what_a_killed_upload_leaves_the_next_one_deletes(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSSPEC_S3", json.dumps({"default_block_size": PART}))
    source, name = tmp_path / "source", bucket(proxy.server)
    source.mkdir()
    (source / "large.bin").write_bytes(os.urandom(5 * PART // 2))
    foreign = {"Bucket": name, "Key": "out/theirs.bin"}
    proxy.server.client().call_s3("create_multipart_upload", **foreign)
    code = (
        "import sys, pathlib; from manycpu.pipeline import transfer; "
        "from manycpu.pipeline.adapters.storage import Location; "
        "transfer.publish(pathlib.Path(sys.argv[1]), Location.of(sys.argv[2], 'run.output'), 'key')"
    )
    url = f"s3://{name}/out"
    killed_at(proxy, "partNumber=2", [sys.executable, "-c", code, str(source), url])
    assert {each["Key"] for each in uploads(proxy.server, name)} == {"out/large.bin", foreign["Key"]}
    assert "large.bin" not in objects(proxy.server, f"{name}/out")
    transfer.publish(source, there(url), "key")
    assert [each["Key"] for each in uploads(proxy.server, name)] == [foreign["Key"]]
    assert objects(proxy.server, f"{name}/out")["large.bin"] == (source / "large.bin").read_bytes()


def test_broken_uploads_are_deleted_on_every_page_of_their_list(
    plain: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(plain, monkeypatch)
    name = bucket(plain)
    for key in ("a", "b", "c", "d"):
        plain.client().call_s3("create_multipart_upload", Bucket=name, Key=key)
    output = there(f"s3://{name}")
    output.fs.req_kw = {"MaxUploads": 1}  # of a page, instead of 1000
    output.delete_broken_uploads({"b", "d"})
    assert [each["Key"] for each in uploads(plain, name)] == ["a", "c"]


def writes_two(output: str, trained: Path, script: Script) -> list[str]:
    """Return the command of a run that exports two files, and whose training is recorded in a file."""
    program = script(WRITES_TWO.format(trained=str(trained)))
    words = ["--program", program, "--output", output, "--nproc-per-node=1", "--run-id=one"]
    return [sys.executable, "-m", "manycpu.pipeline.cli", "run", *words]


def test_a_command_that_was_killed_between_two_uploads_exports_again(
    proxy: Proxy, script: Script, tmp_path: Path
) -> None:
    name, trained = bucket(proxy.server), tmp_path / "trained"
    command = writes_two(f"s3://{name}/out", trained, script)
    killed_at(proxy, f"PUT /{name}/out/second", command)
    assert "first" in objects(proxy.server, f"{name}/out")
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert trained.read_text() == "once "
    found = objects(proxy.server, f"{name}/out")
    assert (found["first"], found["second"]) == (b"1", b"2")


def test_what_is_gone_from_a_bucket_before_the_clean_up_is_exported_again(
    proxy: Proxy, script: Script, tmp_path: Path
) -> None:
    name, trained = bucket(proxy.server), tmp_path / "trained"
    command = writes_two(f"s3://{name}/out", trained, script)
    out = f"PUT /{name}/out"
    killed_at(proxy, f"{out}/report.json", command, after=f"{out}/manifest.json")
    proxy.server.client().rm_file(f"{name}/out/second")
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert trained.read_text() == "once "
    assert objects(proxy.server, f"{name}/out")["second"] == b"2"


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def test_keys_with_a_version_are_refused_by_name(
    plain: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, key = bucket(plain, {"set/a": b"alpha"}), "a?versionId=7"
    plain.client().call_s3("put_object", Bucket=name, Key=f"set/{key}", Body=b"other")
    use(plain, monkeypatch)
    with pytest.raises(OddFileError, match=r"'a.versionId=7' names a version, and no key"):
        transfer.fetch(there(f"s3://{name}/set"), tmp_path / "copy")
    with pytest.raises(OddFileError, match=r"'a.versionId=7' names a version, and no key"):
        transfer.publish(folder(tmp_path / "source", **{key: b"model"}), there(f"s3://{name}/out"), "key")
    assert "a" not in objects(plain, f"{name}/out")


def test_bytes_that_are_there_only_while_they_are_read_are_not_staged(proxy: Proxy, tmp_path: Path) -> None:
    name = bucket(proxy.server, {"set/a": b"alpha"})

    def replaces(request: str) -> None:
        if request.startswith(f"GET /{name}/set/a "):
            proxy.server.client().pipe_file(f"{name}/set/a", b"other")

    proxy.rule = replaces
    with pytest.raises(OSError, match="no longer exists"):
        transfer.fetch(there(f"s3://{name}/set"), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_an_object_that_took_the_name_of_the_output_is_left_alone(
    plain: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = bucket(plain, {"out": b"theirs"})
    use(plain, monkeypatch)
    with pytest.raises(transfer.TransferError, match="has become a file"):
        transfer.publish(folder(tmp_path / "source", model=b"ours"), there(f"s3://{name}/out"), "key")
    assert plain.client().cat_file(f"{name}/out") == b"theirs"


def test_an_object_beside_a_model_is_found_before_the_run_trains_again(
    plain: Server, manycpu: Type, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, trained = bucket(plain), tmp_path / "trained.txt"
    use(plain, monkeypatch)
    program = script(WRITES_TWO.format(trained=str(trained)))
    words = ["run", "--program", program, "--output", f"s3://{name}/out", "--nproc-per-node", "1"]
    for _ in range(2):  # its own model is no stranger
        code, printed = manycpu(*words, "--run-id", "weekly")
        assert code == 0, printed
    plain.client().pipe_file(f"{name}/out/README.md", b"card")
    code, printed = manycpu(*words, "--run-id", "weekly")
    assert (code, "out is not empty: README.md is in it" in printed) == (2, True), printed
    assert trained.read_text() == "once once "
    assert plain.client().cat_file(f"{name}/out/README.md") == b"card"


def test_an_object_that_begins_like_a_file_of_the_model_is_left_alone(
    plain: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = bucket(plain, {"out/empty": b"", "out/model": b"o"})
    use(plain, monkeypatch)
    with pytest.raises(transfer.TransferError, match="it holds empty, which this run did not write"):
        transfer.publish(
            folder(tmp_path / "source", empty=b"full", model=b"ours"), there(f"s3://{name}/out"), "key"
        )
    assert objects(plain, f"{name}/out") == {"empty": b"", "model": b"o"}


def test_an_empty_log_of_the_program_stays_and_the_page_comes_beside_it(
    plain: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = bucket(plain, {"out/run.log": b""})
    use(plain, monkeypatch)
    for file in ("run.log", "report.html"):
        transfer.write_beside(there(f"s3://{name}/out"), "key", file, "text")
    assert objects(plain, f"{name}/out") == {"run.log": b"", "report.html": b"text"}


def test_a_manifest_is_never_beside_a_part_of_its_files(proxy: Proxy, tmp_path: Path) -> None:
    name = bucket(proxy.server)
    url = f"s3://{name}/out"
    first = folder(tmp_path / "first", same=b"1", changed=b"1", gone=b"1")
    second = folder(tmp_path / "second", same=b"1", changed=b"2")
    transfer.publish(first, there(url), "key")
    for at in range(1, 100):
        new = (first, second)[at % 2]  # over the other one
        made = count(1)

        def breaks(request: str, at: int = at, made: Iterator[int] = made) -> s3_server.Fault | None:
            is_read = request.startswith(("GET", "HEAD"))
            return None if is_read or next(made) < at else "cut"

        proxy.rule = breaks
        try:
            transfer.publish(new, there(url), "key")
        except Exception:  # noqa: BLE001 - whatever the client says
            proxy.rule = lambda _: None
            found = objects(proxy.server, f"{name}/out")
            for each in json.loads(found.get("manifest.json", b'{"files": []}'))["files"]:
                assert hashlib.sha256(found.get(each["path"], b"")).hexdigest() == each["sha256"], at
        else:
            break
        transfer.publish(new, there(url), "key")
        assert objects(proxy.server, f"{name}/out").keys() == {*contents(new), "manifest.json"}
    assert at > 6


def test_of_the_same_run_on_two_machines_one_exports(proxy: Proxy, tmp_path: Path) -> None:
    name = bucket(proxy.server)
    ours, theirs = folder(tmp_path / "ours", model=b"ours"), folder(tmp_path / "theirs", model=b"theirs")
    began: list[str] = []

    def meets_another(request: str) -> None:
        if request == f"PUT /{name}/out/model" and not began:
            began.append(request)
            transfer.publish(theirs, there(f"s3://{name}/out"), "key")

    proxy.rule = meets_another
    with pytest.raises(transfer.TransferError, match="it holds model, which this run did not write"):
        transfer.publish(ours, there(f"s3://{name}/out"), "key")
    assert objects(proxy.server, f"{name}/out")["model"] == b"theirs"


@pytest.mark.parametrize(
    "url",
    ["s3://KEY:SECRET/x+y@buck/set", "s3://KEY%3ASECRET@buck/set", "s3://token=SECRET@buck/set", "s3:///"],
)
def test_a_url_without_a_bucket_is_refused_and_its_secret_is_not_shown(url: str) -> None:
    with pytest.raises(BadInputError, match="names no bucket") as refused:
        there(url)
    assert "SECRET" not in str(refused.value)
