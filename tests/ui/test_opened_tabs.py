"""Airflow's tabs, with an API that answers when a test says so: how they begin, and how they age."""

import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.browser import Page, needs_chromium
from support.made_reports import usual_report
from support.tab_files import TabFiles
from support.waiting import until
from support.web_server import served

RUN = "/api/v2/dags/d/dagRuns/r"
WHEN = "2026-01-01T00:00:00Z"
OPEN = """
const done = arguments[arguments.length - 1];
const { openRun } = await import("/run.js");
const { openHistory } = await import("/history.js");
const open = { openRun, openHistory }[arguments[0]];
const root = document.body.appendChild(document.createElement("div"));
window.end = open(root, { dag: "d", run: "r" }, () => {});
done();
"""

pytestmark = needs_chromium


class Airflow:
    """What Airflow's API answers of one DAG with one run; nothing until it is let."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = 0
        self.state = "running"
        self.tasks: list[dict[str, Any]] = []
        self.documents: dict[str, Any] = {}

    def answer(self, path: str) -> Any:
        """Answer a request, by its path."""
        self.asked += 1
        run = {
            "dag_run_id": "r",
            "state": self.state,
            "start_date": None,
            "run_after": "2026-01-01T00:00:00Z",
        }
        answers = {
            RUN: run,
            "/api/v2/dags/d/dagRuns": {"dag_runs": [run], "total_entries": 1},
            "/api/v2/dags/d/tasks": {"tasks": [ours(task) for task in self.tasks]},
            f"{RUN}/taskInstances": {"task_instances": self.tasks, "total_entries": len(self.tasks)},
        }
        if path in answers:
            return answers[path]
        if path.endswith("/~/xcomEntries"):
            entries = [entry(task) for task in self.documents]
            return {"xcom_entries": entries, "total_entries": len(entries)}
        return {"value": self.documents[path.removeprefix(f"{RUN}/taskInstances/").partition("/")[0]]}


def ours(task: dict[str, Any]) -> dict[str, Any]:
    fields = {name: task[name] for name in ("task_id", "operator_name")}
    return {**fields, "class_ref": {"module_path": "manycpu.operators.train"}}


def entry(task: str) -> dict[str, Any]:
    at = {"dag_id": "d", "run_id": "r", "task_id": task, "map_index": -1}
    return {**at, "key": "manycpu_live", "timestamp": WHEN}


def instance(task: str, state: str, second: int) -> dict[str, Any]:
    """A task instance that took a second, as Airflow describes it."""
    return {
        "task_id": f"training.{task}",
        "task_display_name": f"training.{task}",
        "map_index": -1,
        "state": state,
        "operator": "TrainOperator",
        "operator_name": "TrainOperator",
        "duration": 1.0,
        "start_date": f"2026-01-01T00:00:{second:02}Z",
        "end_date": f"2026-01-01T00:00:{second + 1:02}Z",
    }


class Served(TabFiles):
    """Serves the API beside the files."""

    airflow: Airflow

    def made(self, path: str) -> str | None:
        if not path.startswith("/api/"):
            return super().made(path)
        self.airflow.answers.wait(60)
        return json.dumps(self.airflow.answer(path))


@pytest.fixture
def airflow() -> Iterator[Airflow]:
    made = Airflow()
    yield made
    made.answers.set()  # a request that waits would keep the server


@pytest.fixture
def blank(page: Page, airflow: Airflow) -> Iterator[Page]:
    with served(type("Of", (Served,), {"airflow": airflow})) as host:
        page.browser.get(f"http://{host}/")
        yield page
        page.js("window.end?.()")
        airflow.answers.set()


def note(page: Page) -> str:
    """Return what the tab says, to those who cannot see it as well."""
    (line,) = page.all("[role=status].manycpu-note")
    return line.text


@pytest.mark.parametrize("tab", ["openRun", "openHistory"])
def test_a_tab_says_that_it_loads_until_there_is_something_to_show(
    blank: Page, airflow: Airflow, tab: str
) -> None:
    airflow.tasks = [instance("train", "success", 1)]
    airflow.documents = {"training.train": usual_report()}
    blank.js_with_modules(OPEN, tab)
    assert note(blank) == "Loading …"
    assert not blank.all("main")
    airflow.answers.set()
    until(lambda: blank.all("main"))
    assert note(blank) == ""


def test_what_is_shown_grows_older_without_asking_and_has_no_age_after_the_end(
    blank: Page, airflow: Airflow
) -> None:
    airflow.tasks = [instance("train", "running", 1)]
    airflow.documents = {"training.train": usual_report(state="running", time=time.time() - 3700)}
    airflow.answers.set()
    blank.js_with_modules(OPEN, "openRun")
    first = blank.find(".age").text
    assert first == "1 h 1 min ago"
    blank.js("document.querySelector('.age').dataset.since = Date.now() / 1000 - 12")
    looks = airflow.asked
    seen: set[str] = set()
    until(lambda: seen.add(blank.find(".age").text) or len(seen) > 2)  # type: ignore[func-returns-value]
    assert airflow.asked == looks
    assert seen & {"12 s ago", "13 s ago"}
    airflow.state = "success"
    until(lambda: not blank.all(".age"))
    blank.shows("Written")


def test_of_a_refused_run_only_what_was_refused_is_shown(blank: Page, airflow: Airflow) -> None:
    states = [("prepare", "failed"), ("stage", "upstream_failed"), ("report", "failed")]
    airflow.tasks = [instance(task, state, 2 * at) for at, (task, state) in enumerate(states)]
    airflow.documents = {
        "training.prepare": {"schema_version": 1, "state": "failed", "error": "no such program"}
    }
    airflow.state = "failed"
    airflow.answers.set()
    blank.js_with_modules(OPEN, "openRun")
    blank.shows("no such program")
    assert blank.find("h1").text == "training"
    assert [part.text for part in blank.all(".bar .part")] == ["prepare"]
    assert [row.get_attribute("data-key") for row in blank.all(".tasks tbody tr")] == ["prepare"]


def test_of_a_run_that_failed_later_all_tasks_are_shown(blank: Page, airflow: Airflow) -> None:
    states = [("prepare", "success"), ("train", "failed"), ("cleanup", "success"), ("report", "failed")]
    airflow.tasks = [instance(task, state, 2 * at) for at, (task, state) in enumerate(states)]
    airflow.documents = {"training.cleanup": usual_report(state="failed", error="it broke")}
    airflow.state = "failed"
    airflow.answers.set()
    blank.js_with_modules(OPEN, "openRun")
    blank.shows("it broke")
    assert len(blank.all(".tasks tbody tr")) == 4


def test_each_link_of_the_history_opens_its_own_training(blank: Page, airflow: Airflow) -> None:
    whole = {**instance("fit", "success", 1), "operator_name": "@task.manycpu"}
    airflow.tasks = [{**whole, "task_id": f"{group}.fit"} for group in ("big", "small")]
    airflow.documents = {f"{name}.fit": usual_report(name=name, key=name) for name in ("big", "small")}
    airflow.state = "success"
    airflow.answers.set()
    blank.js_with_modules(OPEN, "openHistory")
    until(lambda: blank.all("tbody .name a"))
    links = [str(link.get_attribute("href")) for link in blank.all("tbody .name a")]
    opened = set()
    for link in links:
        query = urlsplit(link).query
        blank.js("window.end(); history.replaceState(null, '', arguments[0])", f"/?{query}")
        blank.js_with_modules(OPEN, "openRun")
        until(lambda: blank.all("h1"))
        opened.add(blank.find("h1").text)
    assert opened == {"big", "small"}
