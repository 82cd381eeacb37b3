"""A real S3 server on loopback: versitygw, over a folder; and a proxy before it that causes faults.

versitygw is compiled when the first test needs it.
"""

import http.client
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit
from xml.sax.saxutils import escape

import fsspec
import pytest
import requests
from cluster import go
from cluster.command import ClusterError
from cluster.modules import Module
from support.rank_launches import free_port
from support.registry_server import tls
from support.waiting import until
from support.web_server import served

KEY, SECRET = "tester", "not-a-secret"
Fault = Literal["slow down", "cut", "half", "lost"]
"""What the proxy does: answer 503, end the connection at once, end it after half of the answer, or pass the
request on but end the connection without an answer."""
Rule = Callable[[str], Fault | None]
"""Chooses the fault of a request, such as ``GET /bucket/key bytes=0-99``; None: no fault."""
_OF_THE_CONNECTION = ("Connection", "Transfer-Encoding")
_SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class VersityGW(Module):
    """The S3 server's Go module, whose folder is not among the cluster's modules."""

    @property
    def folder(self) -> Path:
        return Path(__file__).with_name("versitygw")


SERVER = VersityGW("versitygw", "1.8")


@dataclass(frozen=True)
class Server:
    """A running S3 server."""

    url: str
    folder: Path
    """Holds a folder for each bucket."""
    authority: Path | None = None
    """The file with the certificate of its authority; None: it has no TLS."""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which a client finds the server and logs in."""
        bundle = {"AWS_CA_BUNDLE": str(self.authority)} if self.authority else {}
        return bundle | {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.url,
        }

    def client(self, key: str = KEY, secret: str = SECRET) -> Any:
        """Return a new file system of fsspec for the server, which caches nothing."""
        return fsspec.filesystem(
            "s3",
            key=key,
            secret=secret,
            endpoint_url=self.url,
            client_kwargs={"verify": str(self.authority) if self.authority else None},
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def add_user(self, name: str) -> None:
        """Add a user without rights, whose secret is the name."""
        words = ["--access", KEY, "--secret", SECRET, "--endpoint-url", self.url, "create-user"]
        words += ["--access", name, "--secret", name, "--role", "user"]
        subprocess.run([_program(), "admin", *words], check=True, capture_output=True)


def _program() -> Path:
    """Return the S3 server's program; compile it if it does not exist."""
    if not SERVER.built.exists():
        part = SERVER.built.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        go.install(SERVER, part / "bin", part / "go")
        shutil.rmtree(part / "go")
        part.rename(SERVER.built)
    return SERVER.program("versitygw")


@contextmanager
def running(folder: Path, *, address: str = "127.0.0.1", with_tls: bool = False) -> Iterator[Server]:
    """Run an S3 server with its buckets in a folder, at an address of this machine.

    Skips the test if it cannot be compiled here.
    """
    try:
        program = _program()
    except ClusterError as error:
        pytest.skip(f"no S3 server here: {error}")
    places = {name: folder / name for name in ("buckets", "versions", "users")}
    for place in places.values():
        place.mkdir(parents=True)
    host, options, authority = f"{address}:{free_port()}", ["--quiet", "--health", "/health"], None
    if with_tls:
        settings, authority = tls(folder)
        files = settings["http"]["tls"]
        options += ["--cert", files["certificate"], "--key", files["key"]]
    command: list[str | Path] = [program, "--port", host, "--access", KEY, "--secret", SECRET, *options]
    command += ["--iam-dir", places["users"], "posix", "--versioning-dir", places["versions"]]
    server = Server(f"{'https' if with_tls else 'http'}://{host}", places["buckets"], authority)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, server.folder], stdout=log, stderr=log)
        try:
            until(lambda: _answers(server))
            yield server
        finally:
            process.terminate()
            process.wait(300)


def _answers(server: Server) -> bool:
    try:
        return requests.get(f"{server.url}/health", verify=str(server.authority), timeout=60).ok
    except requests.ConnectionError:
        return False


class Proxy:
    """Passes requests on to an S3 server without TLS, unless ``rule`` names a fault; records all requests."""

    def __init__(self, server: Server) -> None:
        self.behind = urlsplit(server.url).netloc
        self.server = server
        """The server with the URL of the proxy, for clients."""
        self.rule: Rule = lambda _: None
        self.requests: list[str] = []


class _Passing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = f"{self.command} {self.path} {self.headers.get('Range', '')}".rstrip()
        self.proxy.requests.append(request)
        fault = self.proxy.rule(request)
        if fault == "cut":
            self.close_connection = True
        elif fault == "slow down":
            self._send(503, {}, _SLOW_DOWN, len(_SLOW_DOWN))
        else:
            status, headers, content = self._ask(body)
            if fault == "lost":
                self.close_connection = True
                return
            self._send(status, headers, content, len(content) // 2 if fault == "half" else len(content))

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send the request to the server; return status, headers and body of its answer."""
        with closing(http.client.HTTPConnection(self.proxy.behind, timeout=300)) as server:
            server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                server.putheader(name, value)
            server.endheaders(body)
            response = server.getresponse()
            return response.status, dict(response.getheaders()), response.read()

    def _send(self, status: int, headers: dict[str, str], content: bytes, count: int) -> None:
        """Answer with the first ``count`` bytes of ``content``; if more are left, end the connection."""
        kept = {name: value for name, value in headers.items() if name not in _OF_THE_CONNECTION}
        if self.command != "HEAD":
            kept["Content-Length"] = str(len(content))
        self.send_response_only(status)
        for name, value in kept.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:count])
        self.close_connection = self.close_connection or count < len(content)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def proxy(server: Server) -> Iterator[Proxy]:
    """Run a proxy in front of a server until the block ends."""
    made = Proxy(server)
    with served(type("Handler", (_Passing,), {"proxy": made})) as host:
        made.server = replace(server, url=f"http://{host}")
        yield made


@contextmanager
def listing(keys: Sequence[str], sizes: Callable[[str], int] = lambda _: 1) -> Iterator[Server]:
    """Run a stand-in for S3 that lists keys in pages; all bytes of its objects are 0.

    Keys may be names that no folder can hold. ``sizes`` returns the size of the object of a key in bytes.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = dict(parse_qsl(urlsplit(self.path).query))
            content = self._page(query).encode() if "list-type" in query else bytes(self._size())
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _page(self, query: dict[str, str]) -> str:
            begin = int(query.get("continuation-token", 0))
            below = [key for key in keys if key.startswith(query.get("prefix", ""))]
            end = begin + 1000
            parts = ["<ListBucketResult>", f"<IsTruncated>{'true' if below[end:] else 'false'}</IsTruncated>"]
            parts.append(f"<NextContinuationToken>{end}</NextContinuationToken>")
            for number, key in enumerate(below[begin:end], begin):
                parts.append(f'<Contents><Key>{escape(key)}</Key><ETag>"{number:032x}"</ETag>')
                parts.append("<LastModified>2026-01-01T00:00:00.000Z</LastModified>")
                parts.append(f"<Size>{sizes(key)}</Size><StorageClass>STANDARD</StorageClass></Contents>")
            return "".join([*parts, "</ListBucketResult>"])

        def do_HEAD(self) -> None:
            size = self._size()
            self.send_response(200 if size else 404)
            self.send_header("Content-Length", str(size))
            self.end_headers()

        def _size(self) -> int:
            """Return the size of the object that a request names; 0: there is none."""
            return next((sizes(key) for key in keys if self.path.endswith(f"/{key}")), 0)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with served(Handler) as host:
        yield Server(f"http://{host}", Path())
