"""Faults at requests: a server counts the requests that it answers, and causes a fault at one of them.

kill        the command is killed before the request is handled
kill-done   the command is killed after the request took effect, and gets no answer
reset       the connection is reset before the request is handled
lost        the connection is reset after the request took effect
cut         the connection ends in the middle of the answer's body
ends        the connection ends after the answer's headers
silence     the answer comes only some seconds after the ranks have ended
a status    the request is refused with this HTTP status, once
replaced    an object that the request deletes is first replaced by another user's, of the same name

Harmless faults, which must change nothing:

slow        this answer and all later ones take a while
bystander   a pod of another user is deleted
touched     a ConfigMap of another user is changed

Other commands on the same run, which run to their end before the request is answered:

beside run, beside clean, beside cancel
"""

import io
import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

CRASHES: Final = ("kill", "kill-done")
_STATUSES: Final = ("429", "500", "503", "504")
_OF_CHANGES: Final = ("reset", "lost", "cut", *_STATUSES)
_OF_READS: Final = ("reset", "cut")
_ENDLESS: Final = (*_OF_READS, "ends", "410")
HARMLESS: Final = ("slow", "bystander", "touched")
BESIDE: Final = ("beside run", "beside clean", "beside cancel")
_SLOW_S: Final = 0.05
_DELETION: Final = re.compile(r"DELETE (\w+)/(\S+) #")
_CHANGE: Final = re.compile(r"(registry )?(POST|PATCH|PUT|DELETE) (?!selfsubject|.*dryRun)")


def faults_of(request: str) -> Sequence[str]:
    """List the errors that a request may meet; the number of a read decides which HTTP status it may meet.

    >>> faults_of("GET pods/a #1"), faults_of("GET pods?watch=true #2")
    (['reset', 'cut', '500'], ['reset', 'cut', 'ends', '410', '503'])
    >>> faults_of("DELETE pods/a #1")[-1]
    'replaced'
    """
    if is_change(request):
        more = "replaced" if request.startswith("DELETE") else "409"
        return [*_OF_CHANGES, *([] if request.startswith("registry") else [more])]
    number = int(request.rpartition("#")[2])
    usual = _ENDLESS if "watch=" in request or "/log?" in request else _OF_READS
    silent = ["silence"] if "/log?" in request else []  # for others, the ranks would never end
    return [*usual, *silent, _STATUSES[number % len(_STATUSES)]]


def object_of(request: str) -> tuple[str, str]:
    """Return the plural of the kind and the name of the object that a request deletes.

    >>> object_of("DELETE pods/a #1")
    ('pods', 'a')
    """
    found = _DELETION.match(request)
    assert found
    return found[1], found[2]


def is_change(request: str) -> bool:
    """Whether a request changes an object or an image; dry runs and reviews of rights do not.

    >>> is_change("PATCH configmaps/a #1"), is_change("POST pods?dryRun=All #1")
    (True, False)
    """
    return _CHANGE.match(request) is not None


class Requests:
    """Counts the requests to a server, and causes a fault at one of them.

    Args:
        effects: Name of a fault -> function that causes it, given the request. Only for faults that are
            no errors of the connection.
    """

    def __init__(self, effects: Mapping[str, Callable[[str], None]]) -> None:
        self._effects, self._lock = effects, threading.Lock()
        self.plan()

    def plan(self, fault: str = "", request: str = "") -> None:
        """Begin to count; plan a fault at a request with a name as in ``seen``; empty: no fault."""
        self.seen: list[str] = []
        """The requests so far: the name of each, and its number among those of the same name."""
        self.struck = False
        """Whether the fault has happened."""
        self._fault, self._request, self._delay_s = fault, request, 0.0
        self._counts: Counter[str] = Counter()

    def answer(self, handler: BaseHTTPRequestHandler, request: str, act: Callable[[], None]) -> None:
        """Answer a request by ``act``, or cause the planned fault if it is at this request."""
        with self._lock:
            self._counts[request] += 1
            self.seen.append(f"{request} #{self._counts[request]}")
            strikes = bool(self._fault) and self.seen[-1] == self._request
            self.struck = self.struck or strikes
        if strikes and self._fault == "slow":
            self._delay_s = _SLOW_S
        time.sleep(self._delay_s)
        with suppress(ConnectionError):
            if not strikes or self._fault == "slow":
                act()
            elif self._fault in self._effects and self._fault != "kill":
                self._effects[self._fault](self._request)
                act()
            else:
                self._cause(self._fault, handler, act)

    def _cause(self, fault: str, handler: BaseHTTPRequestHandler, act: Callable[[], None]) -> None:
        """Cause a fault of the connection, a refusal, or the end of the command."""
        handler.close_connection = True
        if fault.isdecimal():
            handler.rfile.read(int(handler.headers["Content-Length"] or 0))
            _refuse(handler, int(fault))
            return
        if fault in ("lost", "kill-done"):
            real, handler.wfile = handler.wfile, io.BytesIO()
            act()
            handler.wfile = real
        elif fault in ("cut", "ends"):
            handler.wfile = _Cut(handler, body=fault == "cut")
            act()
        if fault in CRASHES:
            self._effects["kill"](self._request)
        _reset(handler.connection)


class _Cut(io.BufferedIOBase):
    """Writes an answer's headers, and half of the next block if ``body``; then ends the connection."""

    def __init__(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        self._out, self._connection = handler.wfile, handler.connection
        self._body, self._has_headers = body, False

    def writable(self) -> bool:
        return True

    def write(self, block: Any) -> int:
        if not self._has_headers:
            self._has_headers = True
            return self._out.write(block)
        if self._body:
            self._out.write(block[: len(block) // 2])
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError


def _refuse(handler: BaseHTTPRequestHandler, status: int) -> None:
    body = json.dumps({"kind": "Status", "code": status, "message": f"{status} of a test"}).encode()
    handler.send_response(status)
    if status == 429:
        handler.send_header("Retry-After", "1")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _reset(connection: socket.socket) -> None:
    """Close a connection at once: the client gets a reset, and bytes that it has not read are lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
