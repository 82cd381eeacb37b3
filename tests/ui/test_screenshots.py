"""Screenshots of a training's page for the README and docs/, made of the example while it trains."""

from pathlib import Path
from typing import Any

import pytest
from support.browser import SCREENSHOTS, Page, needs_chromium
from support.standalone_airflow import Airflow
from support.training_tab import Tab
from support.waiting import until

from manycpu.operators.examples import form_defaults
from manycpu.operators.local_airflow import DAGS

RATES = ("2e-4", "5e-5", "1e-4")
HALFWAY = "const bar = document.querySelector('.manycpu progress'); return bar && bar.value > 0.5 * bar.max"

pytestmark = [
    needs_chromium,
    pytest.mark.skipif(not SCREENSHOTS, reason="MANYCPU_SCREENSHOTS names no folder for screenshots"),
    pytest.mark.timeout(1800),
]


def begin(airflow: Airflow, rate: str) -> str:
    """Train the example with a learning rate; returns the DAG run's path."""
    defaults: dict[str, Any] = form_defaults(Path(DAGS))
    return airflow.trigger("train", {"args": f"{defaults['args']} --learning_rate {rate}"})


def shoot(page: Page, name: str, height: int) -> None:
    """Take a screenshot in Airflow's light and in its dark."""
    for scheme in ("light", "dark"):
        page.js("localStorage.setItem('theme', arguments[0])", scheme)
        page.js("dispatchEvent(new StorageEvent('storage', {key: 'theme', newValue: arguments[0]}))", scheme)
        page.find(f".manycpu-tab [data-theme={scheme}] h1, .manycpu-tab [data-theme={scheme}] table")
        page.shoot(f"{name}-{scheme}", height)


def test_the_tabs_of_the_example(airflow: Airflow, page: Page) -> None:
    for rate in RATES[:-1]:
        assert airflow.end(begin(airflow, rate), 600) == "success"
    run = begin(airflow, RATES[-1])
    tab = Tab(airflow, page)
    tab.enter()
    tab.open(run)
    until(lambda: page.js(HALFWAY), 600)
    shoot(page, "training", 1300)
    assert airflow.end(run, 600) == "success"
    tab.open_history("train")
    until(lambda: len(page.all(".manycpu-tab tbody input")) == len(RATES))
    for box in page.all(".manycpu-tab tbody input"):
        box.click()
    shoot(page, "trainings", 1100)
