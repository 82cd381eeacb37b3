"""Intel's extension on the last torch it was made for, in an environment of its own: `make test-legacy`."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.tiny_bert import tiny_checkpoint, tiny_data

ROOT = Path(__file__).parents[2]
RECIPE = ("-m", "manycpu.pipeline.recipes.question_answering")
OPTIONS = ("--max_seq_length", "48", "--doc_stride", "8", "--logging_steps", "1", "--max_steps", "6")


@pytest.fixture
def python() -> str:
    """Give the Python of the environment with the extension."""
    folder = ROOT / os.environ.get("MANYCPU_LEGACY", ".venv-legacy")
    if not (folder / ".installed").exists():
        pytest.skip("`make test-legacy` makes the environment that this needs")
    return str(folder / "bin" / "python")


def test_two_ranks_train_with_the_extension_and_leave_a_model_in_fp32(python: str, tmp_path: Path) -> None:
    """Both ranks run the recipe in bf16 over gloo; what they export is what today's torch reads as fp32."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / ".dev"),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "cache"),
        "MANYCPU_RUN": "test",
        "MANYCPU_BACKEND": "gloo",
        "MANYCPU_NNODES": "1",
        "MANYCPU_NPROC_PER_NODE": "2",
        "MANYCPU_DATA": str(tiny_data(tmp_path / "data", train=24, validation=7)),
        "MANYCPU_MODEL": str(tiny_checkpoint(tmp_path / "model")),
        "MANYCPU_OUTPUT": str(tmp_path / "output"),
        "MANYCPU_CHECKPOINTS": str(tmp_path / "checkpoints"),
        "MANYCPU_DTYPE": "bf16",
    }
    launch = (python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no-python")
    command = (*launch, python, "-m", "manycpu.pipeline.node", *RECIPE, *OPTIONS, "--use_ipex")
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Intel's extension 2.8.0 optimizes model and optimizer" in done.stdout
    output = tmp_path / "output"
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["train_steps"] == 6
    with (output / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"F32"}
    assert json.loads((output / "config.json").read_text())["dtype"] == "float32"
