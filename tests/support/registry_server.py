"""A real OCI registry on loopback: Debian's docker-registry, open or with basic auth, tokens or TLS."""

import base64
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest
import requests
import trustme
import yaml
from cluster import debian
from cluster.command import MissingError
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from support.rank_launches import free_port
from support.waiting import until
from support.web_server import served

USER, PASSWORD = "tester", "not-a-secret"
_BCRYPT = "$2b$05$abcdefghijklmnopqrstuuVPNOToLP9MHdthRCXkVoiIF0qNKnk2G"
Settings = dict[str, Any]


@contextmanager
def running(folder: Path, settings: Settings | None = None, ca: Path | None = None) -> Iterator[str]:
    """Run a registry with its images in a folder; yield host:port. Skips the test if no registry can run.

    ``settings`` are more sections of its configuration; ``ca`` is the authority's certificate for TLS.
    """
    try:
        debian.ensure()
    except MissingError as error:
        pytest.skip(f"no registry here: {error}")
    folder.mkdir(parents=True, exist_ok=True)
    host = f"127.0.0.1:{free_port()}"
    config: Settings = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "images")}, "delete": {"enabled": True}},
        "http": {"addr": host},
    }
    for section, more in (settings or {}).items():
        config[section] = {**config.get(section, {}), **more}
    (folder / "registry.yaml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [debian.program("docker-registry"), "serve", folder / "registry.yaml"], stdout=log, stderr=log
        )
        try:
            until(lambda: _answers(host, ca))
            yield host
        finally:
            process.terminate()
            process.wait(300)


def basic(folder: Path) -> Settings:
    """Return settings of a registry that requires a user name and a password."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "htpasswd").write_text(f"{USER}:{_BCRYPT}\n")
    return {"auth": {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}}


def tls(folder: Path) -> tuple[Settings, Path]:
    """Return settings of a registry with TLS, and the certificate file of its authority."""
    folder.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    files = {"certificate": str(folder / "cert.pem"), "key": str(folder / "key.pem")}
    return {"http": {"tls": files}}, folder / "ca.pem"


class Tokens:
    """A token server: anonymous clients may pull, logged-in clients may push too.

    ``asked`` has the scopes of each request. ``seconds`` is how long a token is valid.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        authority = trustme.CA()
        certificate = authority.issue_cert("tokens.test")
        authority.cert_pem.write_to_path(str(folder / "tokens.pem"))
        self._bundle = folder / "tokens.pem"
        self._key = certificate.private_key_pem.bytes()
        chain = x509.load_pem_x509_certificate(certificate.cert_chain_pems[0].bytes())
        self._chain = [base64.b64encode(chain.public_bytes(serialization.Encoding.DER)).decode()]
        self.asked: list[list[str]] = []
        self.seconds = 300
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def settings(self) -> Settings:
        """Settings of a registry that uses this token server."""
        realm = f"http://127.0.0.1:{self._server.server_port}/token"
        known = {"realm": realm, "service": "tests", "issuer": "tests", "rootcertbundle": str(self._bundle)}
        return {"auth": {"token": known}}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        answer = self._answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = answer(self.path, self.headers.get("Authorization"))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        return Handler

    def _answer(self, path: str, authorization: str | None) -> tuple[int, object]:
        pair = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if authorization not in (None, f"Basic {pair}"):
            return 401, {"errors": [{"code": "UNAUTHORIZED", "message": "wrong password"}]}
        scopes = parse_qs(urlsplit(path).query).get("scope", [])
        self.asked.append(scopes)
        return 200, {"token": self._token(scopes, may_push=authorization is not None)}

    def _token(self, scopes: list[str], *, may_push: bool) -> str:
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            granted = [action for action in actions.split(",") if may_push or action == "pull"]
            access.append({"type": kind, "name": name, "actions": granted})
        now = int(time.time())
        claims = {"iss": "tests", "sub": "", "aud": "tests", "iat": now, "nbf": now - 60, "jti": "1"}
        claims |= {"exp": now + self.seconds, "access": access}
        return jwt.encode(claims, self._key, algorithm="ES256", headers={"x5c": self._chain})


@contextmanager
def flaky(host: str, fails: Callable[[str, str], bool]) -> Iterator[str]:
    """Run a proxy of a registry that drops the connection of each call for which ``fails`` returns true."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if not fails(handler.command, handler.path):
            pass_on(host, handler)
            return
        handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        handler.connection.shutdown(socket.SHUT_RDWR)
        handler.close_connection = True

    with relayed(answer) as relay:
        yield relay


@contextmanager
def relayed(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Run a proxy that answers each request by ``answer``; yield its host:port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _relay(self) -> None:
            answer(self)

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _relay  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with served(Handler) as relay:
        yield relay


def pass_on(host: str, handler: BaseHTTPRequestHandler) -> None:
    """Answer a request by sending it to the registry at ``host``, without TLS."""
    body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    headers = {name: value for name, value in handler.headers.items() if name != "Connection"}
    answer = requests.request(
        handler.command, f"http://{host}{handler.path}", data=body, headers=headers, timeout=300
    )
    handler.send_response(answer.status_code)
    for name, value in answer.headers.items():
        if name.lower() not in ("content-length", "transfer-encoding", "connection"):
            handler.send_header(name, value)
    content = answer.headers.get("Content-Length") if handler.command == "HEAD" else len(answer.content)
    handler.send_header("Content-Length", str(content))
    handler.end_headers()
    handler.wfile.write(answer.content)


def _answers(host: str, ca: Path | None) -> bool:
    url = f"{'https' if ca else 'http'}://{host}/v2/"
    try:
        return requests.get(url, timeout=2, verify=str(ca) if ca else True).status_code in (200, 401)
    except requests.ConnectionError:
        return False
