"""A training's page as an HTML file in Chromium: what it shows, and how it answers to the keyboard."""

import json
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from support.browser import needs_chromium
from support.drawn_pages import Open
from support.made_reports import HOSTILE, usual_report

pytestmark = needs_chromium
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


def test_the_numbers_are_those_of_the_report(shown: Open) -> None:
    report = usual_report()
    page = shown(report)
    texts = page.js("return [...document.querySelectorAll('.values div')].map(it => it.innerText)")
    found = dict(text.rsplit("\n", 1) for text in texts)
    assert found.keys() == report["metrics"].keys()
    for name, value in report["metrics"].items():
        assert (found[name] if isinstance(value, str) else json.loads(found[name])) == value
    for name, series in report["series"].items():
        shown_last = page.js(VALUES, f'[data-metric="{name.translate({34: chr(92) + chr(34)})}"] .value span')
        # One value is no curve: the metrics have it.
        assert [float(value) for value in shown_last] == series["values"][1:][-1:]
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
        (
            {"run": {"nnodes": 128, "nproc_per_node": 2}, "world_size": 256, "counts": {"hosts": 128}},
            "256 ranks met on 128 hosts; 256 on 128 were asked for.",
        ),
        ({"run": None}, "4 ranks met on 2 hosts."),
        ({"world_size": None}, "No ranks have met."),
    ],
)
def test_the_proof_of_scale_says_what_was_asked_for(shown: Open, fields: dict[str, Any], words: str) -> None:
    assert shown(usual_report(**fields)).find(".proof").text.startswith(words)


def test_ranks_that_a_short_report_leaves_out_are_counted(shown: Open) -> None:
    page = shown(usual_report(counts={"ranks": 256, "warnings": 200}))
    page.shows("4 of 256 ranks are shown: those that failed, and others from the fastest to the slowest.")
    page.shows("200 warnings")


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


def test_where_the_trackers_have_the_run(shown: Open) -> None:
    address = "http://mlflow.example.org:5000"
    link = f"{address}/#/experiments/1/runs/3f2a"
    found = {"address": address, "experiment": "weekly", "run": "3f2a", "link": link}
    page = shown(
        usual_report(trackers={"mlflow": found, "tensorboard": {"command": "tensorboard --logdir /b"}})
    )
    for text in ("experiment: weekly", "run: 3f2a", f"link: {link}", "command: tensorboard --logdir /b"):
        assert text in page.find(".places").text
    assert [each.get_attribute("href") for each in page.all(".places a")] == [link]


@pytest.mark.parametrize("link", ["javascript:document.title='owned'", HOSTILE, "other.html", None, {"a": 1}])
def test_a_link_that_is_none_is_text(shown: Open, link: object) -> None:
    page = shown(usual_report(trackers={"mlflow": {"link": link}, HOSTILE: {HOSTILE: HOSTILE}}))
    page.shows(HOSTILE)
    assert not page.all(".places a, img")


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
