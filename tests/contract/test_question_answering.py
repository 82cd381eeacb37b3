"""The recipe on two ranks, started as a run starts it, on a small data set with a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ccl_requirements
from support.tiny_bert import tiny_checkpoint, tiny_data

from manycpu.pipeline.spec.event_types import decode
from manycpu.pipeline.spec.events import split

RECIPE = ("-m", "manycpu.pipeline.recipes.question_answering")
ALONE = (sys.executable, *RECIPE)
ASK = (sys.executable, "-m", f"{RECIPE[1]}.ask")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
RANKS = (*TORCHRUN, "-m", "manycpu.pipeline.node", *RECIPE)
OPTIONS = (
    "--max_seq_length",
    "48",
    "--doc_stride",
    "8",
    "--per_device_train_batch_size",
    "2",
    "--logging_steps",
    "1",
)


@pytest.fixture
def world(tmp_path: Path) -> dict[str, str]:
    """Give the environment of a run. Seven questions to evaluate: two ranks get a padded share."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "cache"),
        "MANYCPU_RUN": "test",
        "MANYCPU_BACKEND": "gloo",
        "MANYCPU_NNODES": "1",
        "MANYCPU_NPROC_PER_NODE": "2",
        "MANYCPU_DATA": str(tiny_data(tmp_path / "data", train=12, validation=7)),
        "MANYCPU_MODEL": str(tiny_checkpoint(tmp_path / "model")),
        "MANYCPU_OUTPUT": str(tmp_path / "output"),
        "MANYCPU_CHECKPOINTS": str(tmp_path / "checkpoints"),
        "MANYCPU_DTYPE": "bf16",
    }


def run(command: tuple[str, ...], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, text=True, capture_output=True, timeout=240, check=False)


def told(output: str) -> list[dict[str, Any]]:
    decoded = [decode(split(line).text) for line in output.splitlines()]
    return [event.model_dump(exclude_unset=True) for event in decoded if event is not None]


def test_two_ranks_train_evaluate_and_leave_one_model(world: dict[str, str], tmp_path: Path) -> None:
    world["MANYCPU_BACKEND"] = "gloo" if ccl_requirements.missing() else "ccl"
    done = run((*RANKS, *OPTIONS, "--num_train_epochs", "1", "--gradient_compression", "bf16"), world)
    assert done.returncode == 0, done.stderr + done.stdout
    output = tmp_path / "output"
    metrics = json.loads((output / "metrics.json").read_text())
    # 12 questions in batches of 2 on 2 ranks.
    assert metrics["train_steps"] == 3
    assert len(json.loads((output / "eval_predictions.json").read_text())) == 7
    progress = [event for event in told(done.stdout) if event["event"] == "progress"]
    assert [event["step"] for event in progress] == [1, 2, 3]
    assert all(
        {"loss", "grad_norm", "learning_rate", "samples_per_second"} <= event.keys() for event in progress
    )
    assert "'loss': " not in done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("'train_runtime': ") == 1
    assert progress[-1]["total_steps"] == 3
    assert progress[-1]["seconds_left"] == 0
    asked = run((*ASK, str(output), "Who?", "odo drew the plans"), world)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.strip() in "odo drew the plans"


def test_two_ranks_evaluate_as_one_does(world: dict[str, str], tmp_path: Path) -> None:
    options = (*OPTIONS, "--do_eval", "--bf16", "false")
    both = run((*RANKS, *options), world)
    alone = run((*ALONE, *options), {**world, "MANYCPU_OUTPUT": str(tmp_path / "alone")})
    assert (both.returncode, alone.returncode) == (0, 0), both.stderr + alone.stderr
    for name in ("eval_predictions.json", "eval_nbest_predictions.json"):
        first, second = (json.loads((tmp_path / folder / name).read_text()) for folder in ("output", "alone"))
        assert {key: texts(said) for key, said in first.items()} == {
            key: texts(said) for key, said in second.items()
        }
    first, second = (
        json.loads((tmp_path / folder / "all_results.json").read_text()) for folder in ("output", "alone")
    )
    assert (first["exact_match"], first["f1"]) == (second["exact_match"], second["f1"])


def texts(said: Any) -> Any:
    """Leave the answer, or the best of them: scores differ in their last digits."""
    return said if isinstance(said, str) else said[0]["text"]


def test_bad_input_ends_every_rank_with_its_message(world: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "data" / "train.json").write_text("{")
    done = run((*RANKS, *OPTIONS), world)
    assert done.returncode != 0
    assert "error: run.data: " in done.stdout + done.stderr
    assert "is not JSON: line 1" in done.stdout + done.stderr


def test_alone_bad_input_exits_2_without_a_traceback(world: dict[str, str]) -> None:
    done = run((*ALONE, "--learning_rat", "1"), world)
    assert done.returncode == 2
    assert "error: run.args: unknown options: --learning_rat 1." in done.stderr
    assert "Traceback" not in done.stderr
