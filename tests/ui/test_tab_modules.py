"""The modules of Airflow's tabs by themselves: how they look for news, and which trainings they see."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.browser import Page, needs_chromium
from support.tab_files import TabFiles
from support.web_server import served

FOLLOW = """
const done = arguments[arguments.length - 1];
const { follow } = await import("/follow.js");
const after = (wait) => new Promise((go) => setTimeout(go, wait));
const show = (state) => {
  Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
};
"""

TRAININGS = """
const done = arguments[arguments.length - 1];
const { trainings } = await import("/trainings.js");
const found = trainings(...arguments[0]);
const names = (tasks) => tasks.map((task) => task.task_id);
done(found.map(({ name, document, elsewhere, tasks }) => [name, document, elsewhere, names(tasks)]));
"""

pytestmark = needs_chromium


@pytest.fixture
def blank(page: Page) -> Iterator[Page]:
    with served(TabFiles) as host:
        page.browser.get(f"http://{host}/")
        yield page


def run(page: Page, body: str) -> Any:
    """Run what uses `follow`; it calls `done` with what it saw."""
    return page.js_with_modules(FOLLOW + body)


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


def task(name: str, state: str | None = "success", index: int = -1, operator: str = "TrainOperator") -> Any:
    """A task instance, as Airflow describes it."""
    return {
        "task_id": name,
        "state": state,
        "map_index": index,
        "operator": operator,
        "operator_name": operator,
    }


def entry(name: str, key: str = "live", document: Any = None, index: int = -1, minute: int = 0) -> Any:
    """An XCom with its value."""
    when = f"2026-01-01T00:{minute:02d}:00Z"
    return {
        "task_id": name,
        "key": f"manycpu_{key}",
        "map_index": index,
        "timestamp": when,
        "document": document,
    }


def trainings(page: Page, tasks: list[Any], entries: list[Any]) -> list[Any]:
    """Return name, document, whether it is elsewhere, and the names of its tasks, of each training."""
    found: list[Any] = page.js_with_modules(TRAININGS, [tasks, entries])
    return found


def test_the_tasks_of_a_group_are_one_training(blank: Page) -> None:
    tasks = [task("a.train"), task("a.cleanup"), task("b.train", None), task("b.cleanup", None)]
    live, report = {"key": "1", "state": "running"}, {"key": "1", "state": "succeeded"}
    entries = [entry("a.cleanup", "report", report, minute=2), entry("a.train", "live", live, minute=1)]
    assert trainings(blank, tasks, entries) == [
        ["a", report, False, ["a.train", "a.cleanup"]],
        ["b", None, False, ["b.train", "b.cleanup"]],
    ]


def test_tasks_that_are_whole_runs_are_a_training_each(blank: Page) -> None:
    tasks = [task(name, operator="@task.manycpu") for name in ("fit", "group.fit")]
    entries = [entry("fit", document={"key": "1"}), entry("group.fit", document={"key": "2"})]
    assert [found[0] for found in trainings(blank, tasks, entries)] == ["fit", "group.fit"]


def test_expanded_tasks_are_a_training_each_in_the_order_of_their_index(blank: Page) -> None:
    tasks = [task("fit", index=index, operator="@task.manycpu") for index in (10, 2)]
    entries = [entry("fit", document={"key": str(index)}, index=index) for index in (10, 2)]
    assert [found[:2] for found in trainings(blank, tasks, entries)] == [
        ["fit[2]", {"key": "2"}],
        ["fit[10]", {"key": "10"}],
    ]


def test_trainings_beside_each_other_are_told_apart_by_their_keys(blank: Page) -> None:
    tasks = [task("one"), task("two")]
    entries = [entry("one", document={"key": "1"}), entry("two", document={"key": "2"})]
    assert [found[0::3] for found in trainings(blank, tasks, entries)] == [["one", ["one"]], ["two", ["two"]]]


def test_a_cleared_task_has_nothing_to_say_of_its_earlier_try(blank: Page) -> None:
    tasks = [task("a.train", "deferred"), task("a.cleanup", None)]
    live = {"key": "1", "state": "running"}
    entries = [entry("a.cleanup", "report", {"key": "1"}, minute=9), entry("a.train", "live", live, minute=1)]
    assert trainings(blank, tasks, entries)[0][1] == live


def test_a_document_that_is_elsewhere_is_told_from_none(blank: Page) -> None:
    found = trainings(blank, [task("a.train"), task("b.train")], [entry("a.train")])
    assert [one[:3] for one in found] == [["a", None, True], ["b", None, False]]


def test_what_was_under_way_when_its_dag_run_ended_is_no_more(blank: Page) -> None:
    module = """
    const { settled } = await import("/trainings.js");
    const states = { running: ["failed", "running", "success"], succeeded: ["failed"] };
    const of = (state) => states[state].map((run) => settled({ state }, run).state);
    done(Object.keys(states).flatMap(of));
    """
    assert run(blank, module) == ["ended", "running", "ended", "succeeded"]


def test_a_run_is_called_by_its_kind_and_its_moment_unless_somebody_named_it(blank: Page) -> None:
    blank.browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Europe/Berlin"})
    names = {
        "manual__2026-11-23T23:10:16.792959+00:00": "manual 11-24 00:10:16",
        "scheduled__2026-07-01T00:00:00+00:00": "scheduled 07-01 02:00:00",
        "asset_triggered__2026-11-23T01:10:16.5+00:00_AbCdEfGh": "asset 11-23 02:10:16",
        "nightly": "nightly",
        "manual__soon": "manual__soon",
        **{f"manual__2026-01-01T00:00:00.{at}456+00:00": f"manual 01-01 01:00:00.{at}" for at in (123, 124)},
        **{it: it for it in (f"manual__2026-01-02T00:00:00.123{at}+00:00" for at in (1, 2))},
    }
    module = """
    const { shortNames } = await import("/history.js");
    done([...shortNames(%s)]);
    """
    assert dict(run(blank, module % json.dumps([*names]))) == names
