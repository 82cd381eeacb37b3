"""A person approves of a model in Airflow's own web UI, in headless Chromium, with the comparison in view."""

from pathlib import Path
from urllib.parse import quote

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support import expected_conditions as conditions
from selenium.webdriver.support.ui import WebDriverWait
from support.approval import asked
from support.browser import Page, needs_chromium
from support.standalone_airflow import Airflow

from manycpu.operators.base import tab_of
from manycpu.operators.champion.promotions import champion
from manycpu.operators.champion.versions import write_version

pytestmark = needs_chromium


def approve(airflow: Airflow, page: Page, path: str) -> str:
    """See the comparison of a DAG run that asks, and approve; return the address of the candidate's tab."""
    _, dag, _, run = path.split("/")
    asked(airflow, path)
    shown = f"{airflow.url}/dags/{dag}/runs/{quote(run, safe='')}"
    page.browser.get(f"{shown}/tasks/approve/required_actions")
    page.find("input[name=username]").send_keys(airflow.user)
    page.find("input[name=password]").send_keys(airflow.password)
    page.find("button[type=submit]").click()
    page.shows("Is this model to be the champion?")
    cells = [cell.text for cell in page.all("table td")]
    assert cells[:3] == ["accuracy on digits that neither saw", cells[1], "none yet"]
    assert cells[1].endswith(" %")
    link = page.browser.find_element(By.LINK_TEXT, "The candidate's training")
    tab = f"{airflow.url}/{tab_of(dag, run, 'candidate.fit', 0)}"
    assert link.get_attribute("href") == tab
    page.shoot("approval", 900)

    button = (By.XPATH, "//button[normalize-space()='Approve']")
    WebDriverWait(page.browser, 300).until(conditions.element_to_be_clickable(button)).click()
    assert airflow.end(path, 280) == "success"
    return tab


def test_a_person_approves_with_the_comparison_in_view(airflow: Airflow, page: Page) -> None:
    approve(airflow, page, airflow.trigger("asking"))


@pytest.mark.long
def test_what_a_person_approves_becomes_the_champion(airflow: Airflow, page: Page, tmp_path: Path) -> None:
    write_version(tmp_path / "data", 100)
    conf = {"folder": str(tmp_path), "rates": [0.3], "nproc_per_node": 1}
    tab = approve(airflow, page, airflow.trigger("champion", conf))
    promoted = champion(tmp_path)
    assert promoted is not None
    page.browser.get(tab)
    page.find(".manycpu-tab h1")
    assert "Training" in [open_tab.text for open_tab in page.all("a.active")]
    assert promoted.name.startswith(next((tmp_path / "predictions").iterdir()).name)
