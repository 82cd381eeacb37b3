"""Calls to an API server that refuses some: transient errors are retried, others are reported at once."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.config import incluster_config
from support.web_server import served

from manycpu.pipeline.adapters import cluster
from manycpu.pipeline.adapters.cluster import Cluster, connect
from manycpu.pipeline.spec.errors import ClusterError

WEBHOOK = "Internal error occurred: failed calling webhook: connection refused"
CLOSED = 0
"""In place of a status: the connection ends without an answer."""


class Server:
    """An API server that answers with these statuses in turn, then with an empty object."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, str]] = []
        self.tokens: list[str | None] = []
        """Of the calls that came."""
        self.calls: list[str] = []
        self.url = ""

    def handler(server) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - self is the handler below
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.tokens.append(self.headers["Authorization"])
                server.calls.append(self.command)
                self.rfile.read(int(self.headers["Content-Length"] or 0))
                status, message = server.answers.pop(0) if server.answers else (200, "")
                if status == CLOSED:
                    self.close_connection = True
                    return
                content = json.dumps({"message": message}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        return Handler


@pytest.fixture
def scripted() -> Iterator[Server]:
    made = Server()
    with served(made.handler()) as host:
        made.url = f"http://{host}"
        yield made


@pytest.fixture
def opened(scripted: Server) -> Cluster:
    """Open a namespace of it; each client that is made has another token."""
    made: list[client.ApiClient] = []

    def connect() -> client.ApiClient:
        settings = client.Configuration(host=scripted.url, api_key={"authorization": f"Bearer {len(made)}"})
        made.append(client.ApiClient(settings))
        return made[-1]

    return Cluster(connect, "ml")


@pytest.mark.parametrize("status", [429, 500, 503, CLOSED])
def test_what_is_transient_is_tried_again(scripted: Server, opened: Cluster, status: int) -> None:
    scripted.answers = [(status, "try later")]
    assert opened.get("Pod", "a") is not None
    assert len(scripted.tokens) == 2


def test_a_webhook_that_is_not_back_yet_is_waited_for(scripted: Server, opened: Cluster) -> None:
    scripted.answers = [(500, WEBHOOK)] * 2
    opened.create({"kind": "PyTorchJob", "metadata": {"name": "a"}})
    assert len(scripted.tokens) == 3


def test_a_webhook_that_stays_away_is_not_the_fault_of_what_was_to_be_created(
    scripted: Server, opened: Cluster
) -> None:
    scripted.answers = [(500, WEBHOOK)] * 100
    with pytest.raises(ClusterError) as caught:
        opened.call("POST", opened.path("Pod"), deadline=0.5)
    assert (caught.value.field, "operator" in str(caught.value.fix)) == ("target.connection", True)


@pytest.mark.parametrize("status", [400, 403, 422])
def test_what_is_refused_is_told_at_once(scripted: Server, opened: Cluster, status: int) -> None:
    scripted.answers = [(status, "not like that")]
    with pytest.raises(ClusterError, match="not like that") as caught:
        opened.get("Pod", "a")
    assert (caught.value.status, len(scripted.tokens)) == (status, 1)


def test_a_namespace_that_is_being_deleted_is_no_lack_of_rights(scripted: Server, opened: Cluster) -> None:
    said = "pods x is forbidden: unable to create new content in namespace ml because it is being terminated"
    scripted.answers = [(403, said)]
    with pytest.raises(ClusterError, match="being terminated") as caught:
        opened.create({"kind": "Pod", "metadata": {"name": "x"}})
    assert "target.namespace" in str(caught.value.fix)
    assert "Role" not in str(caught.value.fix)


def test_what_goes_while_it_is_created_anew_is_created(scripted: Server, opened: Cluster) -> None:
    scripted.answers = [(409, "object is being deleted: pods x already exists"), (404, "there is no x")]
    assert opened.create({"kind": "Pod", "metadata": {"name": "x"}}) == {"message": ""}
    assert len(scripted.tokens) == 3


def test_a_quota_that_others_use_at_the_same_moment_is_waited_for(scripted: Server, opened: Cluster) -> None:
    said = 'Operation cannot be fulfilled on resourcequotas "team": the object has been modified'
    scripted.answers = [(409, said)] * 2
    assert opened.create({"kind": "Pod", "metadata": {"name": "x"}}) == {"message": ""}
    assert scripted.calls == ["POST"] * 3


def test_a_token_that_is_refused_is_read_anew(scripted: Server, opened: Cluster) -> None:
    scripted.answers = [(401, "Unauthorized")]
    assert opened.get("Pod", "a") is not None
    assert scripted.tokens == ["Bearer 0", "Bearer 1"]


@pytest.mark.parametrize(
    ("answer", "told"),
    [((503, "overloaded"), "overloaded"), ((CLOSED, ""), "the API server does not answer")],
    ids=["busy", "silent"],
)
def test_no_call_is_tried_for_ever(
    scripted: Server, opened: Cluster, answer: tuple[int, str], told: str
) -> None:
    scripted.answers = [answer] * 100
    with pytest.raises(ClusterError, match=told):
        opened.call("GET", opened.path("Pod"), deadline=0.5)


def test_why_something_is_not_created_yet_is_told_once(
    scripted: Server, opened: Cluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_WARN_ATTEMPT", 2)
    scripted.answers = [(500, "failed calling webhook x: refused")] * 3
    opened.create({"kind": "Pod", "metadata": {"name": "x"}})
    (told,) = caplog.messages
    assert told == "POST /api/v1/namespaces/ml/pods: failed calling webhook x: refused: it is tried again"


def test_a_server_that_answers_with_a_page_is_no_api_server(
    opened: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "_call", lambda *_: b"<html>log in</html>")
    with pytest.raises(ClusterError, match=r"^target\.connection: GET .*/pods/a: .* no API server"):
        opened.get("Pod", "a")


@pytest.fixture
def kubeconfig(scripted: Server, tmp_path: Path) -> str:
    """Write a kubeconfig of the server, with a token; return its path."""
    named = {"name": "x", "cluster": {"server": scripted.url}, "user": {"token": "of-the-file"}}
    config: dict[str, Any] = {"kind": "Config", "clusters": [named], "users": [named]}
    config |= {"contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}], "current-context": "x"}
    path = tmp_path / "config"
    path.write_text(json.dumps(config))
    return str(path)


def test_a_kubeconfig_s_token_is_used(scripted: Server, kubeconfig: str) -> None:
    assert Cluster(lambda: connect(kubeconfig), "ml").get("Pod", "a") is not None
    assert scripted.tokens == ["Bearer of-the-file"]


def test_a_pod_s_own_account_comes_before_the_users_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    for name, text in (("TOKEN", "of-the-pod"), ("CERT", "a certificate")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(incluster_config, f"SERVICE_{name}_FILENAME", str(tmp_path / name))
    settings = connect().configuration
    assert settings.host == "https://10.0.0.1:443"
    (bearer,) = settings.auth_settings().values()
    assert bearer["value"].lower() == "bearer of-the-pod"


@pytest.mark.parametrize("content", ["- a\n", "clusters: 3\ncontexts: []\n", "a: [b\n"])
def test_a_file_that_is_no_kubeconfig_is_named_as_the_cause(content: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(
        ClusterError, match=r"^target\.connection: no cluster can be reached: this is no kubec"
    ):
        connect(str(tmp_path / "config"))


def test_a_proxy_of_an_unknown_kind_is_named_without_its_password(
    kubeconfig: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks9://me:password@proxy:80")
    with pytest.raises(ClusterError, match=r"scheme socks9.* HTTPS_PROXY=socks9://\*\*\*@proxy:80"):
        connect(kubeconfig)
