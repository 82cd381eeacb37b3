"""A small server with the part of the Hub's API that reads models and data sets, for its real client."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

from support.web_server import served

TOKEN: Final = "hf_" + "stands" * 5
_API: Final = re.compile(
    r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(/.*)?)?"
)
_FILE: Final = re.compile(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_PAGE: Final = 5  # entries of a list


@dataclass
class Hub:
    """What it has, and what it was asked."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Name of a repository, as ``datasets/owner/name`` -> path -> content."""
    private: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    """Paths of files whose next answer breaks off in the middle."""
    reads: list[str] = field(default_factory=list)
    """Path of each file that was asked for, once for each request."""


@contextmanager
def running() -> Iterator[Hub]:
    """Serve a Hub, at first without a repository, whose revisions are ``main`` and ``v1``."""
    hub = Hub()
    with served(type("Handler", (_Handler,), {"hub": hub})) as host:
        hub.url = f"http://{host}"
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        path = unquote(url.path)
        if asked := _API.fullmatch(path):
            kind, repository, what, revision, below = asked.groups()
            name = repository if kind == "models" else f"datasets/{repository}"
            if self._is_there(name, revision):
                entries = _entries(self.hub.files[name], (below or "").strip("/"))
                if what == "paths-info":
                    wanted = json.loads(body)["paths"]
                    self._answer([entry for entry in entries if entry["path"] in wanted])
                elif what == "tree":
                    self._answer_page(url.path, entries, parse_qs(url.query))
                else:
                    self._answer({"id": repository, "sha": "0" * 40, "siblings": [], "private": False})
        elif asked := _FILE.fullmatch(path):
            name, revision, file = asked.groups()
            if self._is_there(name, revision):
                self._send_file(file, self.hub.files[name].get(file))
        else:
            self._refuse(404, "EntryNotFound")

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _is_there(self, name: str, revision: str | None) -> bool:
        """Whether the repository and its revision are there for the caller; else it is answered."""
        may = name not in self.hub.private or self.headers["Authorization"] == f"Bearer {TOKEN}"
        if name not in self.hub.files or not may:
            self._refuse(401, "RepoNotFound")  # as the Hub does: it does not tell which of both
            return False
        if revision not in (None, "main", "v1"):
            self._refuse(404, "RevisionNotFound")
            return False
        return True

    def _answer_page(self, path: str, entries: list[dict[str, Any]], query: dict[str, list[str]]) -> None:
        begin = int(query.get("cursor", ["0"])[0])
        if query.get("recursive", ["False"])[0].lower() != "true":
            top = min((entry["path"].count("/") for entry in entries), default=0)
            entries = [entry for entry in entries if entry["path"].count("/") == top]
        rest = "&".join(f"{key}={value[0]}" for key, value in query.items() if key != "cursor")
        following = f'<{self.hub.url}{path}?{rest}&cursor={begin + _PAGE}>; rel="next"'
        links = {"Link": following} if begin + _PAGE < len(entries) else {}
        self._answer(entries[begin : begin + _PAGE], links)

    def _send_file(self, path: str, content: bytes | None) -> None:
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        asked = self.headers["Range"]
        if self.command == "GET":
            self.hub.reads.append(path)
        begin, end = 0, len(content)
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            begin, end = int(first), int(last) + 1 if last else len(content)
        part = content[begin:end]
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": "0" * 40}
        if asked:
            headers["Content-Range"] = f"bytes {begin}-{begin + len(part) - 1}/{len(content)}"
        sent = None
        if path in self.hub.cut and self.command == "GET":
            self.hub.cut.discard(path)
            sent = len(part) // 2
            self.close_connection = True
        self._send(206 if asked else 200, part, headers, sent)

    def _answer(self, content: Any, headers: dict[str, str] | None = None) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])


def _entries(files: dict[str, bytes], below: str) -> list[dict[str, Any]]:
    """List the files and folders below a folder, each folder before what it has."""
    base = f"{below}/" if below else ""
    paths = {path: content for path, content in files.items() if f"{path}/".startswith(base)}
    parents = {str(parent) for path in paths for parent in PurePosixPath(path).parents} - {"."}
    folders = [parent for parent in parents if parent.startswith(base)]
    found: list[dict[str, Any]] = [
        {"type": "directory", "oid": "1" * 40, "size": 0, "path": path} for path in folders
    ]
    found += [
        {"type": "file", "oid": _oid(content), "size": len(content), "path": path}
        for path, content in paths.items()
    ]
    return sorted(found, key=lambda entry: str(entry["path"]))


def _oid(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
