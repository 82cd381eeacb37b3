"""A training's page in headless Chromium: what it shows, and how it answers to pointer and keyboard."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from support.browser import Page, needs_chromium
from support.made_reports import HOSTILE, large_report, usual_report
from support.web_server import served

from manycpu.pipeline import page as page_package
from manycpu.pipeline.page import as_html

pytestmark = needs_chromium
Open = Callable[..., Page]
SIZES = [(1280, 900), (400, 800)]
VALUES = "return [...document.querySelectorAll(arguments[0])].map(it => it.dataset.value)"
# The least contrast between a text and what is behind it, and that text.
CONTRAST = """
const channels = (color) => color.match(/[0-9.]+/g).map(Number);
const light = (color) => channels(color).slice(0, 3)
  .map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const color = getComputedStyle(at).backgroundColor;
    if ((channels(color)[3] ?? 1) > 0) return color;
  }
  return "rgb(255, 255, 255)";
};
const ratio = (element) => {
  const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
};
const told = (it) => [...it.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
const texts = [...document.body.querySelectorAll("*")].filter((it) => told(it) && it.checkVisibility());
return texts.map((it) => [ratio(it), it.textContent]).sort((a, b) => a[0] - b[0])[0];
"""


@pytest.fixture
def shown(page: Page, tmp_path: Path) -> Open:
    """Open a report as its HTML file; nothing may complain."""

    def show(report: dict[str, Any], size: tuple[int, int] = SIZES[0], scheme: str = "light") -> Page:
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
    """Serves the page's static files, and a document to draw into."""

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
        """Print nothing."""


@pytest.fixture
def mounted(page: Page) -> Iterator[Page]:
    """Import the modules as they are served, and hold what they offer as ``window.drawn``."""
    with served(partial(_Modules, directory=page_package.__path__[0])) as address:  # type: ignore[arg-type]
        page.browser.get(f"http://{address}/")
        yield page


def mount(page: Page, first: Any, what: str = "mount", options: object = None) -> None:
    page.js(
        """return import("/training.js").then((module) => {
            window.drawn = module[arguments[0]](document.getElementById("root"), arguments[1] ?? undefined);
            window.drawn.update(arguments[2]);
        })""",
        *(what, options, first),
    )


def update(page: Page, documents: Any) -> None:
    page.js("window.drawn.update(arguments[0])", documents)


def test_the_numbers_are_those_of_the_report(shown: Open) -> None:
    report = usual_report()
    page = shown(report)
    texts = page.js("return [...document.querySelectorAll('.values div')].map(it => it.innerText)")
    found = dict(text.rsplit("\n", 1) for text in texts)
    assert found.keys() == report["metrics"].keys()
    for name, value in report["metrics"].items():
        assert (found[name] if isinstance(value, str) else json.loads(found[name])) == value
    for name, series in report["series"].items():
        (value,) = page.js(VALUES, f'[data-metric="{name.translate({34: chr(92) + chr(34)})}"] .value span')
        assert float(value) == series["values"][-1]
    assert [float(value) for value in page.js(VALUES, ".parts .number")] == [
        verb["seconds"] for verb in report["verbs"].values()
    ]
    told = [rank["pace"][name] for rank in report["ranks"] for name in ("step_seconds", "wait_seconds")]
    assert [float(v) for v in page.js(VALUES, ".ranks td:is(:nth-child(7), :nth-child(8)) .number")] == told
    for text in (report["export"]["path"], report["export"]["sha256"], report["image"], report["key"]):
        assert text in page.find(".places").text


def test_what_it_says_in_words(shown: Open) -> None:
    page = shown(usual_report(left_behind=["Pod ml/x"], error="it broke\nand why"))
    page.shows("It finished in 6 min 14 s after 2 attempts.")
    page.shows("4 ranks met on 2 hosts; 4 on 2 were asked for.")
    page.shows(
        "Slowest is rank 2 on node-b: it computes 0.39 s in each step, 16 % more than the median rank."
    )
    assert [row.text.split("\n")[0] for row in page.all(".slowest")] == [page.find(".slowest").text]
    assert page.find(".slowest").text.startswith("2 slowest node-b")
    for text in (
        "it broke\nand why",
        "Pod ml/x",
        "rank 1 has 4 threads on 2 cores",
        "rank 1 on node-b: exit",
    ):
        page.shows(text)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"run": {"nnodes": "1:4", "nproc_per_node": 1}},
            "4 ranks met on 2 hosts; 1 to 4 on 1 to 4 were asked",
        ),
        ({"run": {"nnodes": 4, "nproc_per_node": 2}}, "4 ranks met on 2 hosts; 8 on 4 were asked for."),
        (
            {"run": {"nnodes": 1}, "world_size": 1, "hosts": ["a"]},
            "1 rank met on 1 host; 1 on 1 was asked",
        ),
        ({"run": None}, "4 ranks met on 2 hosts."),
        ({"world_size": None}, "No ranks have met."),
    ],
)
def test_the_proof_of_scale_says_what_was_asked_for(shown: Open, fields: dict[str, Any], words: str) -> None:
    assert shown(usual_report(**fields)).find(".proof").text.startswith(words)


