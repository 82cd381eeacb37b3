"""A store that rank 0 serves: a line of JSON for each call, and one for what it returns.

As in torch, a call of set is not answered: rank 0 may end as soon as it has the last value.
"""

import json
import socket
import socketserver
import threading
import time

DistError = type("DistError", (RuntimeError,), {})


class Values:
    """What the store holds, where rank 0 is."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def add(self, key, number):
        with self._changed:
            self._values[key] = self._values.get(key, 0) + number
            return self._values[key]

    def set(self, key, value):
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key):
        return self._values[key]

    def wait(self, keys, seconds):
        with self._changed:
            return self._changed.wait_for(lambda: self.has(keys), seconds)

    def has(self, keys):
        return all(key in self._values for key in keys)


class _Handler(socketserver.StreamRequestHandler):
    values = Values()

    def handle(self):
        for line in self.rfile:
            name, *args = json.loads(line)
            returned = getattr(self.values, name)(*args)
            if name != "set":
                self.wfile.write(json.dumps(returned).encode() + b"\n")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, request_queue_size = True, True, 128


class Store:
    """Keys with a prefix."""

    call, prefix = None, ""

    def add(self, key, number):
        return self.call("add", self.prefix + key, number)

    def set(self, key, value):
        self.call("set", self.prefix + key, value)

    def get(self, key):
        return self.call("get", self.prefix + key).encode()

    def check(self, keys):
        return self.call("has", [self.prefix + key for key in keys])

    def wait(self, keys, limit):
        if not self.call("wait", [self.prefix + key for key in keys], limit.total_seconds()):
            raise DistError(f"not all of {keys} were set")


class TCPStore(Store):
    """Served by the rank that is its master."""

    def __init__(self, host, port, _=None, *, is_master, timeout, master_listen_fd=None, **_more):
        if is_master:
            threading.Thread(target=_server(port, master_listen_fd).serve_forever, daemon=True).start()
        self.call = _Connection(host, port, timeout.total_seconds())


class PrefixStore(Store):
    """A part of another store."""

    def __init__(self, prefix, store):
        self.prefix, self.call = f"{store.prefix}{prefix}/", store.call


def _server(port, listener):
    """Serve on what listens already, where ranks may have come to, or on the port."""
    try:
        server = _Server(("", port), _Handler, bind_and_activate=listener is None)
    except OSError as error:
        raise DistError(str(error)) from error
    if listener is not None:
        server.socket.close()
        server.socket = socket.socket(fileno=listener)
    return server


class _Connection:
    """Asks the server; no answer takes longer than a wait may, and some."""

    def __init__(self, host, port, seconds):
        connected = _connected(host, port, time.monotonic() + seconds)
        connected.settimeout(seconds + 10)
        self._stream = connected.makefile("rw")

    def __call__(self, *words):
        try:
            self._stream.write(json.dumps(words) + "\n")
            self._stream.flush()
            return None if words[0] == "set" else json.loads(self._stream.readline())
        except (OSError, ValueError) as error:  # ValueError: there is no line
            raise DistError(f"the server of the store has left: {error}") from error


def _connected(host, port, deadline):
    while True:
        try:
            return socket.create_connection((host, port), timeout=10)
        except OSError as error:
            if time.monotonic() > deadline:
                raise DistError(str(error)) from error
            time.sleep(0.02)
