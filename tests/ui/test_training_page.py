"""A training's page in Airflow's own UI, below a path, for users of several rights; in headless Chromium."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from support.browser import Page, needs_chromium
from support.standalone_airflow import Airflow
from support.training_tab import Tab
from support.waiting import until

DARK = "document.documentElement.classList.replace('light', 'dark')"
LOOK = "document.dispatchEvent(new Event('visibilitychange'))"
WIDE = "const tab = document.querySelector('.manycpu-tab'); return [tab.scrollWidth, tab.clientWidth]"

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def several(guarded_airflow: Airflow) -> str:
    """A DAG run of several trainings, which has ended."""
    run = guarded_airflow.trigger("shown")
    assert guarded_airflow.end(run) == "success"
    return run


@pytest.fixture(scope="module")
def hidden(guarded_airflow: Airflow) -> str:
    """A DAG run that the user ``outsider`` may not see."""
    run = guarded_airflow.trigger("hidden")
    assert guarded_airflow.end(run) == "success"
    return run


@pytest.fixture
def tab(guarded_airflow: Airflow, page: Page) -> Callable[[str], Tab]:
    """Open Airflow as a user."""

    def as_user(name: str) -> Tab:
        found = Tab(guarded_airflow.as_user(name), page)
        found.enter()
        return found

    return as_user


def status(url: str) -> int:
    """Ask without a login."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_without_a_login_there_are_static_files_and_nothing_else(
    guarded_airflow: Airflow, hidden: str, page: Page
) -> None:
    url = guarded_airflow.url
    files = ("static/airflow.js", "page/training.js")
    assert [status(f"{url}/manycpu/{name}") for name in files] == [200, 200]
    assert status(f"{url}/api/v2/{hidden}/taskInstances/~/xcomEntries") == 401
    assert status(f"{url}/api/v2/plugins") == 401
    address = f"{url}/{hidden.replace('dagRuns', 'runs')}/plugin/training"
    page.browser.get(address)
    page.find("input[name=password]")
    assert not page.all(".manycpu-tab")
    Tab(guarded_airflow, page).log_in()
    assert page.browser.current_url.split("/plugin/")[-1] == "training"  # where the visitor wanted to go


def test_who_may_not_see_the_dag_sees_nothing_of_it(tab: Callable[[str], Tab], hidden: str) -> None:
    outsider = tab("outsider")
    outsider.open(hidden)
    outsider.shows("Airflow does not let you see this run's training")
    outsider.open_history("hidden")
    outsider.shows("Airflow does not let you see this DAG's trainings")
    assert "secret" not in outsider.text()
    entries = outsider.airflow.api("GET", "dags/~/dagRuns/~/taskInstances/~/xcomEntries")["xcom_entries"]
    assert "hidden" not in {entry["dag_id"] for entry in entries}


def test_a_viewer_sees_the_training(tab: Callable[[str], Tab], hidden: str) -> None:
    viewer = tab("viewer")
    viewer.open(hidden)
    viewer.shows("secret")
    viewer.open_history("hidden")
    viewer.shows("succeeded")
    assert viewer.page.complaints() == []


def test_a_choice_among_trainings_stays(tab: Callable[[str], Tab], several: str) -> None:
    viewer = tab("viewer")
    viewer.open(several)
    viewer.shows("pair")
    names = [option.text for option in viewer.choice().options]
    assert names == ["elsewhere", "fits[0]", "fits[1]", "pair"]
    viewer.choice().select_by_value("fits[1]")
    viewer.shows("fits-1")
    viewer.page.browser.refresh()
    viewer.shows("fits-1")
    viewer.choice().select_by_value("elsewhere")
    viewer.shows("not in Airflow's database")


@pytest.mark.long
def test_what_a_program_says_is_text(tab: Callable[[str], Tab], several: str) -> None:
    viewer = tab("viewer")
    viewer.open(several, "?training=pair")
    viewer.shows("<img src=x onerror=alert(1)>")
    viewer.open_history("shown")
    viewer.shows("<img src=x onerror=alert(1)>")
    assert viewer.page.all(".manycpu-tab img") == []


def test_a_dag_without_trainings_says_so(tab: Callable[[str], Tab], guarded_airflow: Airflow) -> None:
    run = guarded_airflow.trigger("foreign")
    viewer = tab("viewer")
    viewer.open(run)
    viewer.shows("there is no training to show")
    viewer.open_history("foreign")
    viewer.shows("there is no training to show")


