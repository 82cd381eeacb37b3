"""Faults at requests: the server that answers them counts them, and causes one fault at one of them.

kill        the command is killed before the request is handled
kill-done   the same after it took effect; there is no answer
reset       the connection is reset before the request is handled
lost        the same after it took effect
cut         the connection ends in the middle of the answer's body
ends        the answer ends before its body
silence     there is no answer, until the client gives up
a status    the request is refused with it, once
"""

import io
import json
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

CRASHES: Final = ("kill", "kill-done")
_STATUSES: Final = ("429", "500", "503", "504")
_OF_CHANGES: Final = ("reset", "lost", "cut", *_STATUSES)
_OF_READS: Final = ("reset", "cut")
_ENDLESS: Final = (*_OF_READS, "ends", "410")
_CHANGE: Final = re.compile(r"(registry )?(POST|PATCH|PUT|DELETE) (?!selfsubject|.*dryRun)")


def faults_of(request: str) -> Sequence[str]:
    """List the errors that a request may meet; reads meet all statuses in turn.

    >>> faults_of("GET pods/a #1"), faults_of("GET pods?watch=true #2")
    (['reset', 'cut', '500'], ['reset', 'cut', 'ends', '410', '503'])
    """
    if is_change(request):
        return [*_OF_CHANGES, *(["409"] if request.startswith(("POST", "PATCH")) else [])]
    number = int(request.rpartition("#")[2])
    usual = _ENDLESS if "watch=" in request or "/log?" in request else _OF_READS
    silent = ["silence"] if "/log?" in request else []  # others are silent for half a minute
    return [*usual, *silent, _STATUSES[number % len(_STATUSES)]]


def is_change(request: str) -> bool:
    """Whether a request changes something.

    >>> is_change("PATCH configmaps/a #1"), is_change("POST pods?dryRun=All #1")
    (True, False)
    """
    return _CHANGE.match(request) is not None


class Requests:
    """Counts the requests to a server, and causes a fault at one of them.

    Args:
        kill: Kills the command that sends the requests.
    """

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill, self._lock = kill, threading.Lock()
        self.plan()

    def plan(self, fault: str = "", request: str = "") -> None:
        """Begin to count; plan a fault at a request, as ``seen`` names it."""
        self.seen: list[str] = []
        """Each request, with its number among those that are the same."""
        self.struck = False
        """Whether the fault has happened."""
        self._fault, self._request = fault, request
        self._counts: Counter[str] = Counter()

    def answer(self, handler: BaseHTTPRequestHandler, request: str, act: Callable[[], None]) -> None:
        """Answer a request by ``act``, or with the fault."""
        with self._lock:
            self._counts[request] += 1
            self.seen.append(f"{request} #{self._counts[request]}")
            strikes = self._fault and self.seen[-1] == self._request
            self.struck = self.struck or bool(strikes)
        with suppress(ConnectionError):
            if strikes:
                self._cause(self._fault, handler, act)
            else:
                act()

    def _cause(self, fault: str, handler: BaseHTTPRequestHandler, act: Callable[[], None]) -> None:
        handler.close_connection = True
        if fault.isdecimal():
            handler.rfile.read(int(handler.headers["Content-Length"] or 0))
            _refuse(handler, int(fault))
            return
        if fault == "kill":
            self._kill()
        elif fault in ("lost", "kill-done"):
            real, handler.wfile = handler.wfile, io.BytesIO()
            act()
            handler.wfile = real
            if fault == "kill-done":
                self._kill()
        elif fault in ("cut", "ends"):
            handler.wfile = _Cut(handler, body=fault == "cut")
            act()
        elif fault == "silence":
            handler.rfile.read()
        _reset(handler.connection)


class _Cut(io.BufferedIOBase):
    """Ends a connection in the middle of the first block after the headers, or before it."""

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
    """Close a connection at once; what was sent and not read is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
