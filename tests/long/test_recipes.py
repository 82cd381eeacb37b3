"""Recipes learn as well through a DAG run and from a notebook as by the command."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.notebooks import executed

from manycpu.pipeline.recipes.image_classification import generate

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("home")]
LEAST = 90.0  # per cent; chance is 10
SMALL = ["--model", "test_resnet", "--no_pretrained", "--unfreeze", "--image_size", "32", "--lr", "1e-2"]
RUNS: dict[str, dict[str, Any]] = {
    "image_classification": {"args": [*SMALL, "--batch_size", "32"], "nproc_per_node": 2},
    "hogwild": {"args": ["--epochs", "10", "--lr", "0.01", "--momentum", "0.5"], "subprocesses": 2},
}
each_recipe = pytest.mark.parametrize("recipe", RUNS)
DAG = """
from airflow.sdk import dag
from manycpu.operators import training_pipeline

@dag(schedule=None)
def learns():
    training_pipeline(run={run!r}, target={{"kind": "local"}})

learns()
"""


@pytest.fixture
def run(recipe: str, tmp_path: Path) -> dict[str, Any]:
    """Give the fields of a recipe's run; hogwild takes scikit-learn's digits by itself."""
    data = {}
    if recipe == "image_classification":
        generate.main(str(tmp_path / "digits"))
        data = {"data": str(tmp_path / "digits")}
    return {"program": recipe, "output": str(tmp_path / "model"), **data, **RUNS[recipe]}


def per_cent(accuracy: float) -> float:
    return accuracy * 100 if accuracy <= 1 else accuracy


@each_recipe
def test_a_dag_run_learns(run: dict[str, Any], run_dag: Callable[..., SimpleNamespace]) -> None:
    ran = run_dag("learns", DAG.format(run=run))
    assert ran.state == "success", ran.said[-3000:]
    report = json.loads(Path(run["output"], "report.json").read_text())
    assert per_cent(report["metrics"]["accuracy"]) >= LEAST


@each_recipe
def test_a_notebook_learns(run: dict[str, Any], tmp_path: Path) -> None:
    (cell,) = executed([f"from manycpu.pipeline import train\ntrain({run!r}).metrics['accuracy']"], tmp_path)
    assert not cell.error, cell.error
    assert per_cent(float(cell.value)) >= LEAST
