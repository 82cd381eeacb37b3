"""The plugin for Airflow: two tabs, and static files that are all it serves."""

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.api_fastapi.core_api.datamodels.plugins import ReactAppResponse
from starlette.testclient import TestClient

from manycpu.operators.base import TrainingLink
from manycpu.operators.plugin import ManycpuPlugin
from manycpu.operators.plugin.files import files_app

STATIC = Path(__file__).parents[2] / "operators" / "plugin" / "static"
REFUSED = [
    "/",
    "/static",
    "/static/",
    "/page/",
    "/page/__init__.py",
    "/page/html.py",
    "/static/none.js",
    "/static/../files.py",
    "/static/%2e%2e/files.py",
    "/static/..%2f..%2fplugin%2ffiles.py",
    "/page/../../page/training.js/../../../pyproject.toml",
    "/docs",
    "/openapi.json",
]


@pytest.fixture
def client() -> TestClient:
    return TestClient(files_app())


def test_airflow_finds_the_plugin_by_its_entry_point() -> None:
    (found,) = entry_points(group="airflow.plugins", name="manycpu")
    assert found.load() is ManycpuPlugin


def test_airflow_takes_the_tabs_and_no_two_share_a_route() -> None:
    tabs = [ReactAppResponse.model_validate(tab) for tab in ManycpuPlugin.react_apps]
    assert [(tab.destination, tab.url_route, tab.name) for tab in tabs] == [
        ("dag_run", "training", "Training"),
        ("dag", "trainings", "Trainings"),
    ]


def test_the_bundle_sets_the_global_that_airflow_asks_for(client: TestClient) -> None:
    for tab in ManycpuPlugin.react_apps:
        bundle = client.get(tab["bundle_url"].removeprefix("manycpu")).text
        assert f"globalThis.{tab['name']} = " in bundle


@pytest.mark.parametrize("name", sorted(path.name for path in STATIC.iterdir()))
def test_each_file_is_served_with_its_type(client: TestClient, name: str) -> None:
    answer = client.get(f"/static/{name}")
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    assert answer.headers["content-type"] == f"{types[Path(name).suffix]}; charset=utf-8"
    assert answer.content == (STATIC / name).read_bytes()


def test_the_page_is_where_the_bundle_imports_it_from(client: TestClient) -> None:
    assert client.get("/page/training.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert client.get("/page/training.css").status_code == 200


def test_a_browser_asks_whether_a_file_is_still_the_same(client: TestClient) -> None:
    first = client.get("/static/airflow.js")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/static/airflow.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", REFUSED)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_nothing_can_be_sent(client: TestClient) -> None:
    assert client.post("/static/airflow.js").status_code == 405


def test_importing_the_plugin_loads_no_web_framework() -> None:
    code = "import sys, manycpu.operators.plugin; print({'starlette', 'torch'} & {*sys.modules})"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "set()"


def test_a_task_of_an_expanded_training_links_to_its_own() -> None:
    task = SimpleNamespace(training=None, task_id="group.fit")
    key = SimpleNamespace(dag_id="a b", run_id="r+1", task_id="group.fit", map_index=3)
    href = TrainingLink().get_link(task, ti_key=key)  # type: ignore[arg-type]
    assert href == "dags/a%20b/runs/r+1/plugin/training?training=group.fit%5B3%5D"
