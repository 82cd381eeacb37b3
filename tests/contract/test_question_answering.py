"""The recipe on two ranks, started as a run starts it, on a small data set with a tiny model."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import ccl_requirements
from support.recipe_ranks import WarmNode
from support.tiny_bert import run as evaluate
from support.tiny_bert import tiny_checkpoint, tiny_data

from manycpu.pipeline.recipes.question_answering import ask
from manycpu.pipeline.recipes.question_answering.__main__ import main
from manycpu.pipeline.spec.event_types import decode
from manycpu.pipeline.spec.events import split

RECIPE = ("-m", "manycpu.pipeline.recipes.question_answering")
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recipe")


@pytest.fixture(scope="module")
def world(folder: Path) -> dict[str, str]:
    """Give the environment of a run. Seven questions to evaluate: two ranks get a padded share."""
    return {
        "MANYCPU_RUN": "test",
        "MANYCPU_BACKEND": "gloo" if ccl_requirements.missing() else "ccl",
        "MANYCPU_DATA": str(tiny_data(folder / "data", train=12, validation=7)),
        "MANYCPU_MODEL": str(tiny_checkpoint(folder / "model")),
        "MANYCPU_OUTPUT": str(folder / "output"),
        "MANYCPU_CHECKPOINTS": str(folder / "checkpoints"),
        "MANYCPU_DTYPE": "fp32",
    }


@pytest.fixture(scope="module")
def trained(warm: WarmNode, world: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Train and evaluate on two ranks, once for all that read what they leave."""
    words = (*RECIPE, *OPTIONS, "--num_train_epochs", "1", "--gradient_compression", "bf16")
    done = warm.run(2, world, *words)
    assert done.returncode == 0, done.stderr + done.stdout
    return done


def told(output: str) -> list[dict[str, Any]]:
    decoded = [decode(split(line).text) for line in output.splitlines()]
    return [event.model_dump(exclude_unset=True) for event in decoded if event is not None]


def test_two_ranks_train_evaluate_and_leave_one_model(
    trained: subprocess.CompletedProcess[str], folder: Path
) -> None:
    output = folder / "output"
    metrics = json.loads((output / "metrics.json").read_text())
    # 12 questions in batches of 2 on 2 ranks.
    assert metrics["train_steps"] == 3
    assert len(json.loads((output / "eval_predictions.json").read_text())) == 7
    progress = [event for event in told(trained.stdout) if event["event"] == "progress"]
    assert [event["step"] for event in progress] == [1, 2, 3]
    assert all(
        {"loss", "grad_norm", "learning_rate", "samples_per_second"} <= event.keys() for event in progress
    )
    assert "'loss': " not in trained.stdout + trained.stderr
    assert (trained.stdout + trained.stderr).count("'train_runtime': ") == 1
    assert progress[-1]["total_steps"] == 3
    assert progress[-1]["seconds_left"] == 0


@pytest.mark.usefixtures("trained")
def test_its_model_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask.main([str(folder / "output"), "Who?", "odo drew the plans"]) == 0
    assert capsys.readouterr().out.strip() in "odo drew the plans"


@pytest.mark.usefixtures("trained")
@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")  # torch's own advice
def test_two_ranks_evaluate_as_one_does(world: dict[str, str], folder: Path) -> None:
    """The same model, which two ranks left, by this process."""
    own = {"MANYCPU_MODEL": str(folder / "output"), "MANYCPU_OUTPUT": str(folder / "alone")}
    evaluate(
        {name: world[name] for name in ("MANYCPU_DATA", "MANYCPU_CHECKPOINTS")} | own, *OPTIONS, "--do_eval"
    )
    for name in ("eval_predictions.json", "eval_nbest_predictions.json"):
        first, second = (json.loads((folder / where / name).read_text()) for where in ("output", "alone"))
        assert {key: texts(said) for key, said in first.items()} == {
            key: texts(said) for key, said in second.items()
        }
    first, second = (
        json.loads((folder / where / "all_results.json").read_text()) for where in ("output", "alone")
    )
    assert (first["exact_match"], first["f1"]) == (second["exact_match"], second["f1"])


def texts(said: Any) -> Any:
    """Leave the answer, or the best of them: scores differ in their last digits."""
    return said if isinstance(said, str) else said[0]["text"]


def test_bad_input_ends_it_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--learning_rat", "1"]) == 2
    said = "error: run.args: unknown options: --learning_rat 1. Did you mean '--learning_rate'?"
    assert said in capsys.readouterr().err
