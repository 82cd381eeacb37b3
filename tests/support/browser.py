"""Headless Chromium: a window that finds elements as a person would."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import JavascriptException, TimeoutException, WebDriverException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support import expected_conditions as conditions
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server"),
    "--window-size=1280,1360",
)
# Folder for screenshots of the README: MANYCPU_SCREENSHOTS=docs/images
SCREENSHOTS = os.environ.get("MANYCPU_SCREENSHOTS")

NETWORK_CHANGED = "ERR_NETWORK_CHANGED"
"""Chromium aborts all its requests when a network address of the machine, such as the cluster's, changes."""
LATE_S = 30.0  # if an element is missing after that time, the request for a module may have been aborted

needs_chromium = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="Chromium is not installed: packages chromium and chromium-driver",
)


class Page:
    """A browser window whose methods wait until the wanted element or text appears."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser, self._wait = browser, _wait(browser)
        self._complaints = list[str]()

    def find(self, css: str) -> WebElement:
        """Wait until an element can be clicked or typed into, and return it.

        After 30 s, the page is loaded once more if Chromium has aborted a request.
        """
        clickable = conditions.element_to_be_clickable((By.CSS_SELECTOR, css))
        try:
            found: WebElement = _wait(self.browser, LATE_S).until(clickable)
        except TimeoutException:
            self._load_again_if_dropped()
            found = self._wait.until(clickable)
        return found

    def all(self, css: str) -> list[WebElement]:
        """Return the elements that exist at this moment, without waiting."""
        return self.browser.find_elements(By.CSS_SELECTOR, css)

    def button(self, text: str) -> WebElement:
        """Return a button of the dialog by its label."""
        path = f"//*[@role='dialog']//button[normalize-space()='{text}']"
        found: WebElement = self._wait.until(conditions.element_to_be_clickable((By.XPATH, path)))
        return found

    def paste(self, name: str, text: str) -> None:
        """Replace the content of a field by a text, and wait until the field has it."""
        field = self.find(f"[name='{name}']")
        field.send_keys(Keys.CONTROL + "a" + Keys.NULL, Keys.DELETE)
        self._wait.until(lambda _: not field.get_attribute("value"))
        if text:  # insert it at once: the form loses characters that are typed faster than it updates
            self.browser.execute_cdp_cmd("Input.insertText", {"text": text})
        self._wait.until(lambda _: field.get_attribute("value") == text, f"{name} did not take {text!r}")

    def shows(self, text: str, timeout: float = 300) -> None:
        """Wait until the page shows a text; fail the test after ``timeout`` seconds."""
        seen = conditions.text_to_be_present_in_element((By.TAG_NAME, "body"), text)
        try:
            _wait(self.browser, timeout).until(seen)
        except TimeoutException:
            shown = self.browser.find_element(By.TAG_NAME, "body").text
            complaints = "\n".join(self.complaints())
            pytest.fail(f"the page never showed {text!r}, but:\n{shown[-3000:]}\n{complaints[-3000:]}")

    def js(self, body: str, *args: object) -> Any:
        """Run JavaScript in the page, as the body of a function, and return its result."""
        return self.browser.execute_script(body, *args)

    def js_with_modules(self, body: str, *args: object) -> Any:
        """Run JavaScript that imports modules; return what it passes to its last argument, a callback."""
        try:
            return self.browser.execute_async_script(body, *args)
        except JavascriptException:
            if not self._load_again_if_dropped():
                raise
        return self.browser.execute_async_script(body, *args)

    def _load_again_if_dropped(self) -> bool:
        """Load the page once more if Chromium has aborted a request of it; return whether that was so."""
        self._complaints = self.complaints()
        was_dropped = any(NETWORK_CHANGED in one for one in self._complaints)
        if was_dropped:
            self._complaints.clear()
            self.browser.refresh()
        return was_dropped

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page in pixels; it may be narrower than a window can be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Set the preferred color scheme: ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def complaints(self) -> list[str]:
        """Return the errors and warnings in the browser's console since the last call."""
        entries = self.browser.get_log("browser")  # type: ignore[no-untyped-call]
        new = [entry["message"] for entry in entries if entry["level"] in {"SEVERE", "WARNING"}]
        complaints, self._complaints = self._complaints + new, []
        return complaints

    def shoot(self, name: str, height: int) -> None:
        """Save a screenshot as ``name``.png, 1280 pixels wide, if SCREENSHOTS names a folder."""
        if SCREENSHOTS:
            self.browser.set_window_size(1280, height)
            Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
            self.browser.save_screenshot(f"{SCREENSHOTS}/{name}.png")


def _wait(browser: webdriver.Chrome, timeout: float = 300) -> WebDriverWait[webdriver.Chrome]:
    """Return a wait of ``timeout`` seconds that tolerates page changes, such as a redirect to the login."""
    return WebDriverWait(browser, timeout, ignored_exceptions=(WebDriverException,))


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Start one browser for all tests of this process."""
    options = Options()
    options.binary_location = str(shutil.which("chromium"))
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield browser
    finally:
        browser.quit()


@pytest.fixture
def page(chromium: webdriver.Chrome) -> Iterator[Page]:
    """Open a window for this test, without data of earlier tests."""
    first = chromium.current_window_handle
    chromium.switch_to.new_window("window")
    opened = Page(chromium)
    opened.complaints()
    try:
        yield opened
    finally:
        everything = {"origin": "*", "storageTypes": "all"}
        chromium.execute_cdp_cmd("Storage.clearDataForOrigin", everything)
        chromium.execute_cdp_cmd("Network.clearBrowserCookies", {})  # removes cookies of other ports too
        chromium.close()
        chromium.switch_to.window(first)
