"""Official examples of Accelerate and transformers, unchanged, on two ranks of this machine.

``MANYCPU_EXAMPLES`` names a folder with checkouts of Hugging Face's ``accelerate``, ``transformers`` and
``notebooks``. What the examples load from the Hub stands in caches that are made here, tiny.
"""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from support import hub_cache
from support.notebooks import executed
from support.tiny_bert import tiny_checkpoint

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parents[2]
GIVEN = os.environ.get("MANYCPU_EXAMPLES", "")
TRAINER = ["--do_train", "--do_eval", "--num_train_epochs", "1", "--per_device_train_batch_size", "4"]
TEXT = ["--train_file", "{data}/train.txt", "--validation_file", "{data}/validation.txt"]
TABLE = ["--train_file", "{data}/train.csv", "--validation_file", "{data}/validation.csv"]
CHOICES = ["--train_file", "{data}/choices.csv", "--validation_file", "{data}/choices.csv"]
BERT = ["--model_name_or_path", "{model}", "--output_dir", "{output}"]
OF_TRAINER = {
    "language-modeling/run_clm.py": [*TEXT, "--block_size", "32"],
    "language-modeling/run_mlm.py": [*TEXT, "--max_seq_length", "32"],
    "text-classification/run_glue.py": TABLE,
    "multiple-choice/run_swag.py": CHOICES,
}
ITS, OURS = (f"from {package} import notebook_launcher" for package in ("accelerate", "manycpu.pipeline"))
FEATURES = (
    *("automatic_gradient_accumulation", "cross_validation", "ddp_comm_hook", "early_stopping"),
    *("gradient_accumulation", "gradient_accumulation_for_autoregressive_models", "local_sgd", "memory"),
    *("multi_process_metrics", "profiler", "tracking"),
)


def checkout(name: str) -> Path:
    """Find the examples of a checkout."""
    if not GIVEN:
        pytest.skip(
            "MANYCPU_EXAMPLES names no folder with checkouts of accelerate, transformers and notebooks"
        )
    folder = Path(GIVEN) / name / "examples"
    if not folder.is_dir():
        pytest.skip(f"there is no {folder}")
    return folder


def example(name: str, path: str) -> str:
    """Find an example that this environment has the packages of."""
    found = checkout(name) / path
    if "import evaluate" in found.read_text() and importlib.util.find_spec("evaluate") is None:
        pytest.skip("the package evaluate is not installed")
    return str(found)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hub")
    hub_cache.fill(folder)
    return hub_cache.environment(folder)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write small files of text, of pairs of sentences, and of questions with four answers."""
    folder = tmp_path_factory.mktemp("texts")
    for split, count in (("train", 40), ("validation", 12)):
        (folder / f"{split}.txt").write_text(
            "the plans of the old bridge in the town by the river\n" * 8 * count
        )
        rows = [
            {name: row[name] for name in ("sentence1", "sentence2", "label")}
            for row in hub_cache.glue_rows(count)
        ]
        write_table(folder / f"{split}.csv", rows)
    endings = {f"ending{number}": word for number, word in enumerate(("town", "river", "bridge", "year"))}
    rows = [{"sent1": "who drew the plans", "sent2": "the old", **endings, "label": n % 4} for n in range(24)]
    write_table(folder / "choices.csv", rows)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw pictures of two breeds, named as those of the pets are."""
    folder = tmp_path_factory.mktemp("pictures") / "images"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    for breed, shade in (("black_cat", 40), ("white_dog", 200)):
        for number in range(6):
            pixels = numbers.integers(shade, shade + 50, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{breed}_{number}.jpg")
    return folder


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)