def test_a_rank_alone_is_not_the_slowest(shown: Open) -> None:
    page = shown(usual_report(ranks=usual_report()["ranks"][:1]))
    assert not page.all(".slowest")


def test_rounds_have_their_ends(shown: Open) -> None:
    rounds = [
        {"round": 0, "world_size": 4, "began": 1763856000.0, "hosts": ["node-a", "node-b"]},
        {"round": 1, "world_size": 2, "began": 1763856100.0, "hosts": ["node-a"]},
    ]
    page = shown(usual_report(rounds=rounds))
    rows = [row.text for row in page.all(".rounds tbody tr")]
    assert rows[0].endswith("1 min 40 s the ranks met again with 2 ranks")
    assert rows[1].endswith("succeeded")


@pytest.mark.parametrize("field", ["name", "reason", "error", "warnings", "kept", "metrics", "verbs"])
def test_what_a_run_says_is_text_wherever_it_stands(shown: Open, field: str) -> None:
    told: dict[str, Any] = {
        "warnings": [HOSTILE],
        "kept": [HOSTILE],
        "metrics": {HOSTILE: HOSTILE},
        "verbs": {HOSTILE: {"seconds": 1, "result": HOSTILE, "error": HOSTILE}},
    }
    page = shown(usual_report(**{field: told.get(field, HOSTILE)}))
    page.shows(HOSTILE)
    assert not page.all("img")
    assert page.browser.title != "owned"
    assert page.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_all_of_it_can_be_read_at_any_width_light_and_dark(
    shown: Open, size: tuple[int, int], scheme: str
) -> None:
    report = usual_report(state="failed", error="x" * 300, left_behind=["y" * 300], name="z" * 90)
    report["metrics"]["m" * 200] = "n" * 300
    page = shown(report, size, scheme)
    page.find("summary").click()
    assert page.js("return document.documentElement.scrollWidth <= innerWidth")
    ratio, text = page.js(CONTRAST)
    assert ratio >= 4.5, text
    bright = page.js("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert bright == (scheme == "light")


def test_a_large_run_draws_in_less_than_a_second_and_answers(mounted: Page) -> None:
    mount(mounted, {})
    seconds = mounted.js(
        """const root = document.getElementById("root");
        return import("/training.js").then(({ mount }) => [1, 2, 3].map(() => {
            const began = performance.now();
            mount(root, {}).update({ report: arguments[0] });
            root.getBoundingClientRect();
            return (performance.now() - began) / 1000;
        }))""",
        large_report(),
    )
    assert min(seconds) < 1, seconds
    assert len(mounted.all(".chart")) == 40
    assert len(mounted.all(".ranks tbody tr")) == 64
    ActionChains(mounted.browser).move_to_element(mounted.find("[data-metric=loss] .plot")).perform()
    assert mounted.find("[data-metric=loss] .where").text.startswith("at step 4")
    assert mounted.find("[data-metric=metric_00] .where").text.startswith("at step 4")


def test_the_keyboard_reads_a_curve(shown: Open) -> None:
    report = usual_report()
    values, page = report["series"]["loss"]["values"], shown(report)
    plot = page.find("[data-metric=loss] .plot")
    page.js("arguments[0].focus()", plot)

    def after(*keys: str) -> tuple[float, str]:
        plot.send_keys(*keys)
        (value,) = page.js(VALUES, "[data-metric=loss] .value span")
        return float(value), page.find("[data-metric=loss] .reading").text

    assert after(Keys.HOME)[0] == values[0]
    assert after(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT) == (values[2], f"{values[2]:.4g} at step 15")
    assert after(Keys.END)[0] == values[-1]
    assert after(Keys.ARROW_LEFT)[0] == values[-2]
    assert plot.get_attribute("aria-valuetext") == f"{values[-2]:.4g} at step 795"
    assert "at" not in after(Keys.ESCAPE)[1]


def test_all_that_can_be_done_can_be_done_by_the_keyboard(shown: Open) -> None:
    page = shown(usual_report())
    keys = ActionChains(page.browser)
    keys.send_keys(Keys.TAB, Keys.ARROW_RIGHT).perform()  # the choice of the axis comes first
    plot = page.find("[data-metric=loss] .plot")
    ActionChains(page.browser).send_keys(Keys.TAB, Keys.HOME).perform()
    assert page.browser.switch_to.active_element == plot
    assert page.find("[data-metric=loss] .where").text == "at 0 s"
    page.js("arguments[0].focus()", page.find("summary"))
    ActionChains(page.browser).send_keys(Keys.ENTER).perform()
    page.shows("question_answering")


@pytest.mark.parametrize(
    "half",
    [
        {},
        {"name": None, "ranks": 7, "verbs": [], "series": "x", "rounds": {"a": 1}, "run": 3},
        {"ranks": [None, 1, {"pace": 1}], "verbs": {"wait": None}, "history": [None], "rounds": [1, None]},
        {"series": {"a": None, "b": {"values": [None, "x", 1]}, "c": {"values": [], "steps": 3}}},
        {"series": {"a": {"index": [], "steps": [None, 3], "times": [], "values": [1.0, 1.0]}}},
        {
            "hosts": "x",
            "digests": [],
            "export": 1,
            "image": 4,
            "left_behind": "x",
            "warnings": {},
            "time": "x",
        },
        {"progress": {"step": 3}, "state": "running", "attempts": "many", "world_size": "4"},
    ],
)
def test_half_a_report_shows_what_it_has(shown: Open, half: dict[str, Any]) -> None:
    page = shown({**half, "metrics": {"eval_f1": 93.1}})
    page.shows("93.1")
    assert "cannot be read" not in page.find("body").text


def test_a_report_of_an_older_version_has_no_curves_and_all_else(shown: Open) -> None:
    new = ("series", "history", "digests", "progress", "time")
    page = shown({name: value for name, value in usual_report().items() if name not in new})
    page.shows("4 ranks met on 2 hosts")
    assert not page.find("main").find_element("css selector", ".curves").is_displayed()


def test_what_moves_keeps_what_a_person_does_with_it(mounted: Page) -> None:
    live = usual_report(state="running", reason=None, progress={"step": 420, "total_steps": 800})
    tasks = [{"name": "train", "state": "running", "seconds": 3.0, "start": None, "href": "/log"}]
    mount(mounted, {"report": live, "tasks": tasks})
    mounted.resize(1280, 700)
    mounted.find("summary").click()
    mounted.find(".choice label:last-child").click()
    link = mounted.find(".tasks a")
    mounted.js(
        "arguments[0].focus(); scrollTo(0, 900); getSelection().selectAllChildren(arguments[1])",
        *(link, mounted.find(".proof")),
    )
    before = mounted.js("return scrollY")
    later = {**live, "world_size": 5, "progress": {"step": 430, "total_steps": 800}}
    later["metrics"] = {**live["metrics"], "loss": 0.25, "a_new_one": 1}
    later["series"] = {**live["series"], "a_new_one": live["series"]["eval_f1"]}
    update(mounted, {"report": later, "tasks": [{**tasks[0], "seconds": 4.0}]})
    mounted.shows("step 430 of 800")
    mounted.shows("5 ranks met")
    assert mounted.browser.switch_to.active_element == link
    assert mounted.find("details").get_attribute("open") is not None
    assert mounted.find("[data-metric=a_new_one]").is_displayed()
    assert mounted.js("return document.querySelector('.choice input[value=time]').checked")
    assert mounted.js("return getSelection().toString()").startswith("5 ranks met")
    assert abs(mounted.js("return scrollY") - before) < 300  # one more chart may stand above
    assert mounted.complaints() == []


def test_a_link_opens_logs_and_runs_nothing(mounted: Page) -> None:
    tasks = [
        {"name": "train", "state": "success", "seconds": 3.0, "start": 1763856000, "href": "/dags/x/runs/1"},
        {"name": "odd", "state": None, "href": "javascript:document.title='owned'"},
    ]
    mount(mounted, {"report": {}, "tasks": tasks})
    (link,) = mounted.all(".tasks a")
    assert str(link.get_attribute("href")).endswith("/dags/x/runs/1")
    assert len(mounted.all(".tasks tbody tr")) == 2


@pytest.mark.parametrize("dark", [True, False])
def test_whoever_mounts_it_chooses_the_theme(mounted: Page, *, dark: bool) -> None:
    mounted.prefer("light" if dark else "dark")
    mount(mounted, {"report": usual_report()}, options={"dark": dark})
    color = mounted.js("return getComputedStyle(document.querySelector('.chart')).backgroundColor")
    assert (color == "rgb(255, 255, 255)") is not dark
    mounted.js("window.drawn.destroy()")
    assert not mounted.all(".chart")


def rows() -> list[dict[str, Any]]:
    told = [("success", 93.1, 0.6), ("success", 94.2, 0.7), ("failed", 99.9, 0.1), ("running", None, 0.5)]
    return [
        {
            "id": f"run{at}",
            "href": f"/runs/{at}",
            "start": f"2026-01-0{at + 1}T00:00:00Z",
            "seconds": 300.5 - at,
            "state": state,
            "document": usual_report(metrics={"loss": loss, **({"eval_f1": f1} if f1 else {})}),
        }
        for at, (state, f1, loss) in enumerate(told)
    ] + [{"id": "empty"}]


def test_runs_sort_by_any_metric_and_the_best_is_marked(mounted: Page) -> None:
    mount(mounted, rows(), "mountHistory")

    def order() -> list[str]:
        return [row.find_element("css selector", "td:nth-child(2)").text for row in mounted.all("tbody tr")]

    assert order() == ["run3", "run2", "run1", "run0", "empty"]
    mounted.find("th button[title=eval_f1]").send_keys(Keys.ENTER)
    assert order() == ["run2", "run1", "run0", "run3", "empty"]  # the best first
    mounted.find("th button[title=loss]").click()
    assert order() == ["run2", "run3", "run0", "run1", "empty"]
    mounted.find("th button[title=loss]").click()
    assert order() == ["run1", "run0", "run3", "run2", "empty"]
    assert mounted.find("th[aria-sort]").get_attribute("aria-sort") == "descending"
    best = mounted.js(
        "return [...document.querySelectorAll('.best')].map(it => it.closest('tr').dataset.key)"
    )
    assert sorted(best) == ["run0", "run1"]  # the lowest loss and the highest f1, of those that succeeded


def test_chosen_runs_are_drawn_over_each_other_and_stay_so(mounted: Page) -> None:
    mount(mounted, rows(), "mountHistory")
    for box in mounted.all("tbody input")[:2]:
        box.send_keys(Keys.SPACE)
    assert [it.text for it in mounted.all(".entry")] == ["run3", "run2"]
    assert len(mounted.all("[data-metric=loss] path")) == 2
    update(mounted, [*rows(), {"id": "later", "start": "2026-02-01T00:00:00Z", "state": "running"}])
    assert [it.text for it in mounted.all(".entry")] == ["run3", "run2"]
    assert [box.is_selected() for box in mounted.all("tbody input")] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert mounted.js("return document.documentElement.scrollWidth <= innerWidth")
    assert mounted.complaints() == []
