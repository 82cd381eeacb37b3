"""The history of a DAG: it sorts, marks the best, and draws runs over each other."""

import json
from typing import Any

import pytest
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


LOWEST = (
    *("loss", "eval_loss", "dice_loss", "MSELoss", "nll", "kl_div", "fid", "fid_score", "mape", "wer", "cer"),
    *("mae", "mse", "valMSE", "rmse", "bits_per_byte", "perplexity", "brier_score", "errors", "error-rate"),
    *("eval_runtime", "train_runtime", "step_seconds", "wait_seconds", "seconds_per_step", "memory_mb"),
)
HIGHEST = (
    *("accuracy", "transferred_accuracy", "acc", "top5acc", "eval_f1", "f1", "precision", "recall@5", "auc"),
    *("score", "bleu", "rouge1", "rougeL", "exact_match", "map50", "mAP", "mIoU", "r2", "throughput"),
    *("samples_per_second", "tokens_per_sec", "mb_per_second", "perplexed/accuracy"),
)
UNSAID = (
    *("epoch", "step", "learning_rate", "lr", "grad_norm", "total_flos", "loss_scale", "accuracy_std", "7"),
    *(
        "time_to_accuracy",
        "interesting",
        "terrain",
        "constructor",
        "__proto__",
        "",
        "<b>",
        "errors_per_second",
    ),
)


def test_the_best_is_what_the_words_of_a_name_say(mounted: Page) -> None:
    ways = mounted.js(
        "return import('/better.js').then(({ better }) => arguments[0].map((name) => [name, better(name)]))",
        [*LOWEST, *HIGHEST, *UNSAID],
    )
    assert dict(ways) == {
        **dict.fromkeys(LOWEST, -1),
        **dict.fromkeys(HIGHEST, 1),
        **dict.fromkeys(UNSAID, 0),
    }


def test_where_nobody_knows_which_is_better_none_is_the_best(mounted: Page) -> None:
    documents = [usual_report(metrics={"grad_norm": at, "eval_runtime": at}) for at in range(3)]
    mount(
        mounted,
        [{"id": f"run{at}", "state": "success", "document": it} for at, it in enumerate(documents)],
        "mountHistory",
    )
    titles = mounted.js(
        "return [...document.querySelectorAll('.best')].map(it => [it.title, it.closest('tr').dataset.key])"
    )
    assert titles == [["The best eval_runtime of all that succeeded", "run0"]]


@pytest.mark.parametrize("name", ["constructor", "toString", "__proto__", "hasOwnProperty"])
def test_a_metric_may_be_called_like_what_every_object_has(mounted: Page, name: str) -> None:
    told: list[dict[str, float]] = [{name: 1.5}, {"loss": 2}, {name: 0.5}]
    given = [
        {
            "id": f"run{at}",
            "state": "success",
            "document": {"metrics": it, "series": {each: {"values": [1, 2]} for each in it}},
        }
        for at, it in enumerate(told)
    ]
    mounted.js(  # as the page reads it: a literal would set what an object descends from
        """return import("/training.js").then(({ mountHistory }) =>
            mountHistory(document.getElementById("root")).update(JSON.parse(arguments[0])))""",
        json.dumps(given),
    )
    mounted.find(f"th button[title={name}]").click()
    shown = [
        [cell.text for cell in row.find_elements("css selector", "td")] for row in mounted.all("tbody tr")
    ]
    column = [head.get_attribute("aria-sort") for head in mounted.all("thead th")].index("descending")
    values = [(cells[1], cells[column]) for cells in shown]
    assert values == [("run0", "1.5"), ("run2", "0.5"), ("run1", "\N{EN DASH}")]
    for box in mounted.all("tbody input"):
        box.click()
    assert len(mounted.all(f"[data-metric={name}] path")) == 2
    assert mounted.complaints() == []
