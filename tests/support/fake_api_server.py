"""A fake API server for tests: objects of one namespace, and watches that report their changes."""

import itertools
import json
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client
from support.web_server import served

from manycpu.pipeline.spec.job_kinds import CORE_KINDS, resource_of, resources

Object = dict[str, Any]
_REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_NAMESPACE = "/namespaces/ml/"
_END = None
"""Queue item that ends a watch."""


class ApiError(Exception):
    """An error answer: a status and a message."""


class ApiServer:
    """The API server's state: the objects of one namespace, and the recorded calls."""

    def __init__(self) -> None:
        self.objects: dict[str, list[Object]] = {}
        """Kind -> objects."""
        self.logs: dict[str, str] = {}
        """Pod -> its log."""
        self.log_error = 0
        """HTTP status of the error that answers requests for logs; 0: the log is served."""
        self.refuses: set[str] = set()
        """Kinds whose GET requests are answered with 403 at present."""
        self.absent: set[str] = set()
        """Kinds that the cluster does not have: requests are answered with 404."""
        self.denied: set[str] = set()
        """What access reviews deny to the account: texts ``verb resource``, such as ``create jobs``."""
        self.calls: Counter[str] = Counter()
        """Number of requests by type: ``list KIND``, ``watch KIND``, ``get KIND``, ``log POD``."""
        self.created: list[str] = []
        """``kind/name`` of each created object."""
        self.tried: list[Object] = []
        """Objects that were created as a dry run."""
        self.deleted: list[str] = []
        """``kind/name`` of each deleted object."""
        self.url = ""
        self.lock = threading.RLock()
        """Held while objects change."""
        self._watches: list[tuple[str, queue.Queue[Object | None]]] = []  # the watched kind, and its changes
        self._version = itertools.count(2)
        self._latest = 1

    def connect(self) -> client.ApiClient:
        return client.ApiClient(client.Configuration(host=self.url))

    def put(self, kind: str, made: Object) -> Object:
        """Store a new or changed object, and notify the watches."""
        with self.lock:
            return self._put(kind, made)

    def _put(self, kind: str, made: Object) -> Object:
        there = self._named(kind, made["metadata"]["name"])
        version, now = next(self._version), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        meta = made["metadata"] | {"namespace": "ml", "resourceVersion": str(version)}
        self._latest = version
        born = {"uid": f"uid-{version:04}", "creationTimestamp": now}
        made = {"kind": kind} | made | {"metadata": born | meta}
        others = [one for one in self.objects.get(kind, []) if one is not there]
        self.objects[kind] = [*others, made]
        self._tell(kind, "MODIFIED" if there else "ADDED", made)
        return made

    def remove(self, kind: str, name: str) -> None:
        """Delete an object and everything that it owns, and notify the watches."""
        with self.lock:
            self._remove(kind, name)

    def _remove(self, kind: str, name: str) -> None:
        there = self._named(kind, name)
        assert there is not None
        self.objects[kind] = [one for one in self.objects[kind] if one is not there]
        self.deleted.append(f"{kind}/{name}")
        self._tell(kind, "DELETED", there)
        for other, owned in [(k, one) for k, found in self.objects.items() for one in found]:
            owners = owned["metadata"].get("ownerReferences", ())
            if there["metadata"].get("uid") in [owner["uid"] for owner in owners]:
                self.remove(other, owned["metadata"]["name"])

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer an HTTP request, by its path and method; an ApiError becomes an error answer."""
        body = handler.rfile.read(int(handler.headers["Content-Length"] or 0))
        try:
            self._answer(handler, json.loads(body or b"{}"))
        except ApiError as error:
            status, message = error.args
            _send(handler, status, json.dumps({"message": message}))

    def _answer(self, handler: BaseHTTPRequestHandler, body: Object) -> None:
        asked = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(asked.query).items()}
        if _NAMESPACE not in asked.path:
            _send(handler, 200, json.dumps(self._of_cluster(asked.path, body)))
            return
        plural, *rest = asked.path.split(_NAMESPACE)[1].split("/")
        kind = self._kind(plural)
        if kind in self.refuses and handler.command == "GET":
            raise ApiError(403, f"no {plural} at present")
        if rest[1:] == ["log"]:
            self.calls[f"log {rest[0]}"] += 1
            self._log(handler, rest[0], query)
        elif "watch" in query:
            self._watch(handler, kind, int(query.get("resourceVersion") or self._latest))
        else:
            act = getattr(self, f"_{handler.command.lower()}")
            with self.lock:
                answered = act(kind, rest[0] if rest else "", query, body)
            _send(handler, 200, json.dumps(answered))

    def _log(self, handler: BaseHTTPRequestHandler, pod: str, _: dict[str, str]) -> None:
        if self.log_error:
            raise ApiError(self.log_error, "the kubelet does not answer")
        _send(handler, 200, self.logs.get(pod, ""))

    def _kind(self, plural: str) -> str:
        kind = next(k for k in (*CORE_KINDS, *resources()) if resource_of(k).plural == plural)
        if kind in self.absent:
            raise ApiError(404, "the server could not find the requested resource")
        return kind

    def _of_cluster(self, path: str, body: Object) -> Object:
        """Answer a request outside of the namespace: an access review, or the resources of an API group."""
        if path == _REVIEW:
            asked = body["spec"]["resourceAttributes"]
            resource = "/".join(filter(None, [asked["resource"], asked["subresource"]]))
            return {"status": {"allowed": f"{asked['verb']} {resource}" not in self.denied}}
        there = [one for one in resources().values() if one.path == path and one.kind not in self.absent]
        if path.startswith("/apis/") and not there:
            raise ApiError(404, "the server could not find the requested resource")
        return {"items": [], "resources": [{"name": one.plural} for one in there]}

    def _get(self, kind: str, name: str, query: dict[str, str], _: Object) -> Object:
        """Return an object, or, if ``name`` is empty, the list of those that match the label selector."""
        if name:
            self.calls[f"get {kind}"] += 1
            return self._there(kind, name)
        self.calls[f"list {kind}"] += 1
        version = str(self._latest)
        wanted = [pair.split("=") for pair in query.get("labelSelector", "").split(",") if pair]
        items = [
            one
            for one in self.objects.get(kind, [])
            if all(one["metadata"].get("labels", {}).get(key) == value for key, value in wanted)
        ]
        return {"metadata": {"resourceVersion": version}, "items": items}

    def _post(self, kind: str, _: str, query: dict[str, str], body: Object) -> Object:
        name = body["metadata"]["name"]
        if "dryRun" in query:
            self.tried.append(body)
            return body
        if self._named(kind, name):
            raise ApiError(409, f"{name} already exists")
        self.created.append(f"{kind}/{name}")
        return self.put(kind, body)

    def _patch(self, kind: str, name: str, _: dict[str, str], body: Object) -> Object:
        """Merge a patch into an object; a conflict (409) if the patch names another uid or version of it."""
        there = self._there(kind, name)
        for key in ("uid", "resourceVersion"):
            if body.get("metadata", {}).get(key, there["metadata"][key]) != there["metadata"][key]:
                raise ApiError(409, f"{name} has changed")
        return self.put(kind, _merged(there, body))

    def _delete(self, kind: str, name: str, _: dict[str, str], body: Object) -> Object:
        uid = self._there(kind, name)["metadata"].get("uid")
        if body.get("preconditions", {}).get("uid", uid) != uid:
            raise ApiError(409, f"{name} is another one")
        self.remove(kind, name)
        return {}

    def _there(self, kind: str, name: str) -> Object:
        """Return an object that must exist: else the answer is 404."""
        if (there := self._named(kind, name)) is None:
            raise ApiError(404, "not found")
        return there

    def _named(self, kind: str, name: str) -> Object | None:
        return next((one for one in self.objects.get(kind, []) if one["metadata"]["name"] == name), None)

    def _watch(self, handler: BaseHTTPRequestHandler, kind: str, since: int) -> None:
        """Send the changes of a kind after version ``since``, until the server ends."""
        self.calls[f"watch {kind}"] += 1
        told: queue.Queue[Object | None] = queue.Queue()
        with self.lock:
            self._watches.append((kind, told))
            for changed in self.objects.get(kind, []):  # changes between the list and its watch
                if int(changed["metadata"].get("resourceVersion", 0)) > since:
                    told.put({"type": "MODIFIED", "object": changed})
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.flush()
        while (one := told.get()) is not _END:
            handler.wfile.write(json.dumps(one).encode() + b"\n")

    def _tell(self, kind: str, what: str, one: Object) -> None:
        """Send an object to all watches of its kind; ``what`` is the type of the change, such as ADDED."""
        for watched, told in self._watches:
            if watched == kind:
                told.put({"type": what, "object": one})

    def end_watches(self) -> None:
        for _, told in self._watches:
            told.put(_END)


@contextmanager
def running() -> Iterator[ApiServer]:
    """Run an API server with the namespace ``ml`` until the block ends; yield its state."""
    made = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.answer(self)

        do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815 - names that http.server calls

        def log_message(self, *_: object) -> None:
            pass

    with served(Handler) as host:
        made.url = f"http://{host}"
        try:
            yield made
        finally:
            made.end_watches()


def _merged(there: Any, change: Any) -> Any:
    """Apply a JSON merge patch."""
    if not isinstance(there, dict) or not isinstance(change, dict):
        return change
    merged = there | {key: _merged(there.get(key), value) for key, value in change.items()}
    return {key: value for key, value in merged.items() if value is not None}


def _send(handler: BaseHTTPRequestHandler, status: int, text: str) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(text.encode())))
    handler.end_headers()
    handler.wfile.write(text.encode())
