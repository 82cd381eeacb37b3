"""Pages of trainings in a browser: as an HTML file, or drawn by the modules as Airflow serves them."""

from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from support.browser import Page
from support.web_server import served

from manycpu.pipeline import page as page_package
from manycpu.pipeline.page import as_html

Open = Callable[..., Page]
WIDE = (1280, 900)


@pytest.fixture
def shown(page: Page, tmp_path: Path) -> Open:
    """Return a function that opens a report as an HTML file, and checks that the console stays empty."""

    def show(report: dict[str, Any], size: tuple[int, int] = WIDE, scheme: str = "light") -> Page:
        file = tmp_path / "report.html"
        file.write_text(as_html(report))
        page.resize(*size)
        page.prefer(scheme)
        page.browser.get(file.as_uri())
        page.shows(report.get("name") or "A training")
        assert page.complaints() == []
        return page

    return show


class _Modules(SimpleHTTPRequestHandler):
    """Serves the page's static files, and an empty document to draw into."""

    def do_GET(self) -> None:
        if self.path != "/":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b'<!doctype html><link rel="icon" href="data:,"><div id="root"></div>')
        self.wfile.write(b'<link rel="stylesheet" href="training.css">')

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def mounted(page: Page) -> Iterator[Page]:
    """Open an empty document at a server that also serves the modules."""
    with served(partial(_Modules, directory=page_package.__path__[0])) as address:  # type: ignore[arg-type]
        page.browser.get(f"http://{address}/")
        yield page


def mount(page: Page, first: Any, what: str = "mount", options: object = None) -> None:
    """Import the page's module, draw documents by its function ``what``, and keep the result.

    The result is ``window.drawn``. ``first`` are the documents, or the rows of a history.
    """
    page.js(
        """return import("/training.js").then((module) => {
            window.drawn = module[arguments[0]](document.getElementById("root"), arguments[1] ?? undefined);
            window.drawn.update(arguments[2]);
        })""",
        *(what, options, first),
    )


def update(page: Page, documents: Any) -> None:
    """Draw the documents that are new since the last call."""
    page.js("window.drawn.update(arguments[0])", documents)
