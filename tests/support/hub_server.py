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
_LFS_BYTES: Final = 1 << 20  # a file of this size is in LFS
BRANCHES: Final = (None, "main", "v1", "feature/x")
"""Revisions that name a repository's present commit."""


@dataclass
class Hub:
    """The content of the server, its planned faults, and the requests that it has received."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Name of a repository, as ``datasets/owner/name`` -> path -> content."""
    private: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    """Paths of files whose next answer breaks off in the middle."""
    reads: list[str] = field(default_factory=list)
    """Path of each file that was asked for, once for each request."""
    pushes: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    """Path of a file -> new content of repositories, which replaces the old one when that file is read."""
    damaged: set[str] = field(default_factory=set)
    """Paths of files whose bytes are sent in reverse order, so that they do not have the listed hash."""
    refusals: list[int | None] = field(default_factory=list)
    """HTTP statuses of the next answers to any request; None: the connection is closed instead."""
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The sha of each commit that a request named -> its files."""

    def commit(self, name: str) -> str:
        """Return the sha of a repository's present commit."""
        content = repr([(path, _oid(content)) for path, content in sorted(self.files[name].items())])
        sha = _oid(content.encode())
        self.commits[sha] = self.files[name]
        return sha


@contextmanager
def running() -> Iterator[Hub]:
    """Serve a Hub until the block ends. It has no repository at first; all have the branches ``BRANCHES``."""
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
        if self.hub.refusals:
            if (status := self.hub.refusals.pop(0)) is None:
                self.close_connection = True
            else:
                self._refuse(status, "Busy")
        elif asked := _API.fullmatch(url.path):
            kind, repository, what, revision, below = (group and unquote(group) for group in asked.groups())
            name = repository if kind == "models" else f"datasets/{repository}"
            if sha := self._commit(name, revision):
                entries = _entries(self.hub.commits[sha], (below or "").strip("/"))
                if what == "paths-info":
                    wanted = json.loads(body)["paths"]
                    self._answer([entry for entry in entries if entry["path"] in wanted])
                elif what == "tree":
                    self._answer_page(url.path, entries, parse_qs(url.query))
                else:
                    self._answer({"id": repository, "sha": sha, "siblings": [], "private": False})
        elif asked := _FILE.fullmatch(url.path):
            name, revision, file = map(unquote, asked.groups())
            if sha := self._commit(name, revision):
                self._send_file(file, self.hub.commits[sha].get(file), sha)
        else:
            self._refuse(404, "EntryNotFound")

    do_HEAD = do_POST = do_GET  # noqa: N815

    def _commit(self, name: str, revision: str | None) -> str | None:
        """Return the sha of a revision; None: the client may not see it, or it does not exist.

        In that case, the error answer was sent already.
        """
        may = name not in self.hub.private or self.headers["Authorization"] == f"Bearer {TOKEN}"
        if name not in self.hub.files or not may:
            self._refuse(401, "RepoNotFound")  # as the Hub does: it does not tell which of both
            return None
        if revision in BRANCHES:
            return self.hub.commit(name)
        if revision not in self.hub.commits:
            self._refuse(404, "RevisionNotFound")
            return None
        return revision

    def _answer_page(self, path: str, entries: list[dict[str, Any]], query: dict[str, list[str]]) -> None:
        """Send one page of a list, with a link to the next page if there is one."""
        begin = int(query.get("cursor", ["0"])[0])
        if query.get("recursive", ["False"])[0].lower() != "true":
            top = min((entry["path"].count("/") for entry in entries), default=0)
            entries = [entry for entry in entries if entry["path"].count("/") == top]
        rest = "&".join(f"{key}={value[0]}" for key, value in query.items() if key != "cursor")
        following = f'<{self.hub.url}{path}?{rest}&cursor={begin + _PAGE}>; rel="next"'
        links = {"Link": following} if begin + _PAGE < len(entries) else {}
        self._answer(entries[begin : begin + _PAGE], links)

    def _send_file(self, path: str, content: bytes | None, sha: str) -> None:
        """Send a file, or the range of it that the client wants; causes the faults planned for the file."""
        if content is None:
            self._refuse(404, "EntryNotFound")
            return
        asked = self.headers["Range"]
        if self.command == "GET":
            self.hub.reads.append(path)
            self.hub.files |= self.hub.pushes.pop(path, {})
        begin, end = 0, len(content)
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            begin, end = int(first), int(last) + 1 if last else len(content)
        part = (content[::-1] if path in self.hub.damaged else content)[begin:end]
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": sha}
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
        """Send an answer; only the first ``sent`` bytes of its body, if that is not None."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])


def _entries(files: dict[str, bytes], below: str) -> list[dict[str, Any]]:
    """List the files and folders below a folder at any depth, sorted by path; empty: the whole repository."""
    base = f"{below}/" if below else ""
    paths = {path: content for path, content in files.items() if f"{path}/".startswith(base)}
    parents = {str(parent) for path in paths for parent in PurePosixPath(path).parents} - {"."}
    folders = [parent for parent in parents if parent.startswith(base)]
    found: list[dict[str, Any]] = [
        {"type": "directory", "oid": "1" * 40, "size": 0, "path": path} for path in folders
    ]
    found += [
        {"type": "file", "oid": _oid(content), "size": len(content), "path": path, **_lfs(content)}
        for path, content in paths.items()
    ]
    return sorted(found, key=lambda entry: str(entry["path"]))


def _lfs(content: bytes) -> dict[str, Any]:
    """Return the fields that the Hub adds for a file of at least 1 MiB; empty for smaller files."""
    if len(content) < _LFS_BYTES:
        return {}
    return {"lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}}


def _oid(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
