"""Device xla on eight devices that are CPUs, in an environment of its own: `make test-xla`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "scripts" / "xla_train.py"
ALONE = """
import accelerate.accelerator, torch

from manycpu.pipeline.node.metrics import metrics

accelerate.accelerator.is_bf16_available = lambda *_: False  # as Accelerate has it on TPUs
accelerator = accelerate.accelerator.Accelerator(mixed_precision="bf16")
metrics({"autocast": accelerator.native_amp, "sum": torch.ones(16, 2).to(accelerator.device).sum()})
"""


@pytest.fixture(scope="module")
def python() -> str:
    """Give the Python of the environment with torch_xla."""
    folder = ROOT / os.environ.get("MANYCPU_XLA", ".venv-xla")
    if not (folder / ".installed").exists():
        pytest.skip("`make test-xla` makes the environment that this needs")
    return str(folder / "bin" / "python")


class Trainings:
    """Runs the program by `manycpu run`, each kind once."""

    def __init__(self, python: str, folder: Path) -> None:
        self._python, self._folder = python, folder
        self._done: dict[str, dict[str, Any]] = {}

    def report(self, **fields: object) -> dict[str, Any]:
        """Give the report of a run with these fields."""
        name = json.dumps(fields, sort_keys=True)
        if name not in self._done:
            self._done[name] = self._run(self._folder / str(len(self._done)), fields)
        return self._done[name]

    def _run(self, folder: Path, fields: dict[str, object]) -> dict[str, Any]:
        usual = {"program": str(PROGRAM), "device": "xla", "output": str(folder / "output")}
        options = [word for name, value in (usual | fields).items() for word in _option(name, value)]
        command = (self._python, "-m", "manycpu.pipeline.cli", "run", *options)
        env = {**os.environ, "PYTHONPATH": str(ROOT / ".dev"), "MANYCPU_HOME": str(folder / "home")}
        done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=240, check=False)
        report: dict[str, Any] = json.loads((folder / "output" / "report.json").read_text())
        return report | {"code": done.returncode, "shown": " ".join(done.stdout.split())}

    def losses(self, **fields: object) -> list[float]:
        """Give the losses of all steps."""
        report = self.report(**fields)
        assert report["state"] == "succeeded", report["shown"]
        return list(report["metrics"]["losses"])


def _option(name: str, value: object) -> tuple[str, str]:
    return f"--{name.replace('_', '-')}", str(value)


@pytest.fixture(scope="module")
def trainings(python: str, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    return Trainings(python, tmp_path_factory.mktemp("xla"))


SIZES = "--samples 72 --eval_samples 40 --eval_batch 32"
"""Batches of 16, a last one of 8, and others to evaluate: a last one of 8 again."""


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-3)])
def test_eight_devices_train_as_one_does(trainings: Trainings, dtype: str, tolerance: float) -> None:
    args = {"fp32": SIZES, "bf16": ""}[dtype]
    one, eight = (trainings.losses(dtype=dtype, args=args, **kind) for kind in ({"nproc_per_node": 1}, {}))
    assert eight == pytest.approx(one, abs=tolerance)
    assert eight[-1] < eight[0]


def test_bf16_is_computed_in_bf16(trainings: Trainings) -> None:
    narrow, wide = trainings.losses(dtype="bf16", args=""), trainings.losses(dtype="fp32", args=SIZES)
    assert narrow[:4] == pytest.approx(wide[:4], abs=1e-2)
    assert narrow[:4] != pytest.approx(wide[:4], abs=1e-6)


def test_on_cpus_the_same_program_leaves_xla_alone_and_has_the_same_loss(trainings: Trainings) -> None:
    on_cpus = trainings.report(device="cpu", nproc_per_node=1, args=SIZES)
    assert on_cpus["metrics"]["device"] == "cpu"
    assert not [name for name in on_cpus["metrics"] if name.startswith("xla")]
    assert on_cpus["metrics"]["losses"] == pytest.approx(trainings.losses(dtype="fp32", args=SIZES), abs=1e-4)


def test_the_report_has_the_devices_and_both_times(trainings: Trainings) -> None:
    report = trainings.report(dtype="fp32", args=SIZES)
    assert [rank["devices"] for rank in report["ranks"]] == [8]
    assert (report["world_size"], report["run"]["nproc_per_node"]) == (1, 8)
    metrics = report["metrics"]
    assert metrics["device"] == "xla"
    assert metrics["evaluated"] == 40
    assert 5 <= metrics["xla_compilations"] <= 12
    assert metrics["xla_compile_seconds"] > metrics["xla_later_step_seconds"] > 0
    assert metrics["xla_first_step_seconds"] > 3 * metrics["xla_later_step_seconds"]


def test_the_log_says_why_the_first_steps_are_slow(trainings: Trainings) -> None:
    shown = trainings.report(dtype="fp32", args=SIZES)["shown"]
    assert "XLA has 8 devices of this node, of type CPU" in shown
    assert "steps were slow: XLA compiled (" in shown
    assert "succeeded: 1 rank on 1 host, 8 devices of XLA" in shown


def test_batches_of_another_size_are_warned_of_once_each(trainings: Trainings) -> None:
    warnings = trainings.report(dtype="fp32", args=SIZES)["warnings"]
    again = [text for text in warnings if text.startswith("a batch of another size made XLA compile again")]
    assert [text.partition("its tensors are ")[2].partition(", and")[0] for text in again] == [
        "8x12 and 8",
        "32x12 and 32",
    ]
    assert trainings.report(dtype="bf16", args="")["warnings"] == []


def test_downcast_bf16_narrows_the_model_and_its_batches_and_no_metric(trainings: Trainings) -> None:
    usual, downcast = ({"dtype": "bf16", "args": ""} | more for more in ({}, {"downcast_bf16": "true"}))
    assert trainings.losses(**downcast) == pytest.approx(trainings.losses(**usual), abs=1e-2)
    metrics = trainings.report(**downcast)["metrics"]
    assert metrics["dtypes"] == ["torch.bfloat16", "torch.float32"]  # of float and of double
    assert (metrics["batch"], metrics["logits"]) == ("torch.bfloat16", "torch.float32")
    assert trainings.report(**usual)["metrics"]["dtypes"] == ["torch.float32", "torch.float64"]


def test_a_program_that_divides_nothing_among_its_devices_fails(trainings: Trainings, tmp_path: Path) -> None:
    program = tmp_path / "alone.py"
    program.write_text(ALONE)
    report = trainings.report(program=str(program))
    assert (report["code"], report["state"], report["ranks"][0]["exit_code"]) == (1, "failed", 86)
    assert "without ever dividing a batch among the 8 devices" in report["error"]
    assert report["metrics"]["autocast"] is True
    assert report["metrics"]["sum"] == 32


def test_another_number_of_devices_than_asked_for_fails(trainings: Trainings) -> None:
    report = trainings.report(env="CPU_NUM_DEVICES=4")
    assert (report["code"], report["state"]) == (1, "failed")
    assert "8 devices of XLA were asked for (run.nproc_per_node), and CPU has 4" in report["error"]


def test_a_notebook_s_function_gets_its_model_and_eight_devices(python: str, tmp_path: Path) -> None:
    """A model that is built inside is warned of, and trains."""
    command = [python, str(ROOT / "tests" / "scripts" / "xla_notebook.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / ".dev"), "MANYCPU_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Launching training on 8 XLA devices.") == 2
    assert '{"weights": 1443}' in done.stdout
    outside, inside = done.stdout.split('{"weights"')
    assert "the function builds its model inside" not in outside
    assert "the function builds its model inside" in inside
