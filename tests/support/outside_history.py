"""The history of a round of a campaign: JSON lines from its users, and from ranks that post theirs."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from support.web_server import served

Line = dict[str, Any]


class History:
    """Lines in the order in which they came, each with the seconds since the round began; kept in a file."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        self.file, self.lines = file, list[Line]()
        self._began, self._lock = time.monotonic(), threading.Lock()

    def now(self) -> float:
        """Return the seconds since the round began."""
        return round(time.monotonic() - self._began, 2)

    def add(self, what: str, **more: Any) -> None:
        """Add a line: ``what`` happened, and more fields."""
        with self._lock, self.file.open("a") as file:
            line = {"at": self.now(), "what": what, **more}
            self.lines.append(line)
            file.write(json.dumps(line) + "\n")

    def of(self, run: str, what: str) -> list[Line]:
        """Return the lines of a kind about a run."""
        return [line for line in self.lines if (line.get("run"), line["what"]) == (run, what)]


@contextmanager
def reachable(history: History, address: str) -> Iterator[str]:
    """Run a server that adds to a history what ranks post; yield its URL."""
    seen = set[str]()

    class Posts(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if (line := said.pop("line")) not in seen:  # a rank sends a line again if the answer was lost
                seen.add(line)
                history.add(said.pop("what"), **said)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print no line for each request."""

    with served(Posts, address) as place:
        yield f"http://{place}/"
