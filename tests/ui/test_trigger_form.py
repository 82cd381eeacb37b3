"""DAG `train` in Airflow's own web UI, in headless Chromium: the form, a run from it, and its end."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support import expected_conditions as conditions
from selenium.webdriver.support.ui import WebDriverWait
from support.standalone_airflow import Airflow

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server"),
    "--window-size=1280,1360",
)
# A folder to put screenshots for the README into: MANYCPU_SCREENSHOTS=docs/images
SCREENSHOTS = os.environ.get("MANYCPU_SCREENSHOTS")
SECTIONS = ["Program", "Scale", "Environment", "Failures", "Deadlines", "Tracking", "Target", "Target: local"]

pytestmark = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="Chromium is not installed: packages chromium and chromium-driver",
)


class Page:
    """A browser window, asked for what a person would look for; waits until it is there."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser, self._wait = browser, WebDriverWait(browser, 60)

    def find(self, css: str) -> WebElement:
        """Find what can be clicked or typed into."""
        found: WebElement = self._wait.until(conditions.element_to_be_clickable((By.CSS_SELECTOR, css)))
        return found

    def button(self, text: str) -> WebElement:
        """Find a button of the dialog by what is on it."""
        path = f"//*[@role='dialog']//button[normalize-space()='{text}']"
        found: WebElement = self._wait.until(conditions.element_to_be_clickable((By.XPATH, path)))
        return found

    def paste(self, name: str, text: str) -> None:
        """Put a text into a field, in the place of what is there."""
        field = self.find(f"[name='{name}']")
        field.send_keys(Keys.CONTROL + "a" + Keys.NULL, Keys.DELETE)
        self._wait.until(lambda _: not field.get_attribute("value"))
        if text:  # in one piece: typed faster than the form follows, characters get lost
            self.browser.execute_cdp_cmd("Input.insertText", {"text": text})
        self._wait.until(lambda _: field.get_attribute("value") == text, f"{name} did not take {text!r}")

    def shows(self, text: str, timeout: float = 60) -> None:
        """Wait for a text."""
        seen = conditions.text_to_be_present_in_element((By.TAG_NAME, "body"), text)
        WebDriverWait(self.browser, timeout).until(seen, f"the page never showed {text!r}")

    def shoot(self, name: str, height: int) -> None:
        """Take a screenshot, when they are wanted."""
        if SCREENSHOTS:
            self.browser.set_window_size(1280, height)
            Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
            self.browser.save_screenshot(f"{SCREENSHOTS}/{name}.png")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    """Open a browser of the test's own."""
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'browser'}"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Page(browser)
    finally:
        browser.quit()


def test_a_run_from_the_trigger_form(
    airflow: Airflow, page: Page, tmp_path: Path, script: Callable[..., str]
) -> None:
    page.browser.get(f"{airflow.url}/dags/train")
    page.find("input[name=username]").send_keys(airflow.user)
    page.find("input[name=password]").send_keys(airflow.password)
    page.find("button[type=submit]").click()
    page.find("[data-testid=trigger-dag-button]").click()

    page.button("Program").click()
    page.find("[name=element_program]")
    sections = page.browser.find_elements(By.CSS_SELECTOR, "[role=dialog] button[data-part=item-trigger]")
    assert [section.text for section in sections][: len(SECTIONS)] == SECTIONS
    page.shows("What to run: a recipe's name, a script's path")
    page.shoot("trigger-form", 1360)

    output = tmp_path / "out"
    for name, text in (
        ("program", script()),
        ("args", ""),
        ("data", ""),
        ("model", ""),
        ("output", str(output)),
    ):
        page.paste(f"element_{name}", text)
    page.button("Scale").click()
    page.paste("element_nproc_per_node", "2")
    page.button("Trigger").click()

    page.shows("Task Instances")
    run = f"dags/train/dagRuns/{page.browser.current_url.rsplit('/', 1)[-1]}"
    assert airflow.end(run, 150) == "success"
    page.browser.refresh()
    page.shows("training.report")
    page.shows("Success")
    page.shoot("finished-run", 1060)
    report = json.loads((output / "report.json").read_text())
    assert (report["state"], report["world_size"]) == ("succeeded", 2)
