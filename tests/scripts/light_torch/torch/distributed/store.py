"""A store that rank 0 serves, by Python's own means."""

import os
import threading
import time
from multiprocessing.managers import BaseManager

KEY = b"light"
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


class _Manager(BaseManager):
    pass


_VALUES = Values()
_Manager.register("values", lambda: _VALUES, exposed=("add", "set", "get", "wait", "has"))


class Store:
    """Keys with a prefix."""

    values = None
    prefix = ""

    def add(self, key, number):
        return self.values.add(self.prefix + key, number)

    def set(self, key, value):
        self.values.set(self.prefix + key, value)

    def get(self, key):
        return self.values.get(self.prefix + key).encode()

    def check(self, keys):
        return self.values.has([self.prefix + key for key in keys])

    def wait(self, keys, limit):
        if not self.values.wait([self.prefix + key for key in keys], limit.total_seconds()):
            raise DistError(f"nobody set all of {keys}")


class TCPStore(Store):
    """Served by the rank that is its master."""

    def __init__(self, host, port, _=None, *, is_master, timeout, master_listen_fd=None, **_more):
        if master_listen_fd is not None:
            os.close(master_listen_fd)
        if is_master:
            try:
                server = _Manager(("", port), KEY).get_server()
            except OSError as error:
                raise DistError(str(error)) from error
            threading.Thread(target=server.serve_forever, daemon=True).start()
        self.values = _connected(host, port, time.monotonic() + timeout.total_seconds())


class PrefixStore(Store):
    """A part of another store."""

    def __init__(self, prefix, store):
        self.prefix, self.values = f"{store.prefix}{prefix}/", store.values


def _connected(host, port, deadline):
    while True:
        manager = _Manager((host, port), KEY)
        try:
            manager.connect()
            return manager.values()
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise DistError(str(error)) from error
            time.sleep(0.02)
