"""A web server for tests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def served(handler: type[BaseHTTPRequestHandler], address: str = "127.0.0.1") -> Iterator[str]:
    """Run a web server, on loopback or on another address of this machine; yield its host and port."""
    server = ThreadingHTTPServer((address, 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"{address}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
