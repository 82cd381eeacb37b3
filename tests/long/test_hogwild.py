"""The recipe hogwild on the digits of scikit-learn: it learns in each mode, and a killed process ends all."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.killable_programs import Program

pytestmark = pytest.mark.timeout(900)

RECIPE = "manycpu.pipeline.recipes.hogwild"
NODE = [sys.executable, "-m", "manycpu.pipeline.node"]
EXAMPLE = (
    *("--num-processes", "4", "--batch-size", "64", "--test-batch-size", "1000", "--epochs", "10"),
    *("--lr", "0.01", "--momentum", "0.5", "--seed", "1", "--log-interval", "10"),
)
AVERAGED = ("--mode", "averaged", "--average-every", "5", "--lr", "0.03")
ROOT = Path(__file__).parents[2]
each_method = pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
each_mode = pytest.mark.parametrize("mode", [("--mode", "shared"), AVERAGED], ids=["shared", "averaged"])


def environment(output: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / ".dev"), "MANYCPU_OUTPUT": str(output)}


def results(output: Path, *words: str, ranks: int = 1, backend: str = "gloo") -> dict[str, Any]:
    done = subprocess.run(
        [*NODE, f"--nproc-per-node={ranks}", "-m", RECIPE, *EXAMPLE, *words],
        check=False,
        capture_output=True,
        text=True,
        cwd=output.parent,
        env=environment(output) | {"MANYCPU_BACKEND": backend},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads((output / "all_results.json").read_text())
    return found


def test_the_examples_options_and_what_it_saves(tmp_path: Path) -> None:
    import torch

    found = results(tmp_path / "out", "--dry-run")
    assert (found["processes"], found["train_steps"]) == (4, 4 * 10)
    state = torch.load(tmp_path / "out" / "MNIST_hogwild.pt")
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        "conv1.weight": (10, 1, 5, 5),
        "conv1.bias": (10,),
        "conv2.weight": (20, 10, 5, 5),
        "conv2.bias": (20,),
        "fc1.weight": (50, 320),
        "fc1.bias": (50,),
        "fc2.weight": (10, 50),
        "fc2.bias": (10,),
    }


@each_mode
@each_method
def test_four_processes_learn(mode: tuple[str, ...], method: str, tmp_path: Path) -> None:
    found = results(tmp_path / "out", *mode, "--start-method", method)
    print(mode[1], method, found)  # noqa: T201 - for those who compare
    assert found["accuracy"] >= 0.9
    assert found["averages"] == (0 if "shared" in mode else 46)


@pytest.mark.parametrize("backend", ["gloo", "auto"])
@each_method
def test_two_ranks_of_two_processes_learn(method: str, backend: str, tmp_path: Path) -> None:
    words = ("--num-processes", "2", "--start-method", method)
    found = results(tmp_path / "out", *AVERAGED, *words, ranks=2, backend=backend)
    print(method, backend, found)  # noqa: T201 - for those who compare
    assert found["accuracy"] >= 0.9
    assert (found["processes"], found["averages"]) == (4, 46)


@pytest.mark.parametrize("ranks", [1, 2])
@each_mode
@each_method
def test_a_killed_process_ends_all(mode: tuple[str, ...], method: str, ranks: int, tmp_path: Path) -> None:
    if ranks == 2 and "shared" in mode:
        pytest.skip("one model in memory is one rank's")
    words = ("--num-processes", "2", *mode, "--start-method", method, "--epochs", "1000000")
    command = [*NODE, f"--nproc-per-node={ranks}", "-m", RECIPE, *words]
    known = environment(tmp_path / "out") | {"MANYCPU_BACKEND": "gloo"}
    with Program(command, env=known, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        assert any("process 1: epoch 2" in line for line in program.stdout)  # type: ignore[union-attr]
        started = psutil.Process(program.pid).children(recursive=True)
        killed = max((each for each in started if not each.children()), key=steps)
        killed.send_signal(signal.SIGKILL)
        printed, _ = program.communicate(timeout=120)
    assert program.returncode == 1
    assert f"(pid {killed.pid}) was ended by SIGKILL" in printed
    assert psutil.wait_procs(started, 10)[1] == []


def steps(process: psutil.Process) -> float:
    """Tell a process that trains from helpers: it computes."""
    return float(process.cpu_times().user)
