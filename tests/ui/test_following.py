"""How a training's page looks again and again: as long as something goes on, and somebody sees it."""

from collections.abc import Iterator
from functools import partialmethod
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from support.browser import Page, needs_chromium
from support.web_server import served

STATIC = Path(__file__).parents[2] / "operators" / "plugin" / "static"
FOLLOW = """
const done = arguments[arguments.length - 1];
const { follow } = await import("/follow.js");
const after = (wait) => new Promise((go) => setTimeout(go, wait));
const show = (state) => {
  Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
};
"""

pytestmark = needs_chromium


class Static(SimpleHTTPRequestHandler):
    __init__ = partialmethod(SimpleHTTPRequestHandler.__init__, directory=str(STATIC))

    def do_GET(self) -> None:
        if self.path != "/":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        return None

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def blank(page: Page) -> Iterator[Page]:
    with served(Static) as host:
        page.browser.get(f"http://{host}/")
        yield page


def run(page: Page, body: str) -> Any:
    """Run what uses `follow`; it calls `done` with what it saw."""
    return page.browser.execute_async_script(FOLLOW + body)


def test_a_look_that_takes_long_never_meets_the_next_one(blank: Page) -> None:
    seen = run(
        blank,
        """
        let now = 0, most = 0, looks = 0;
        const look = async () => {
          most = Math.max(most, ++now);
          await after(30);
          now -= 1;
          document.dispatchEvent(new Event("visibilitychange"));
          if (++looks === 4) done(most);
          return true;
        };
        follow(look, null, 5);
        """,
    )
    assert seen == 1


def test_it_ends_when_nothing_goes_on_and_begins_when_the_tab_is_shown_again(blank: Page) -> None:
    seen = run(
        blank,
        """
        let looks = 0;
        follow(async () => ++looks < 3, null, 5);
        await after(200);
        const ended = looks;
        show("visible");
        await after(100);
        done([ended, looks]);
        """,
    )
    assert seen == [3, 4]


def test_a_hidden_tab_asks_for_nothing(blank: Page) -> None:
    seen = run(
        blank,
        """
        let looks = 0;
        follow(async () => { looks += 1; if (looks === 2) show("hidden"); return true; }, null, 5);
        await after(200);
        const hidden = looks;
        show("visible");
        await after(100);
        done([hidden, looks > 4]);
        """,
    )
    assert seen == [2, True]


def test_each_failure_doubles_the_time_until_the_next_look(blank: Page) -> None:
    seen = run(
        blank,
        """
        const waits = [];
        let looks = 0;
        const look = async () => { if (++looks < 5) throw new Error("away"); done(waits); return false; };
        follow(look, (error, wait) => waits.push([error.message, wait]), 5);
        """,
    )
    assert seen == [["away", 5], ["away", 10], ["away", 20], ["away", 40]]


def test_a_refusal_is_the_end(blank: Page) -> None:
    seen = run(
        blank,
        """
        let looks = 0;
        const refuse = () => { looks += 1; throw Object.assign(new Error("no"), { lasting: true }); };
        follow(async () => refuse(), async (error, wait) => { await after(100); done([wait, looks]); }, 5);
        """,
    )
    assert seen == [None, 1]


def test_leaving_the_page_ends_what_is_asked_for(blank: Page) -> None:
    seen = run(
        blank,
        """
        const told = [];
        const look = (signal) => new Promise((_, fail) => {
          signal.addEventListener("abort", () => fail(signal.reason));
        });
        const end = follow(look, () => told.push("trouble"), 5);
        await after(20);
        end();
        await after(50);
        done(told);
        """,
    )
    assert seen == []
