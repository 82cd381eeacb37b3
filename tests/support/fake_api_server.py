"""An API server of a test's own: it lists what it has, and its watches are silent until the test speaks."""

import json
import queue
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client
from support.web_server import served

from manycpu.pipeline.adapters.cluster import KINDS

__all__ = ["ApiServer", "running"]

Object = dict[str, Any]
_KIND = {plural: kind for kind, (_, plural) in KINDS.items()}
_END = None
"""Ends a watch."""


class ApiServer:
    """Objects of one namespace."""

    def __init__(self) -> None:
        self.objects: dict[str, list[Object]] = {}
        """Kind -> objects."""
        self.logs: dict[str, str] = {}
        """Pod -> its log."""
        self.refuses: set[str] = set()
        """Kinds of which nothing is told at present."""
        self.calls: Counter[str] = Counter()
        """How often was asked for: ``list KIND``, ``watch KIND``, ``get KIND``, ``log POD``."""
        self.deleted: list[str] = []
        """``kind/name`` of what was deleted."""
        self.url = ""
        self._watches: list[queue.Queue[Object | None]] = []

    def connect(self) -> client.ApiClient:
        return client.ApiClient(client.Configuration(host=self.url))

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        asked = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(asked.query).items()}
        plural, *rest = asked.path.split("/namespaces/ml/")[1].split("/")
        kind = _KIND[plural]
        if kind in self.refuses:
            _send(handler, 403, json.dumps({"message": f"no {plural} at present"}))
        elif rest[1:] == ["log"]:
            self.calls[f"log {rest[0]}"] += 1
            _send(handler, 200, self.logs.get(rest[0], ""))
        elif rest:
            self._get(handler, kind, rest[0])
        elif "watch" in query:
            self._watch(handler, kind)
        else:
            self.calls[f"list {kind}"] += 1
            page = {"metadata": {"resourceVersion": "1"}, "items": self.objects.get(kind, [])}
            _send(handler, 200, json.dumps(page))

    def _get(self, handler: BaseHTTPRequestHandler, kind: str, name: str) -> None:
        self.calls[f"get {kind}"] += 1
        there = [one for one in self.objects.get(kind, []) if one["metadata"]["name"] == name]
        _send(handler, 200 if there else 404, json.dumps(there[0] if there else {"message": "not found"}))

    def _watch(self, handler: BaseHTTPRequestHandler, kind: str) -> None:
        self.calls[f"watch {kind}"] += 1
        told: queue.Queue[Object | None] = queue.Queue()
        self._watches.append(told)
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.flush()
        while (one := told.get()) is not _END:
            handler.wfile.write(json.dumps(one).encode() + b"\n")

    def delete(self, handler: BaseHTTPRequestHandler) -> None:
        plural, name = handler.path.split("/namespaces/ml/")[1].split("/")
        kind = _KIND[plural]
        self.deleted.append(f"{kind}/{name}")
        self.objects[kind] = [one for one in self.objects[kind] if one["metadata"]["name"] != name]
        _send(handler, 200, "{}")

    def end_watches(self) -> None:
        for told in self._watches:
            told.put(_END)


@contextmanager
def running() -> Iterator[ApiServer]:
    """Serve the namespace ``ml``."""
    made = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.answer(self)

        def do_DELETE(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            made.delete(self)

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as host:
        made.url = f"http://{host}"
        try:
            yield made
        finally:
            made.end_watches()


def _send(handler: BaseHTTPRequestHandler, status: int, text: str) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(text.encode())))
    handler.end_headers()
    handler.wfile.write(text.encode())
