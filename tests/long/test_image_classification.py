"""The recipe image_classification as users run it: it learns, one rank as two, and resumes after a kill."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from PIL import Image
from support.killable_programs import Program
from support.waiting import until

from manycpu.pipeline.recipes.image_classification import generate

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parents[2]
SMALL = ("--model", "test_resnet", "--no_pretrained", "--unfreeze", "--image_size", "32", "--lr", "1e-2")
RECIPE = "manycpu.pipeline.recipes.image_classification"


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    generate.main(str(folder))
    return folder


def run(folder: Path, **fields: Any) -> tuple[dict[str, Any], str]:
    """Run the recipe by the command; its report and what it printed."""
    folder.mkdir(exist_ok=True)
    own = {"program": "image_classification", "output": str(folder / "output"), **fields}
    (folder / "run.yaml").write_text(yaml.safe_dump({"run": own, "target": {"kind": "local"}}))
    done = subprocess.run(
        [sys.executable, "-m", "manycpu.pipeline.cli", "run", str(folder / "run.yaml")],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / ".dev"), "MANYCPU_HOME": str(folder / "home")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads((folder / "output" / "report.json").read_text())
    return report, done.stdout + done.stderr


def test_two_ranks_learn_as_well_as_one(digits: Path, tmp_path: Path) -> None:
    found = {}
    for ranks in (1, 2):
        report, printed = run(
            tmp_path / str(ranks), data=str(digits), nproc_per_node=ranks, args=[*SMALL, "--batch_size", "32"]
        )
        assert len(re.findall(r"epoch \d: \d+\.\d\d", printed)) == 5
        found[ranks] = report["metrics"]["accuracy"]
    assert min(found.values()) >= 90
    assert abs(found[1] - found[2]) <= 2


def test_the_tutorials_own_configuration_runs_from_a_staged_model(tmp_path: Path) -> None:
    """It is resnet50d at 224 x 224, its body frozen; images and weights are random: there are no others."""
    import timm

    timm.models.save_for_hf(timm.create_model("resnet50d"), str(tmp_path / "model"), safe_serialization=True)
    (tmp_path / "pets").mkdir()
    random = np.random.default_rng(0)
    for i in range(84):
        pixels = random.integers(0, 256, (375, 500, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pets" / f"{('beagle', 'great_dane')[i % 2]}_{i}.jpg")
    report, printed = run(
        tmp_path / "run",
        data=str(tmp_path / "pets"),
        model=str(tmp_path / "model"),
        args=["--num_workers", "1"],
    )
    assert report["metrics"]["train_steps"] == 10
    assert len(re.findall(r"epoch \d: \d+\.\d\d", printed)) == 5
    body = [
        timm.create_model(f"local-dir:{tmp_path / name}", pretrained=True) for name in ("model", "run/output")
    ]
    first, last = (dict(model.named_parameters()) for model in body)
    assert last["fc.weight"].shape == (2, 2048)
    assert {
        name for name in first if not name.startswith("fc") and (first[name] != last[name]).any()
    } == set()


def test_a_killed_training_goes_on_from_its_last_checkpoint(digits: Path, tmp_path: Path) -> None:
    env = os.environ | {
        "PYTHONPATH": str(ROOT / ".dev"),
        "MANYCPU_RUN": "killed",
        "MANYCPU_NNODES": "1",
        "MANYCPU_NPROC_PER_NODE": "2",
        "MANYCPU_DATA": str(digits),
        "MANYCPU_OUTPUT": str(tmp_path / "output"),
        "MANYCPU_CHECKPOINTS": str(tmp_path / "killed"),
    }
    ranks = [sys.executable, "-m", "manycpu.pipeline.node", "--nproc-per-node=2", "-m", RECIPE, *SMALL]
    words = [*ranks, "--batch_size", "32", "--checkpointing_steps", "10"]
    with Program(words, env=env, stdout=subprocess.DEVNULL) as program:
        until((tmp_path / "killed" / "checkpoint-30" / "trainer_state.json").exists, timeout=600)
        for child in psutil.Process(program.pid).children(recursive=True):
            child.send_signal(signal.SIGKILL)
    done = subprocess.run(words, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "output" / "all_results.json").read_text())
    assert found["resumed_from_step"] >= 30
    assert found["train_steps"] == 115
    assert found["accuracy"] >= 90
