"""Serve the static files of the tabs in Airflow, at the paths by which their modules import each other."""

from functools import partialmethod
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

_ROOT = Path(__file__).parents[2]
_STATIC, _PIPELINE = _ROOT / "operators" / "plugin" / "static", _ROOT / "pipeline"


class TabFiles(SimpleHTTPRequestHandler):
    """Serves the files, an empty document at ``/``, and documents that a subclass generates."""

    __init__ = partialmethod(SimpleHTTPRequestHandler.__init__, directory=str(_STATIC))

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        body = self.made(path)
        if body is None:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if path == "/" else "application/json")
        self.end_headers()
        self.wfile.write(body.encode())
        return None

    def made(self, path: str) -> str | None:
        """Return a generated document for a path; None: the path is that of a file."""
        return '<!doctype html><link rel="icon" href="data:,"><body>' if path == "/" else None

    def translate_path(self, path: str) -> str:
        """Return the path of a file; the page's files are in another folder than those of the tabs."""
        return f"{_PIPELINE}{path}" if path.startswith("/page/") else super().translate_path(path)

    def log_message(self, *_: object) -> None:
        """Log nothing."""