def run(folder: Path, program: str, args: list[str], env: dict[str, str], **fields: Any) -> dict[str, Any]:
    """Train by the command, on two ranks; the report and what was printed as ``printed``."""
    own = {"program": program, "args": args, "nproc_per_node": 2, "oversubscribe": True, **fields}
    (folder / "run.yaml").write_text(yaml.safe_dump({"run": own, "target": {"kind": "local"}}))
    done = subprocess.run(
        [sys.executable, "-m", "manycpu.pipeline.cli", "run", str(folder / "run.yaml")],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | env | {"PYTHONPATH": python_path(), "MANYCPU_HOME": str(folder / "home")},
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    (path,) = [*folder.glob("output/report.json"), *folder.glob("home/reports/*/report.json")]
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["state"] == "succeeded"
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert not [*folder.glob("home/runs/*")]
    return report | {"printed": printed}


def python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT / ".dev"), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.parametrize("path", OF_TRAINER)
def test_scripts_of_the_trainer_train_and_report(
    path: str, hub: dict[str, str], texts: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModel

    program = example("transformers", f"pytorch/{path}")
    model = str(tiny_checkpoint(tmp_path / "model"))
    given = {"data": str(texts), "model": model, "output": str(tmp_path / "output")}
    report = run(tmp_path, program, [*BERT, *TRAINER, *OF_TRAINER[path]], hub, **given)
    metrics = report["metrics"]
    assert {"train_loss", "eval_loss", "train_samples"} <= metrics.keys()
    assert metrics["eval_accuracy"] <= 1
    told = json.loads((tmp_path / "output" / "trainer_state.json").read_text())
    assert told["global_step"] == -(-metrics["train_samples"] // 8), "two ranks of 4 share each step"
    AutoModel.from_pretrained(tmp_path / "output")
    assert AutoConfig.from_pretrained(tmp_path / "output").hidden_size == 32


def test_a_script_without_the_trainer_trains(hub: dict[str, str], texts: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    program = example("transformers", "pytorch/text-classification/run_glue_no_trainer.py")
    model = str(tiny_checkpoint(tmp_path / "model"))
    given = {"data": str(texts), "model": model, "output": str(tmp_path / "output")}
    args = [*BERT, *TABLE, "--num_train_epochs", "1", "--per_device_train_batch_size", "4"]
    report = run(tmp_path, program, args, hub, **given)
    assert "Num processes: 2" in report["printed"]
    AutoModel.from_pretrained(tmp_path / "output")


@pytest.mark.parametrize("path", ["checkpointing", "complete_nlp_example"])
def test_states_that_accelerate_saves_are_exported(path: str, hub: dict[str, str], tmp_path: Path) -> None:
    name = path if path.startswith("complete") else f"by_feature/{path}"
    program = example("accelerate", f"{name}.py")
    args = ["--checkpointing_steps", "epoch", "--output_dir", "{output}"]
    report = run(tmp_path, program, args, hub, output=str(tmp_path / "output"))
    assert "'accuracy': " in report["printed"]
    saved = sorted(file.parent.name for file in (tmp_path / "output").glob("*/model.safetensors"))
    assert saved == ["epoch_0", "epoch_1", "epoch_2"]
    assert len([*(tmp_path / "output" / "epoch_2").glob("random_states_*.pkl")]) == 2


@pytest.mark.parametrize("path", ["nlp_example", *(f"by_feature/{name}" for name in FEATURES)])
def test_what_writes_no_model_trains_with_no_output(path: str, hub: dict[str, str], tmp_path: Path) -> None:
    report = run(tmp_path, example("accelerate", f"{path}.py"), [], hub, output=None)
    assert "epoch " in report["printed"] or "accuracy" in report["printed"]


@pytest.mark.parametrize("path", ["cv_example", "complete_cv_example"])
def test_pictures_are_classified(path: str, hub: dict[str, str], pictures: Path, tmp_path: Path) -> None:
    complete = path.startswith("complete")
    args = ["--data_dir", "{data}"]
    args += ["--checkpointing_steps", "epoch", "--output_dir", "{output}"] if complete else []
    output = str(tmp_path / "output") if complete else None
    given = {"data": str(pictures), "output": output}
    report = run(tmp_path, example("accelerate", f"{path}.py"), args, hub, **given)
    assert "epoch 2: " in report["printed"]
    assert (tmp_path / "output" / "epoch_2" / "model.safetensors").is_file() == complete


def test_a_notebook_trains_where_only_the_import_is_ours(
    hub: dict[str, str], pictures: Path, tmp_path: Path
) -> None:
    """It reads ../../images, and asks for fp16, which is bf16 on CPUs."""
    text = (checkout("notebooks") / "accelerate_examples" / "simple_cv_example.ipynb").read_text()
    assert text.count(ITS) == 1
    (tmp_path / "simple.ipynb").write_text(text.replace(ITS, OURS))
    (tmp_path / "images").symlink_to(pictures)
    place = tmp_path / "examples" / "accelerate"
    place.mkdir(parents=True)
    env = hub | {"MANYCPU_HOME": str(tmp_path / "home"), "PYTHONPATH": python_path()}
    cells = executed(tmp_path / "simple.ipynb", place, env)
    assert not [cell.error for cell in cells if cell.error]
    assert "epoch 4: " in cells[-1].printed
