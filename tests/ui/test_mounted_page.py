"""The drawing code as Airflow's page uses it: large runs, live ones, links and themes."""

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from support.browser import Page, needs_chromium
from support.drawn_pages import mount, update
from support.made_reports import large_report, odd_report, usual_report

pytestmark = needs_chromium


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


def test_no_shape_of_a_report_breaks_the_page(mounted: Page) -> None:
    mount(mounted, {})
    broken = mounted.js(
        """return arguments[0].map((report, at) => {
            window.drawn.update({ report, tasks: report.ranks });
            const point = new PointerEvent("pointermove", { clientX: 300 });
            document.querySelector(".plot")?.dispatchEvent(point);
            const odd = /.*(cannot be read|NaN|undefined|\\[object).*/.exec(document.body.innerText);
            return odd && [at, odd[0]];
        }).filter(Boolean)""",
        [odd_report(seed) for seed in range(100)],
    )
    assert broken == []
    assert mounted.complaints() == []


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


PARTS = """return [...document.querySelectorAll(".bar .part")]
    .map((it) => [it.textContent, it.classList.contains("running")])"""
LAUNCHED = {name: {"seconds": 10.0, "result": "done"} for name in ("prepare", "launch")}


def bar(page: Page) -> dict[str, bool]:
    """Return the parts of the bar, and whether each still runs."""
    return dict(page.js(PARTS))


def test_the_step_that_goes_on_has_its_part_up_to_now(mounted: Page) -> None:
    prepare = {"name": "prepare", "state": "success", "seconds": 10.0}
    train = {"name": "train", "state": "deferred", "seconds": 60.5}
    live = usual_report(state="running", verbs=LAUNCHED)
    mount(mounted, {"report": live, "tasks": [prepare, train]})
    assert bar(mounted) == {"prepare": False, "launch": False, "wait": True}
    assert mounted.all(".parts li")[-1].text == "wait 50.5 s running"
    update(mounted, {"report": live, "tasks": [prepare, {**train, "seconds": 65.5}]})
    assert mounted.all(".parts li")[-1].text == "wait 55.5 s running"
    alone = {"name": "fit", "state": "running", "seconds": 60.5}  # a whole run: all steps are of one task
    update(mounted, {"report": {**live, "state": "pending"}, "tasks": [alone]})
    assert mounted.all(".parts li")[-1].text == "wait 40.5 s pending"
    trained = {**live, "state": "succeeded", "verbs": {**LAUNCHED, "wait": {"seconds": 50, "result": "done"}}}
    export = {"name": "export", "state": "running", "seconds": 2.0}
    update(mounted, {"report": trained, "tasks": [prepare, {**train, "state": "success"}, export]})
    assert bar(mounted) == {"prepare": False, "launch": False, "wait": False, "export": True}


def test_a_second_try_waits_anew(mounted: Page) -> None:
    verbs = {**LAUNCHED, "wait": {"seconds": 500, "result": "failed", "error": "it broke"}}
    train = {"name": "train", "state": "running", "seconds": 30.0}
    tasks = [{"name": "prepare", "state": "success", "seconds": 10.0}, train]
    mount(mounted, {"report": usual_report(state="running", verbs=verbs), "tasks": tasks})
    assert mounted.all(".parts li")[-1].text == "wait 20.0 s running"
    update(mounted, {"report": usual_report(state="running", verbs=verbs), "tasks": []})
    assert mounted.find(".bar .failed").text == "wait"  # since when is unknown


def test_a_report_has_an_age_only_where_somebody_looks_for_the_next_one(mounted: Page) -> None:
    report = usual_report(time=1763856400.0)
    mount(mounted, {"report": report})
    assert not mounted.all(".age")
    update(mounted, {"report": report, "now": 1763856412.9})
    assert mounted.find(".age").text == "12 s ago"
    mounted.js("window.drawn.age(1763856465)")
    assert mounted.find(".age").text == "1 min 5 s ago"
    update(mounted, {"report": report, "now": 1763856399.0})  # by a clock that is late
    assert mounted.find(".age").text == "0 s ago"
