"""The wheel holds what is imported, and nothing else; it and the sdist can be built again, byte by byte."""

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(source: Path, dist: Path, **environ: str) -> dict[str, str]:
    """Build wheel and sdist; return name -> sha256."""
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(dist)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, env=os.environ | environ)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.iterdir()}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder for the wheel and the sdist."""
    return tmp_path_factory.mktemp("dist")


@pytest.fixture(scope="module")
def built(dist: Path) -> dict[str, str]:
    """Build the wheel and the sdist."""
    return build(ROOT, dist)


@pytest.fixture(scope="module")
def wheel(dist: Path, built: dict[str, str]) -> zipfile.ZipFile:
    """Open the wheel."""
    return zipfile.ZipFile(dist / next(name for name in built if name.endswith(".whl")))


def test_another_folder_time_umask_and_locale_build_the_same_bytes(
    dist: Path, built: dict[str, str], tmp_path: Path
) -> None:
    (path,) = dist.glob("*.tar.gz")
    old = os.umask(0o077)
    try:
        with tarfile.open(path) as sdist:
            sdist.extractall(tmp_path, filter="tar")
        for file in tmp_path.rglob("*"):
            os.utime(file, (2e9, 2e9))
            file.chmod(file.stat().st_mode & 0o700)
        (source,) = tmp_path.iterdir()
        again = build(source, tmp_path / "dist", LC_ALL="C", TZ="Asia/Tokyo", PYTHONHASHSEED="1")
    finally:
        os.umask(old)
    assert again == built


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
