"""Images go to and come from a real registry whole: open, with basic auth, with tokens, with TLS."""

import base64
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from support import registry_server
from support.registry_server import PASSWORD, USER, Tokens
from support.request_faults import Requests

from manycpu.pipeline.adapters import registry
from manycpu.pipeline.adapters.registry import Connection, Repository, of_blob, of_bytes
from manycpu.pipeline.adapters.registry_login import Login
from manycpu.pipeline.spec.errors import BuildError, RegistryError
from manycpu.pipeline.spec.image import OCI, Change, Image, Layer, sha256

KNOWN = Login(USER, PASSWORD)
Open = Callable[..., Repository]


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a registry that is open to all."""
    with registry_server.running(tmp_path_factory.mktemp("registry")) as found:
        yield found


@pytest.fixture
def repository() -> Iterator[Open]:
    """Open repositories, and close their connections."""
    opened: list[Connection] = []

    def open_(host: str, name: str, login: Login | None = None, **more: object) -> Repository:
        known: dict[str, object] = {"deadline": 10, "plain": True, **more}
        opened.append(Connection(host, login=login, **known))  # type: ignore[arg-type]
        return Repository(opened[-1], name)

    yield open_
    for connection in opened:
        connection.close()


def layer(content: bytes) -> Layer:
    """Make a layer; it need not be a tar for a registry."""
    return Layer(gzip.compress(content, mtime=0), sha256(content), "a test")


def image(*layers: Layer, architecture: str = "amd64") -> Image:
    """Make an image of some layers."""
    config = {"os": "linux", "architecture": architecture, "config": {}, "rootfs": {"diff_ids": []}}
    config_bytes = json.dumps(config).encode()
    described = {"digest": sha256(config_bytes), "size": len(config_bytes), "mediaType": "application/json"}
    manifest = {"schemaVersion": 2, "mediaType": OCI, "config": described, "layers": []}
    return Image(json.dumps(manifest).encode(), config_bytes).changed(Change(layers, {}, {}))


def push(to: Repository, tag: str, *contents: bytes) -> Image:
    """Push an image of some contents."""
    layers = [layer(content) for content in contents]
    made = image(*layers)
    for one in layers:
        to.push(of_bytes(one.content, one.digest))
    to.push(of_bytes(made.config_bytes, made.manifest["config"]["digest"]))
    assert to.push_image(made, tag) == made.digest
    return made


def respond(
    handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> None:
    """Answer a call."""
    handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    handler.send_response(status)
    for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def test_what_is_pushed_comes_back_by_tag_and_by_digest(public: str, repository: Open) -> None:
    to = repository(public, "ml/train")
    made = push(to, "one", b"a layer")
    assert to.digest("one") == to.digest(made.digest) == made.digest
    assert to.pull("one") == to.pull(made.digest) == made
    with to.open(made.layers[0]["digest"]) as blob:
        assert gzip.decompress(blob.read()) == b"a layer"


def test_an_image_that_is_not_there_has_no_digest(public: str, repository: Open) -> None:
    assert repository(public, "ml/nothing").digest("latest") is None
    with pytest.raises(RegistryError, match=r"404.*MANIFEST_UNKNOWN") as caught:
        repository(public, "ml/nothing").pull("latest")
    assert caught.value.status == 404


def test_a_blob_larger_than_a_chunk_arrives_whole(
    public: str, repository: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "CHUNK", 1000)
    to = repository(public, "ml/large")
    for size in (999, 1000, 1001, 2000, 3456):
        content = os.urandom(size)
        to.push(of_bytes(content, sha256(content)))
        with to.open(sha256(content)) as blob:
            assert blob.read() == content


def test_a_blob_that_is_not_what_its_digest_says_is_refused(public: str, repository: Open) -> None:
    wrong = sha256(b"something else")
    with pytest.raises(RegistryError, match="DIGEST_INVALID"):
        repository(public, "ml/wrong").push(of_bytes(b"this", wrong))
    assert not repository(public, "ml/wrong").has(wrong)


def test_a_blob_is_mounted_from_another_repository(public: str, repository: Open) -> None:
    source, target = repository(public, "ml/source"), repository(public, "ml/target")
    content = b"mounted"
    source.push(of_bytes(content, sha256(content)))
    assert target.mount(sha256(content), "ml/source")
    assert target.has(sha256(content))
    assert not target.mount(sha256(b"absent"), "ml/source")


def test_a_blob_is_copied_from_another_registry(public: str, repository: Open, tmp_path: Path) -> None:
    with registry_server.running(tmp_path) as other:
        source, target = repository(other, "ml/source"), repository(public, "ml/copied")
        made = push(source, "one", os.urandom(100_000))
        target.push(of_blob(source, made.layers[0]))
        assert target.has(made.layers[0]["digest"])


def test_an_index_is_resolved_to_linux_amd64(public: str, repository: Open) -> None:
    to = repository(public, "ml/index")
    made = push(to, "amd64", b"for amd64")
    other = image(architecture="arm64")
    to.push(of_bytes(other.config_bytes, other.manifest["config"]["digest"]))
    to.push_image(other, "arm64")
    entries = [_entry(other, "arm64"), _entry(made, "amd64")]
    to.push_image(_index(entries), "both")
    to.push_image(_index(entries[:1]), "arm")
    assert to.pull("both") == made
    with pytest.raises(BuildError, match="no image for linux/amd64, only for linux/arm64"):
        to.pull("arm")
    with pytest.raises(BuildError, match="only for linux/arm64"):
        to.pull("arm64")


def test_basic_auth_is_used_where_it_is_asked_for(tmp_path: Path, repository: Open) -> None:
    with registry_server.running(tmp_path, registry_server.basic(tmp_path)) as host:
        made = push(repository(host, "ml/train", KNOWN), "one", b"x")
        assert repository(host, "ml/train", KNOWN).pull("one") == made


@pytest.mark.parametrize("login", [None, Login(USER, "wrong-password")], ids=["none", "wrong"])
def test_a_login_that_is_refused_is_named_without_its_password(
    tmp_path: Path, repository: Open, login: Login | None
) -> None:
    with (
        registry_server.running(tmp_path, registry_server.basic(tmp_path)) as host,
        pytest.raises(RegistryError, match=r"target\.registry: .* 401.*target\.pull_secret") as caught,
    ):
        repository(host, "ml/train", login).check_push()
    assert "wrong-password" not in f"{caught.value!s} {caught.value!r} {login!r}"


def test_tokens_are_asked_for_what_is_needed(tmp_path: Path, repository: Open) -> None:
    with (
        Tokens(tmp_path / "tokens") as tokens,
        registry_server.running(tmp_path, tokens.settings) as host,
    ):
        to = repository(host, "ml/train", KNOWN)
        made = push(to, "one", b"x", b"y")
        assert tokens.asked == [["repository:ml/train:pull,push"]]
        assert repository(host, "ml/train").pull("one") == made
        other = Repository(to.connection, "ml/other")
        assert other.mount(made.layers[0]["digest"], "ml/train")
        with pytest.raises(RegistryError, match="without a login with 401"):
            repository(host, "ml/train").check_push()


def test_a_token_that_expires_is_renewed(tmp_path: Path, repository: Open) -> None:
    with (
        Tokens(tmp_path / "tokens") as tokens,
        registry_server.running(tmp_path, tokens.settings) as host,
    ):
        to = repository(host, "ml/train", KNOWN)
        tokens.seconds = -120  # the registry allows a minute of difference
        with pytest.raises(RegistryError, match="401"):
            to.has(sha256(b"x"))
        tokens.seconds = 300
        assert not to.has(sha256(b"x"))
        assert not to.has(sha256(b"y"))
        assert len(tokens.asked) == 2


@pytest.mark.parametrize("password", ["gr\u00fcn", "5\u20ac"])
def test_a_password_of_any_letters_reaches_the_token_server_as_docker_sends_it(
    tmp_path: Path, repository: Open, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    monkeypatch.setattr(registry_server, "PASSWORD", password)
    with (
        Tokens(tmp_path / "tokens") as tokens,
        registry_server.running(tmp_path, tokens.settings) as host,
    ):
        repository(host, "ml/train", Login(USER, password)).check_push()


def test_a_token_server_that_grants_only_pull_and_push_is_enough(repository: Open) -> None:
    """Quay's: it refuses a request for any other action with 400."""
    calls: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        calls.append(handler.command)
        status, headers, body = 202, {"Location": "/v2/ml/train/blobs/uploads/1"}, b""
        if handler.path.startswith("/token"):
            scopes = parse_qs(urlsplit(handler.path).query)["scope"]
            actions = {action for scope in scopes for action in scope.rpartition(":")[2].split(",")}
            status, headers, body = 200 if actions <= {"pull", "push"} else 400, {}, b'{"token": "t"}'
        elif handler.headers.get("Authorization") != "Bearer t":
            realm = f'Bearer realm="http://{handler.headers["Host"]}/token"'
            status, headers = 401, {"WWW-Authenticate": realm}
        elif handler.command == "DELETE":
            status = 500
        respond(handler, status, body, headers)

    with registry_server.relayed(answer) as host:
        to = repository(host, "ml/train", KNOWN)
        to.check_push()
        assert not to.mount(sha256(b"x"), "ml/base")
    assert calls.count("DELETE") == 2


