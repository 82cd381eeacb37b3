"""Environments that lack an extra: the error names the line that installs it."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("home")

WITHOUT = """
import sys
for module in sys.argv[1].split(","):
    sys.modules[module] = None  # as if it were not installed
sys.argv = ["manycpu", *sys.argv[2:]]
from manycpu.pipeline.cli import main
main()
"""
NOTEBOOK = """
import sys
sys.modules["cloudpickle"] = None
from manycpu.pipeline import notebook_launcher
notebook_launcher(lambda: 1, num_processes=1)
"""
KUBERNETES = "run: {program: train.py, output: out}\ntarget: {kind: kubernetes, image: r/x:1}\n"
LOCAL = "run: {program: train.py, output: out, nproc_per_node: 1}\n"


def printed(tmp_path: Path, *argv: str) -> tuple[int, str]:
    for name, text in {"train.py": "", "cluster.yaml": KUBERNETES, "here.yaml": LOCAL}.items():
        (tmp_path / name).write_text(text)
    ended = subprocess.run(
        [sys.executable, "-c", *argv], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("modules", ["kubernetes", "kubernetes_asyncio,cryptography", "requests,websocket"])
@pytest.mark.parametrize(
    "words",
    ["run cluster.yaml --run-id x", "render cluster.yaml", "image cluster.yaml", "status --namespace ml"],
)
def test_what_kubernetes_needs_is_named_at_once(tmp_path: Path, words: str, modules: str) -> None:
    code, text = printed(tmp_path, WITHOUT, modules, *words.split())
    assert code == 2, text
    assert text.startswith("manycpu: ")
    lacking = ", ".join(sorted(modules.split(",")))
    assert f"Kubernetes needs {lacking}, which this environment lacks" in text
    assert text.endswith("Install it: pip install 'manycpu[kubernetes]'.\n")


@pytest.mark.parametrize("field", ["data", "model"])
def test_what_the_hub_needs_is_named_in_preflight(tmp_path: Path, field: str) -> None:
    words = ["preflight", "here.yaml", f"--{field}", "hf://datasets/a/b"]
    code, text = printed(tmp_path, WITHOUT, "huggingface_hub", *words)
    assert code == 2, text
    assert f"run.{field}: a URL of the Hub needs huggingface_hub, which this environment lacks" in text
    assert "pip install 'manycpu[helper]'" in text


def test_what_only_pods_read_needs_no_package_here(tmp_path: Path) -> None:
    words = ["preflight", "cluster.yaml", "--data", "hf://datasets/a/b", "--model", "s3://sets/model"]
    _, text = printed(tmp_path, WITHOUT, "huggingface_hub,s3fs", *words)
    assert "target.connection: " in text
    assert "run.data" not in text
    assert "run.model" not in text


def test_what_a_notebook_s_function_needs_is_named(tmp_path: Path) -> None:
    text = printed(tmp_path, NOTEBOOK)[1]
    assert "BadInputError: function: a function that travels needs cloudpickle" in text
    assert "pip install 'manycpu[train]'" in text
