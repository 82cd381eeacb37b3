"""The wheel holds what is imported, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_everything_is_below_one_name(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/", 1)[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"manycpu"}


def test_the_layers_and_their_data_are_in_it(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    demo = "manycpu/pipeline/recipes/question_answering/demo_data"
    assert {f"{demo}/train.json", f"{demo}/validation.json"} <= names
    assert {"manycpu/pipeline/py.typed", "manycpu/dags/train.py", "manycpu/operators/train.py"} <= names
    assert {"manycpu/operators/plugin/static/airflow.js", "manycpu/pipeline/page/training.js"} <= names
    assert not [name for name in names if "/tests/" in name or name.endswith(".pyc")]


def test_it_offers_the_command_and_the_provider(wheel: zipfile.ZipFile) -> None:
    (points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(points).decode()
    assert "manycpu = manycpu.pipeline.cli:main" in text
    assert "[apache_airflow_provider]" in text
    assert "[airflow.plugins]" in text


def test_no_class_is_made_twice_under_a_second_name() -> None:
    code = (
        "import manycpu.pipeline.cli, sys; print([m for m in sys.modules if m.split('.')[0] == 'pipeline'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


def test_a_training_process_imports_neither_airflow_nor_what_the_verbs_need() -> None:
    code = "import manycpu.pipeline.node.__main__, sys; print(sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not {"torch", "airflow", "pydantic", "fsspec", "rich", "click"} & set(eval(done.stdout))  # noqa: S307