@pytest.mark.parametrize("offer", ['{}, Basic realm="a b"', 'Basic realm="a b", {}'])
def test_tokens_are_used_if_a_registry_offers_basic_auth_too(repository: Open, offer: str) -> None:
    """Gitea's."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if handler.path.startswith("/token?service=theirs&"):
            respond(handler, 200, b'{"token": "t"}')
        elif handler.headers.get("Authorization") == "Bearer t":
            respond(handler, 404)
        else:
            bearer = f'Bearer realm="http://{handler.headers["Host"]}/token",service="theirs",scope="*"'
            respond(handler, 401, headers={"WWW-Authenticate": offer.format(bearer)})

    with registry_server.relayed(answer) as host:
        assert repository(host, "ml/train", KNOWN).digest("one") is None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405])
def test_a_mount_that_is_refused_is_none(repository: Open, status: int) -> None:
    with registry_server.relayed(lambda handler: respond(handler, status)) as host:
        assert not repository(host, "ml/train").mount(sha256(b"x"), "ml/base")


def test_a_blob_comes_as_it_is_through_a_proxy_that_compresses(repository: Open) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        compresses = "gzip" in handler.headers.get("Accept-Encoding", "")
        headers = {"Content-Encoding": "gzip"} if compresses else {}
        respond(handler, 200, gzip.compress(b"blob") if compresses else b"blob", headers)

    with registry_server.relayed(answer) as host, repository(host, "ml/train").open(sha256(b"blob")) as blob:
        assert blob.read() == b"blob"


@pytest.mark.parametrize("status", [200, 302])
@pytest.mark.parametrize("call", ["digest", "pull", "check_push"])
def test_a_website_is_no_registry(repository: Open, status: int, call: str) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        headers = {"Location": handler.path} if status == 302 else {}
        respond(handler, status, b"<!doctype html><title>Sign in</title>", headers)

    with (
        registry_server.relayed(answer) as host,
        pytest.raises(RegistryError, match=f"{host} is no registry"),
    ):
        getattr(repository(host, "ml/train"), call)(*([] if call == "check_push" else ["one"]))


@pytest.mark.parametrize("proxy", ["http://", "http://[a", "socks9://a"])
def test_a_proxy_that_is_none_is_not_the_fault_of_the_registrys_name(
    repository: Open, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(
        RegistryError, match=rf"registry a\.test cannot be called: .* http_proxy={re.escape(proxy)}"
    ):
        repository("a.test", "ml/train").digest("one")


def test_a_manifest_may_come_with_a_character_set(repository: Open) -> None:
    made = image()
    manifest = {name: value for name, value in made.manifest.items() if name != "mediaType"}

    def answer(handler: BaseHTTPRequestHandler) -> None:
        is_manifest = "/manifests/" in handler.path
        body = json.dumps(manifest).encode() if is_manifest else made.config_bytes
        respond(handler, 200, body, {"Content-Type": f"{OCI}; charset=utf-8"})

    with registry_server.relayed(answer) as host:
        assert repository(host, "ml/train").pull("one").media_type == OCI


def test_storage_behind_a_registry_gets_no_login_of_netrc(
    repository: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("default login somebody password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    logins: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        logins.append(handler.headers.get("Authorization"))
        respond(handler, 200, b"blob")

    def redirect(handler: BaseHTTPRequestHandler) -> None:
        respond(handler, 307, headers={"Location": f"http://{storage}/blob"})

    with registry_server.relayed(answer) as storage, registry_server.relayed(redirect) as host:
        assert repository(host, "ml/train").open(sha256(b"blob")).read() == b"blob"
    assert logins == [None]


def test_a_wrong_password_is_told_by_the_token_server(tmp_path: Path, repository: Open) -> None:
    with (
        Tokens(tmp_path / "tokens") as tokens,
        registry_server.running(tmp_path, tokens.settings) as host,
        pytest.raises(RegistryError, match=f"as {USER} with 401: UNAUTHORIZED wrong password"),
    ):
        repository(host, "ml/train", Login(USER, "nope")).check_push()


def test_its_own_authority_must_be_given(tmp_path: Path, repository: Open) -> None:
    settings, authority = registry_server.tls(tmp_path / "tls")
    with registry_server.running(tmp_path, settings, authority) as host:
        push(repository(host, "ml/train", plain=False, ca=str(authority)), "one", b"x")
        with pytest.raises(RegistryError, match=r"target\.registry_ca: .*certificate"):
            repository(host, "ml/train", plain=False).digest("one")


def test_an_upload_stays_on_https_where_its_registry_takes_itself_for_plain_http(
    tmp_path: Path, repository: Open
) -> None:
    settings, authority = registry_server.tls(tmp_path / "tls")
    with registry_server.running(tmp_path, settings, authority) as host:
        to = repository(host, "ml/train", plain=False, ca=str(authority))
        to.connection._session.headers["X-Forwarded-Proto"] = "http"  # noqa: SLF001 - as a proxy adds it
        push(to, "one", b"x")
        with pytest.raises(RegistryError, match=r"http://other\.test, which is no https URL"):
            to.connection.url("http://other.test/v2/upload")


@pytest.mark.parametrize("ca", [False, True], ids=["no-ca", "ca"])
def test_nothing_is_said_in_plain_http_that_nobody_has_written(
    tmp_path: Path, repository: Open, *, ca: bool
) -> None:
    authority = {"ca": str(registry_server.tls(tmp_path / "tls")[1])} if ca else {}
    asked: list[str] = []

    def note(method: str, path: str) -> bool:
        asked.append(f"{method} {path}")
        return False

    with (
        registry_server.running(tmp_path, registry_server.basic(tmp_path)) as host,
        registry_server.flaky(host, note) as front,
        pytest.raises(RegistryError, match="http://"),
    ):
        repository(front, "ml/train", KNOWN, plain=False, **authority).digest("one")
    assert asked == []


def test_whether_pushing_is_allowed_can_be_seen_without_a_trace(tmp_path: Path, repository: Open) -> None:
    with registry_server.running(tmp_path) as host:
        repository(host, "ml/train").check_push()
        begun = {path.name for path in (tmp_path / "images").rglob("_uploads/*/*")}
        assert not begun & {"data", "startedat"}


@pytest.mark.parametrize("deadline", [10, 0], ids=["soon", "after the deadline"])
def test_an_upload_that_breaks_is_tried_again(public: str, repository: Open, deadline: float) -> None:
    broken = set[str]()

    def first_time(method: str, _path: str) -> bool:
        new = method == "PUT" and method not in broken
        broken.update([method] if new else [])
        return new

    with registry_server.flaky(public, first_time) as front:
        to = repository(front, "ml/breaks", deadline=deadline)
        one = layer(b"%d" % deadline)
        to.push(of_bytes(one.content, one.digest))
        assert to.has(one.digest)
    assert broken == {"PUT"}


def test_an_upload_that_its_registry_has_lost_is_tried_again(public: str, repository: Open) -> None:
    lost: list[str] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if handler.command != "PUT" or lost:
            registry_server.pass_on(public, handler)
            return
        lost.append(handler.path)
        respond(handler, 404, b'{"errors": [{"code": "BLOB_UPLOAD_UNKNOWN"}]}')

    with registry_server.relayed(answer) as front:
        one = layer(b"lost")
        repository(front, "ml/lost").push(of_bytes(one.content, one.digest))
    assert lost
    assert repository(public, "ml/lost").has(one.digest)


def test_a_connection_that_breaks_is_tried_again(public: str, repository: Open) -> None:
    broken: set[tuple[str, str]] = set()

    def first_time(method: str, path: str) -> bool:
        kind = (method, path.split("/")[4])
        new = kind not in broken and path != "/v2/"
        broken.add(kind)
        return new

    with registry_server.flaky(public, first_time) as front:
        to = repository(front, "ml/flaky")
        made = push(to, "one", b"x")
        assert to.pull("one") == made
    assert {method for method, _ in broken} >= {"HEAD", "POST", "PUT", "GET"}


def test_an_answer_that_ends_in_its_middle_is_asked_for_again(public: str, repository: Open) -> None:
    made = push(repository(public, "ml/cut"), "one", b"x")
    requests = Requests({})
    requests.plan("cut", "GET #1")

    def answer(handler: BaseHTTPRequestHandler) -> None:
        requests.answer(handler, handler.command, lambda: registry_server.pass_on(public, handler))

    with registry_server.relayed(answer) as front:
        assert repository(front, "ml/cut").pull("one") == made
    assert requests.struck


def test_an_image_is_pushed_again_if_the_registry_just_writes_one_of_its_blobs(
    tmp_path: Path, repository: Open
) -> None:
    """As while another client pushes the same blob: for a moment, the file that links it is empty."""
    with registry_server.running(tmp_path) as host:
        made = push(repository(host, "ml/train"), "one", b"x")
        blob = made.manifest["layers"][0]["digest"].removeprefix("sha256:")
        (link,) = tmp_path.rglob(f"_layers/sha256/{blob}/link")
        written = link.read_bytes()
        refused: list[str] = []

        def answer(handler: BaseHTTPRequestHandler) -> None:
            if handler.command == "PUT" and not refused:
                refused.append(handler.path)
                link.write_bytes(b"")
            registry_server.pass_on(host, handler)
            link.write_bytes(written)

        with registry_server.relayed(answer) as front:
            assert repository(front, "ml/train").push_image(made, "two") == made.digest
    assert refused == ["/v2/ml/train/manifests/two"]


def test_a_registry_that_is_away_is_given_up_at_the_deadline(repository: Open) -> None:
    with pytest.raises(RegistryError, match=r"does not answer: .*Connection refused.*http://") as caught:
        repository("127.0.0.1:9", "ml/train", plain=False, deadline=0.5).digest("one")
    assert caught.value.status == 0


def test_what_comes_must_be_what_its_digest_says(tmp_path: Path, repository: Open) -> None:
    with registry_server.running(tmp_path) as host:
        to = repository(host, "ml/train")
        made = push(to, "one", b"x")
        name = made.manifest["config"]["digest"].removeprefix("sha256:")
        (blob,) = (tmp_path / "images").rglob(f"blobs/sha256/*/{name}/data")
        blob.write_bytes(blob.read_bytes().replace(b"amd64", b"amd65"))
        with pytest.raises(RegistryError, match="sent sha256"):
            to.pull("one")


def _entry(of: Image, architecture: str) -> dict[str, object]:
    platform = {"os": "linux", "architecture": architecture}
    return {"mediaType": OCI, "digest": of.digest, "size": len(of.manifest_bytes), "platform": platform}


def _index(entries: list[dict[str, object]]) -> Image:
    media_type = "application/vnd.oci.image.index.v1+json"
    body = {"schemaVersion": 2, "mediaType": media_type, "manifests": entries}
    return Image(json.dumps(body).encode(), b"", media_type)


def test_a_login_is_written_as_docker_writes_it() -> None:
    entry = KNOWN.as_config("registry.test")["auths"]["registry.test"]
    assert base64.b64decode(entry["auth"]).decode() == f"{USER}:{PASSWORD}"
