"""The training tabs in Airflow's own UI, in a browser."""

from urllib.parse import quote, urlsplit

from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from support.browser import Page
from support.standalone_airflow import Airflow
from support.waiting import until


class Tab:
    """The tab of a DAG run or of a DAG in a browser, as a logged-in user sees it."""

    def __init__(self, airflow: Airflow, page: Page) -> None:
        self.airflow, self.page = airflow, page

    def enter(self) -> None:
        """Log in with a token."""
        url = self.airflow.url
        # A cookie can be set only on a page of its site.
        self.page.browser.get(f"{url}/manycpu/static/icon.svg")
        cookie = {"name": "_token", "value": self.airflow.token, "path": urlsplit(url).path or "/"}
        self.page.browser.add_cookie(cookie)

    def open(self, run: str, query: str = "") -> None:
        """Open the tab of a DAG run."""
        _, dag, _, run_id = run.split("/")
        self._go(f"dags/{dag}/runs/{quote(run_id, safe=':+')}/plugin/training{query}")

    def open_history(self, dag: str) -> None:
        """Open the tab of a DAG."""
        self._go(f"dags/{dag}/plugin/trainings")

    def log_in(self) -> None:
        """Fill in the form that Airflow shows to a user who is not logged in."""
        self.page.find("input[name=username]").send_keys(self.airflow.user)
        self.page.find("input[name=password]").send_keys(self.airflow.password)
        self.page.find("button[type=submit]").click()
        self.page.find(".manycpu-tab")

    def text(self) -> str:
        """Return the text of the tab."""
        return self.page.browser.find_element(By.CSS_SELECTOR, ".manycpu-tab").text

    def shows(self, text: str, timeout: float = 300) -> None:
        """Wait until the tab shows a text."""
        self.page.find(".manycpu-tab")
        try:
            until(lambda: text in self.text(), timeout)
        except AssertionError:
            raise AssertionError(f"the tab never showed {text!r}, but {self.text()!r}") from None

    def choice(self) -> Select:
        """Return the selection box of the trainings."""
        return Select(self.page.find(".manycpu-choice select"))

    def _go(self, below: str) -> None:
        self.page.browser.get(f"{self.airflow.url}/{below}")
