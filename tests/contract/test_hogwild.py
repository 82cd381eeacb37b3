"""The recipe hogwild on small data: both modes, under the node, and the end of a process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.idx_files import write_bars
from support.killable_programs import Program
from support.rank_launches import LIGHT, LIMIT, PLAIN, Ended, execute

RECIPE = "manycpu.pipeline.recipes.hogwild"
NODE = [sys.executable, "-m", "manycpu.pipeline.node"]
FAST = ("--lr", "0.05", "--epochs", "6", "--log-interval", "1000")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bars(tmp_path_factory.mktemp("hogwild") / "data", 640, 100)


@pytest.fixture(scope="module")
def shared(data: Path) -> tuple[Ended, Path]:
    return trained(data, "shared", "--num-processes", "3")


@pytest.fixture(scope="module")
def averaged(data: Path) -> tuple[Ended, Path]:
    """Train on two ranks, as two nodes do."""
    words = ("--mode", "averaged", "--average-every", "7")
    return trained(data, "averaged", *words, ranks=2, MANYCPU_SUBPROCESSES="2")


def trained(data: Path, name: str, *words: str, ranks: int = 1, **env: str) -> tuple[Ended, Path]:
    output = data.with_name(name)
    known = {
        "MANYCPU_RUN": "hogwild",
        "MANYCPU_DATA": str(data),
        "MANYCPU_OUTPUT": str(output),
        "MANYCPU_BACKEND": "gloo",
    }
    command = [*NODE, f"--nproc-per-node={ranks}", "-m", RECIPE, *FAST, "--start-method", "fork", *words]
    return execute(command, known | env, data.parent), output


def results(output: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((output / "all_results.json").read_text())
    return found


def test_processes_that_share_a_model_learn(shared: tuple[Ended, Path]) -> None:
    ended, output = shared
    assert ended.code == 0, ended.out
    found = results(output)
    assert found["accuracy"] > 0.9  # chance is 0.1
    assert (found["processes"], found["averages"], found["train_steps"]) == (3, 0, 3 * 6 * 10)
    (metrics,) = ended.events("metrics")
    assert metrics["values"] == found


def test_models_that_are_averaged_over_ranks_learn(averaged: tuple[Ended, Path]) -> None:
    ended, output = averaged
    assert ended.code == 0, ended.out
    found = results(output)
    assert found["accuracy"] > 0.9
    # Every 7 of 60 steps, and after the last.
    assert (found["processes"], found["averages"], found["train_steps"]) == (4, 9, 4 * 60)
    assert {event["observed"] for event in ended.events("backend")} == {"gloo"}


def test_nothing_is_warned_of_but_cores_that_are_scarce(
    shared: tuple[Ended, Path], averaged: tuple[Ended, Path]
) -> None:
    said = [event["message"] for ended, _ in (shared, averaged) for event in ended.events("warning")]
    assert [message for message in said if "oversubscribed" not in message] == []


def test_when_a_process_dies_all_end_and_it_is_named(data: Path) -> None:
    words = ["--num-processes", "2", "--epochs", "1000000", "--log-interval", "10"]
    command = [*NODE, "-m", RECIPE, *words, "--start-method", "spawn"]
    env = PLAIN | {"MANYCPU_DATA": str(data)}
    with Program(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as program:
        assert any("process 1: epoch 2" in line for line in program.stdout)  # type: ignore[union-attr]
        started = psutil.Process(program.pid).children(recursive=True)
        killed = [each for each in started if "spawn_main" in " ".join(each.cmdline())][-1]
        shared = in_shared_memory(killed)
        killed.send_signal(signal.SIGKILL)
        printed = program.communicate(timeout=LIMIT)[0]
    ended = Ended(program.returncode, printed)
    (error,) = ended.events("error")
    assert (ended.code, error["kind"]) == (1, "DiedError")
    assert f"process 1 (pid {killed.pid}) was ended by SIGKILL" in error["message"]
    assert psutil.wait_procs(started, 10)[1] == []
    # What has no name any more goes with the last process that has it, however that ends.
    assert shared
    assert [line for line in shared if not line.endswith("(deleted)")] == []


def in_shared_memory(process: psutil.Process) -> list[str]:
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return [line for line in lines if "/dev/shm/" in line]  # noqa: S108 - where shared memory is


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a core has nothing to share")
def test_a_rank_shares_its_cores_with_the_processes_that_it_starts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os; print('threads', os.environ['OMP_NUM_THREADS'])")
    known = LIGHT | {"MANYCPU_CPUS": "2"}
    assert "threads 2" in execute([*NODE, str(script)], known, tmp_path).texts()
    assert (
        "threads 1" in execute([*NODE, str(script)], known | {"MANYCPU_SUBPROCESSES": "2"}, tmp_path).texts()
    )


def test_a_program_that_forks_while_its_threads_run_is_warned_of(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, threading\n"
        "context, stop = multiprocessing.get_context('fork'), threading.Event()\n"
        "def start(name):\n"
        "    process = context.Process(target=print, args=(name,), name=name)\n"
        "    process.start()\n"
        "    process.join()\n"
        "start('early')\n"
        "thread = threading.Thread(target=stop.wait)\n"
        "thread.start()\n"
        "start('late')\n"
        "start('later')\n"
        "stop.set()\n"
    )
    ended = execute([*NODE, str(script)], LIGHT, tmp_path)
    (warning,) = ended.events("warning")
    assert ended.code == 0, ended.out
    assert warning["message"].startswith("the script forks late while 1 thread(s) that it started run")
