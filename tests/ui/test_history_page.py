"""The history of a DAG: it sorts, marks the best, and draws runs over each other."""

from typing import Any

from selenium.webdriver.common.keys import Keys
from support.browser import Page, needs_chromium
from support.drawn_pages import mount, update
from support.made_reports import usual_report

pytestmark = needs_chromium


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
