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


def asked(rate: str, nodes: int, **other: Any) -> dict[str, Any]:
    """A report of a run with these arguments, as the history of a DAG has it."""
    run = {
        "program": "train.py",
        "args": ["--epochs", "2", "--learning_rate", rate],
        "nnodes": nodes,
        "output": f"/models/{rate}/{nodes}",
        "dtype": "bf16",
    }
    return usual_report(run=run, **other)


def cells(page: Page, key: str) -> dict[str, str]:
    """Return what stands in a run's row, by the heads of the columns."""
    heads = [head.text.strip("▾▴ \n") for head in page.all("thead th")]
    row = page.find(f"tr[data-key='{key}']")
    return dict(zip(heads, [cell.text for cell in row.find_elements("css selector", "td")], strict=True))


def test_rows_and_curves_say_what_differs_between_runs(mounted: Page) -> None:
    many = {"counts": {"hosts": 128}}  # of which a short report lists some
    documents = [asked("2e-5", 1), asked("5e-5", 1, **many), {"state": "failed", "error": "refused"}]
    ids = [f"manual__2026-01-0{at}T00:00:00.123456+00:00_AbCdEfGh" for at in (1, 2, 3)]
    given = [
        {"id": key, "name": f"manual {at}", "href": f"/runs/{at}", "state": "success", "document": it}
        for at, (key, it) in enumerate(zip(ids, documents, strict=True))
    ]
    mount(mounted, given, "mountHistory")
    told = [cells(mounted, key) for key in ids]
    assert [it["Run"] for it in told] == ["manual 0", "manual 1", "manual 2"]
    assert [it["Nodes"] for it in told] == ["2", "128", "\N{EN DASH}"]
    assert [it["What differs"] for it in told] == ["learning_rate 2e-5", "learning_rate 5e-5", "\N{EN DASH}"]
    assert mounted.find("tbody .name").get_attribute("title") in ids
    for box in mounted.all("tbody input")[:2]:
        box.click()
    entries = mounted.all(".entry")
    assert [it.text for it in entries] == [f"manual {at} · learning_rate {at * 3 + 2}e-5" for at in (0, 1)]
    assert entries[0].get_attribute("title") == f"{ids[0]}\nlearning_rate: 2e-5"
    update(mounted, given[:1])
    assert "What differs" not in mounted.find("thead").text  # there is nothing to differ from


@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        ({"args": ["--lr=1", "--flag"]}, {"args": ["--lr=1"]}, [["flag", "yes"]]),
        ({"args": ["-x", "-1", "2"]}, {"args": ["-x", "-1"]}, [["x", "-1 2"]]),
        ({"args": ["fit", "a.b=1"]}, {"args": ["fit", "a.b=2"]}, [["a.b", "1"]]),
        (
            {"args": ['{"arguments": {"rate": 0.1, "data": "/d"}, "places": ["output"]}']},
            {"args": ['{"arguments": {"rate": 0.3, "data": "/d"}, "places": ["output"]}']},
            [["rate", "0.1"]],
        ),
        ({"nnodes": 2, "output": "/a"}, {"nnodes": "1:4", "output": "/b"}, [["nnodes", "2"]]),
        ({"env": {"A": "***"}}, {"env": {"A": "***"}}, []),
    ],
)
def test_arguments_are_compared_by_their_names(
    mounted: Page, one: dict[str, Any], other: dict[str, Any], pairs: list[list[str]]
) -> None:
    found = mounted.js(
        "return import('/differences.js').then(({ differences }) => differences(arguments[0]))",
        [{"run": one}, {"run": other}, {}, {"run": None, "target": 3, "digests": []}],
    )
    assert (found[0], found[2:]) == (pairs, [[], []])


def test_a_digest_tells_of_a_change_that_no_path_tells_of(mounted: Page) -> None:
    fields: list[dict[str, Any]] = [{"data": "/v1"}, {"data": "/v2", "dtype": "bf16"}]
    reports = [
        {"run": {"program": "train.py", **run}, "digests": {"code": f"{at}" * 64, "data": f"{at}"}}
        for at, run in enumerate(fields)
    ]
    found = mounted.js(
        "return import('/differences.js').then(({ differences }) => differences(arguments[0]))", reports
    )
    assert found == [
        [["data", "/v1"], ["digest of the code", "0" * 8]],
        [["data", "/v2"], ["dtype", "bf16"], ["digest of the code", "1" * 8]],
    ]


def test_the_loss_is_seen_beside_airflows_menu_without_scrolling(mounted: Page) -> None:
    mounted.resize(885, 900)  # what Airflow leaves of 1280 pixels
    documents = [
        asked(f"{at + 1}.123456e-5", at, model=f"hf://some/very-long-name-of-a-model-{at}") for at in range(4)
    ]
    mount(
        mounted,
        [
            {"id": f"asset_triggered__{at}", "name": f"asset 11-23 01:09:1{at} candidate.fit[{at}]", **other}
            for at, other in enumerate({"state": "success", "document": it} for it in documents)
        ],
        "mountHistory",
    )
    right = "const box = document.querySelector(arguments[0]).getBoundingClientRect(); return box.right"
    assert mounted.js(right, "th:has(button[title=loss])") <= mounted.js(right, ".scroll")
    assert mounted.js("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({"history": [{"seconds": 81.25}, {"seconds": 10}]}, "1 min 31 s"),
        ({"history": [], "verbs": {"wait": {"seconds": 12.5}}}, "12.5 s"),
        ({"history": [{"seconds": 81.2}], "state": "running"}, "5 min in all"),
        ({"history": None, "verbs": None}, "5 min in all"),
    ],
)
def test_how_long_a_training_took_is_told_from_the_whole_run(
    mounted: Page, report: dict[str, Any], words: str
) -> None:
    mount(mounted, [{"id": "a", "seconds": 300, "document": usual_report(**report)}], "mountHistory")
    assert cells(mounted, "a")["Trained"] == words