def fits_and_darkens(viewer: Tab) -> None:
    """See that a tab is not wider than its place, and becomes dark with Airflow, with what it showed."""
    needed, there = viewer.page.js(WIDE)
    assert needed <= there <= 400
    before = viewer.text()
    viewer.page.js(DARK)
    until(lambda: viewer.page.all(".manycpu-tab [data-theme=dark]"))
    until(lambda: viewer.text() == before)


@pytest.mark.long
def test_the_tab_fits_a_small_screen_and_follows_airflow_into_the_dark(
    tab: Callable[[str], Tab], several: str
) -> None:
    viewer = tab("viewer")
    viewer.page.resize(400, 900)
    viewer.open(several, "?training=pair")
    viewer.shows("pair-1")
    fits_and_darkens(viewer)
    viewer.open_history("shown")
    viewer.shows("succeeded")
    viewer.page.all(".manycpu-tab tbody input")[1].click()
    fits_and_darkens(viewer)
    assert len(viewer.page.all(".manycpu-tab tbody input:checked")) == 1
    assert viewer.page.complaints() == []


@pytest.mark.long
def test_the_keyboard_reaches_the_choice_and_the_logs(tab: Callable[[str], Tab], several: str) -> None:
    viewer = tab("viewer")
    viewer.open(several, "?training=pair")
    viewer.shows("pair-1")
    viewer.page.js("document.querySelector('.manycpu-choice select').focus()")
    viewer.page.browser.switch_to.active_element.send_keys("fits[0]")
    viewer.shows("fits-0")
    viewer.page.js("window.stayed = true")
    while viewer.page.browser.switch_to.active_element.text != "Log":
        viewer.page.browser.switch_to.active_element.send_keys(Keys.TAB)
    viewer.page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    until(lambda: viewer.page.browser.current_url.endswith("/tasks/fits/mapped/0"))
    assert viewer.page.js("return window.stayed") is True  # Airflow's own router took it there


@pytest.mark.long
def test_a_login_that_has_ended_leads_to_the_login_and_back(tab: Callable[[str], Tab], several: str) -> None:
    viewer = tab("viewer")
    viewer.open(several, "?training=pair")
    viewer.shows("pair-1")
    viewer.page.browser.delete_all_cookies()
    viewer.page.js(LOOK)
    viewer.log_in()
    viewer.shows("pair-1")


def test_an_airflow_that_does_not_answer_is_told_and_asked_again(
    tab: Callable[[str], Tab], several: str
) -> None:
    viewer = tab("viewer")
    viewer.open(several, "?training=pair")
    viewer.shows("pair-1")
    viewer.page.browser.set_network_conditions(offline=True, latency=0, throughput=0)
    try:
        viewer.page.js(LOOK)
        viewer.shows("Airflow does not answer")
        assert "pair-1" in viewer.text()
    finally:
        viewer.page.browser.delete_network_conditions()
    until(lambda: "does not answer" not in viewer.text())
    assert "pair-1" in viewer.text()


def test_the_history_shows_fifty_runs_and_then_more(
    tab: Callable[[str], Tab], guarded_airflow: Airflow
) -> None:
    for _ in range(51):
        guarded_airflow.trigger("waiting")
    viewer = tab("viewer")
    viewer.open_history("waiting")
    viewer.shows("queued")
    assert len(viewer.page.all(".manycpu-tab tbody tr")) == 50
    viewer.page.find(".manycpu-more").click()
    until(lambda: len(viewer.page.all(".manycpu-tab tbody tr")) == 51)
    assert not viewer.page.browser.find_element(By.CSS_SELECTOR, ".manycpu-more").is_displayed()


def test_the_curve_grows_while_the_task_is_deferred(
    tab: Callable[[str], Tab], guarded_airflow: Airflow, tmp_path: Path
) -> None:
    steps = tmp_path / "steps"
    steps.write_text("3")
    run = guarded_airflow.trigger("growing", {"folder": str(tmp_path)})
    try:
        viewer = tab("viewer")
        viewer.open(run)
        viewer.shows("step 3 of 100")
        until(lambda: guarded_airflow.task(run)["state"] == "deferred")
        steps.write_text("7")
        viewer.shows("step 7 of 100")
        assert guarded_airflow.task(run)["state"] == "deferred"
        links = guarded_airflow.api("GET", f"{run}/taskInstances/training.train/links")["extra_links"]
        viewer.page.browser.get(f"{guarded_airflow.url}/{links['Training']}")
        viewer.shows("step 7 of 100")
        assert "Training" in [tab.text for tab in viewer.page.all("a.active")]
    finally:
        (tmp_path / "end").touch()
    viewer.shows("succeeded", 90)
    assert guarded_airflow.end(run) == "success"
    assert viewer.page.complaints() == []
    assert json.loads((tmp_path / "output" / "report.json").read_text())["state"] == "succeeded"
