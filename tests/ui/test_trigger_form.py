"""DAG `train` in Airflow's own web UI, in headless Chromium: the form, a run from it, and its end."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from support.browser import Page, needs_chromium
from support.standalone_airflow import Airflow

SECTIONS = ["Program", "Scale", "Environment", "Failures", "Deadlines", "Tracking", "Target", "Target: local"]

pytestmark = needs_chromium


def begin(airflow: Airflow, page: Page, program: str, output: Path) -> str:
    """Log in, fill in the form, and trigger a run with two processes; return its path in the API."""
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

    for name, text in (
        ("program", program),
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
    return f"dags/train/dagRuns/{page.browser.current_url.rsplit('/', 1)[-1]}"


def test_the_trigger_form_says_what_to_run(airflow: Airflow, page: Page, tmp_path: Path) -> None:
    """There is no such program: nothing trains."""
    output, program = tmp_path / "out", str(tmp_path / "no-such.py")
    run = begin(airflow, page, program, output)
    assert airflow.end(run) == "failed"
    page.browser.refresh()
    page.shows("training.report")
    page.shows("Failed")
    conf = airflow.api("GET", run)["conf"]
    given = {"program": program, "output": str(output), "nproc_per_node": 2}
    assert {name: conf[name] for name in given} == given
    assert [conf[name] for name in ("args", "data", "model") if conf[name]] == []
    assert any("run.program" in line for line in airflow.log(run, "training.prepare"))


@pytest.mark.long
def test_a_run_from_the_trigger_form_trains(
    airflow: Airflow, page: Page, tmp_path: Path, script: Callable[..., str]
) -> None:
    output = tmp_path / "out"
    run = begin(airflow, page, script(), output)
    assert airflow.end(run, 150) == "success"
    page.browser.refresh()
    page.shows("training.report")
    page.shows("Success")
    page.shoot("finished-run", 1060)
    report = json.loads((output / "report.json").read_text())
    assert (report["state"], report["world_size"]) == ("succeeded", 2)
