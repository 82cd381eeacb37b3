"""A notebook's function on every rank: what a cell prints, shows, returns and raises, in a real kernel."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel
from support.notebooks import Cell, executed, executed_by_name
from support.rank_launches import LIGHT
from support.waiting import processes_of, until

# Ranks that need no torch find a stand-in for it; the kernel has the real one.
BEGIN = f"""
import functools, io, os, pathlib, threading
from manycpu.pipeline import launch, notebook_launcher
from manycpu.pipeline import notebook_launcher as with_torch
light = {LIGHT!r}
notebook_launcher = functools.partial(notebook_launcher, env=light)
factor, table, handle = 2, {{"lock": threading.Lock()}}, open("notes.txt", "w")
table["lock"].acquire()
with open("words.py", "w") as file:
    file.write("import numbers_of_mine\\nHELLO = numbers_of_mine.THREE * 'hello '")
with open("numbers_of_mine.py", "w") as file:
    file.write("THREE = 3")

class Doubled:
    def __init__(self, value):
        self.value = factor * value

def world():
    import torch.distributed as dist
    dist.init_process_group()
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def helper():
    return table
"""
CELLS = {
    "returns": """
def training_loop(first, second):
    import words
    rank, size = world()
    print("rank", rank, "says", words.HELLO)
    assert os.path.exists("notes.txt")  # the notebook's folder
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    return {"world": size, "sum": Doubled(first + second), "precision": precision}

returned = notebook_launcher(training_loop, (1, 2), 2, "fp16", use_port="29501", rdzv_backend="c10d")
returned["world"], returned["precision"], returned["sum"].value, type(returned["sum"]) is Doubled
""",
    "raises": """
def deep(rank):
    if rank == 1:
        raise ValueError(f"batch {factor} is bad")

def training_loop():
    rank, size = world()
    deep(rank)

notebook_launcher(training_loop, num_processes=2)
""",
    "lock": """
def training_loop():
    return helper()

notebook_launcher(training_loop, num_processes=2)
""",
    "metric": """
import filelock, pickle, types

class Metric:
    "Holds what a metric of the package evaluate does, once it has computed something."
    def __init__(self):
        self.compute = types.MethodType(type(self).compute, self)
        self.locks, self.guard, self.filelocks = [threading.RLock()], threading.Lock(), []

    def compute(self, values):
        with self.guard, self.locks[0], filelock.FileLock("metric.lock") as held:
            self.filelocks = [held]
            return sum(values)

metric = Metric()
metric.compute([1])

def training_loop():
    rank, size = world()
    return metric.compute([rank, size]), metric.filelocks[0].is_locked

notebook_launcher(training_loop, num_processes=2)
""",
    "file": """
def training_loop():
    handle.write("x")

notebook_launcher(training_loop, num_processes=2)
""",
    "generator": "launch(print, (number for number in range(3)))",
    "accelerator": """
import accelerate
accelerator = accelerate.Accelerator(cpu=True)
with_torch(lambda: accelerator.prepare(1), num_processes=2)
""",
    "device": """
import torch
model = torch.nn.Linear(2, 2, device="meta")
with_torch(lambda model: model, (model,), num_processes=2)
""",
    "by_name": """
class Named:
    def __reduce__(self):
        return "remembered"

remembered = Named()
launch(lambda: remembered)
""",
    "yields": """
def loop():
    yield 1

launch(loop)
""",
    "arguments": "launch(world, 1)",
    "nothing": "launch(None)",
    "environment": """
from os import environ
os.environ["HF_TOKEN"] = "made-up-secret"
def reads():
    return environ["RANK"], environ["HF_TOKEN"]

value = launch(reads, nproc_per_node=1, env=light)
pickles = "".join(map(str, (path.read_bytes() for path in pathlib.Path("home").rglob("function.pkl"))))
value, "made-up-secret" in pickles
""",
    "statistics": """
def statistics():
    from statistics import mean
    calls.append(1)
    return mean([1, 3]), len(calls)

calls = []
launch(statistics, nproc_per_node=1, env=light)
""",
    "run_file": """
import yaml
pathlib.Path("two.yaml").write_text(yaml.safe_dump({
    "run": {"nproc_per_node": 2, "dtype": "bf16", "env": light | {"WORD": "here"}, "start_timeout": 50},
    "target": {"kind": "local"},
}))
def told():
    names = "WORD", "OTHER", "ACCELERATE_MIXED_PRECISION", "MANYCPU_START_TIMEOUT"
    return [*world(), *map(os.environ.get, names)]

with_torch(told, target="two", env={"OTHER": "there"}, timeouts={"start": 60})
""",
    "caught": """
def training_loop():
    rank, size = world()
    if rank == 0:
        try:
            raise KeyError("caught")
        except KeyError:
            import traceback
            traceback.print_exc()
        import torch
        torch.distributed.all_reduce(torch.ones(1))
    raise RuntimeError("the true one")

notebook_launcher(training_loop, num_processes=2)
""",
    "node_rank": "notebook_launcher(world, num_processes=2, num_nodes=2, node_rank=1)",
    "master_addr": "notebook_launcher(world, num_processes=2, num_nodes=2, master_addr='192.0.2.7')",
    "no_target": "notebook_launcher(world, num_processes=2, num_nodes=2)",
    "precision": "notebook_launcher(world, num_processes=2, mixed_precision='fp8')",
    "field": "notebook_launcher(world, num_processes=2, memroy='2Gi')",
    "processes": "notebook_launcher(world, num_procs=2)",
    "tuple": "notebook_launcher(world, 1, num_processes=2)",
    "returns_much": "launch(lambda: bytes(65 << 20), nproc_per_node=1, env=light)",
    "versions": """
import manycpu.pipeline.node.function as function
found = function.versions
import manycpu.pipeline.functions.pickled as pickled
pickled.versions = lambda: found() | {"torch": "1.0", "Python": "3.4"}
try:
    launch(lambda: 1, nproc_per_node=1, env=light)
finally:
    pickled.versions = found
""",
    "curve": """
def training_loop():
    from manycpu.pipeline.node.metrics import metrics, progress
    for step in range(1, 4):
        progress(step=step, total_steps=3, loss=3.0 / step, samples_per_second=12.5, seconds_left=4)
    metrics({"<b>f1": 0.5})

launch(training_loop, nproc_per_node=1, env=light)
""",
    "debug": """
os.environ["ACCELERATE_DEBUG_MODE"] = "yes"
def training_loop():
    from accelerate import Accelerator
    accelerator = Accelerator(mixed_precision="fp16")
    state = accelerator.state
    return str(state.distributed_type), state.backend, accelerator.num_processes, accelerator.mixed_precision

with_torch(training_loop, num_processes=2, mixed_precision="bf16", backend="gloo")
""",
}

SLOW = f"""
import time
from manycpu.pipeline import launch
def slow():
    print("began", flush=True)
    time.sleep(600)

launch(slow, nproc_per_node=2, env={LIGHT!r})
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cell]]:
    """Execute all cells in one kernel; nothing of a run may be left."""
    folder = tmp_path_factory.mktemp("notebook")
    yield executed_by_name(BEGIN, CELLS, folder)
    assert [*folder.glob("home/runs/*")] == []


def test_what_rank_0_returned_is_the_cell_s_value_and_its_class_is_the_notebook_s(
    cells: dict[str, Cell],
) -> None:
    assert cells["returns"].value == "(2, 'bf16', 6, True)", cells["returns"].error


def test_the_cell_says_how_wide_it_runs_and_what_is_not_as_asked(cells: dict[str, Cell]) -> None:
    printed = cells["returns"].printed
    assert "Launching training on 2 CPUs.\n" in printed
    assert "'fp16' becomes 'bf16'" in printed
    assert "not needed, and left out: use_port, rdzv_backend" in printed


def test_rank_0_prints_as_in_any_cell_and_others_with_their_names(cells: dict[str, Cell]) -> None:
    lines = cells["returns"].printed.splitlines()
    assert "rank 0 says hello hello hello " in lines
    assert any(
        line.startswith("[rank 1 ") and line.endswith("rank 1 says hello hello hello ") for line in lines
    )


def test_an_exception_has_the_rank_s_own_traceback_with_the_cell_s_lines(cells: dict[str, Cell]) -> None:
    error = cells["raises"].error
    assert error.startswith("TrainingFailedError: rank 1 on "), error
    assert 'raise ValueError(f"batch {factor} is bad")' in error
    assert "ValueError: batch 2 is bad" in error
    assert "node/function.py" not in error


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("lock", "`table (which helper uses)['lock']` is a lock that is held"),
        ("file", "`handle` is an open file"),
        ("generator", "`args[0]` cannot be pickled: cannot pickle 'generator' object"),
        (
            "accelerator",
            "`accelerator` is of Accelerate's Accelerator, which is each process's own",
        ),
        ("device", "`args[0]` is on the device meta"),
        ("by_name", "`remembered` travels by name alone, and no rank has it"),
        ("yields", "loop is async or yields: a call of it does nothing"),
        ("arguments", "world cannot be called with 1 argument: too many positional arguments"),
        ("nothing", "None cannot be called"),
        ("node_rank", "node_rank: this would be node 1. One call suffices"),
        ("master_addr", "master_addr: 192.0.2.7 is not this machine. One call suffices"),
        ("no_target", "num_nodes: 2 nodes were asked for, and no target"),
        ("precision", "mixed_precision: CPUs train in no 'fp8'"),
        ("field", "memroy: there is no such argument. "),
        ("processes", "num_procs: there is no such argument. Did you mean 'num_processes'?"),
        ("tuple", "args are 1. Write them as a tuple"),
    ],
)
def test_what_cannot_work_is_named_before_anything_starts(
    cell: str, message: str, cells: dict[str, Cell]
) -> None:
    assert cells[cell].error.startswith("BadInputError: "), cells[cell].error
    assert message in cells[cell].error
    assert "Launching" not in cells[cell].printed


def test_a_metric_with_locks_travels_and_each_rank_has_its_own(cells: dict[str, Cell]) -> None:
    """As a process that is forked has; one that is held is named."""
    assert cells["metric"].value == "(2, False)", cells["metric"].error


def test_the_environment_is_each_rank_s_own_and_no_secret_is_written_down(cells: dict[str, Cell]) -> None:
    assert cells["environment"].value == "(('0', 'made-up-secret'), False)", cells["environment"].error


def test_a_function_that_is_named_as_a_module_hides_none_and_is_called_once(cells: dict[str, Cell]) -> None:
    assert cells["statistics"].value == "(2, 1)", cells["statistics"].error


def test_a_run_file_counts_where_the_call_says_nothing(cells: dict[str, Cell]) -> None:
    assert cells["run_file"].value == "[0, 2, 'here', 'there', 'bf16', '60']", cells["run_file"].error


def test_the_rank_that_raised_is_blamed_not_one_that_caught(cells: dict[str, Cell]) -> None:
    assert cells["caught"].error.startswith("TrainingFailedError: rank 1 on ")
    assert "RuntimeError: the true one" in cells["caught"].error


def test_a_model_that_is_too_much_to_return_has_a_place(cells: dict[str, Cell]) -> None:
    assert "the training succeeded, but what the function returned" in cells["returns_much"].error
    assert "MANYCPU_OUTPUT" in cells["returns_much"].error


def test_another_python_or_torch_is_refused_by_name(cells: dict[str, Cell]) -> None:
    error = cells["versions"].error
    assert "where the notebook has 3.4" in error, error
    assert "where the notebook has 1.0" in error


def test_one_block_has_the_curve_and_how_the_run_ended(cells: dict[str, Cell]) -> None:
    shown = cells["curve"].shown
    assert "loss 3 → 1, steps 1 to 3" in shown
    assert "&lt;b&gt;f1 0.5" in shown
    assert "succeeded · report: " in shown


def test_debug_mode_has_all_ranks_meet_before_accelerate_sees_its_world(cells: dict[str, Cell]) -> None:
    assert "2 ranks on " in cells["debug"].printed
    assert "added up their numbers by gloo" in cells["debug"].printed
    assert cells["debug"].printed.count("'fp16' becomes 'bf16'") == 1
    assert cells["debug"].value == "('DistributedType.MULTI_CPU', 'gloo', 2, 'bf16')", cells["debug"].error


def _until_it_raises(manager: Any, client: Any) -> str:
    """Interrupt a cell once its ranks have begun, and again where the kernel's own printing swallows that."""
    began = False
    for _ in range(200):
        try:
            content = client.get_iopub_msg(timeout=60)["content"]
        except Empty:
            content = {}
        # Of one rank alone: a second interrupt would end the cleaning up.
        first = not began and "began" in str(content.get("text"))
        began = began or first
        if "ename" in content:
            return str(content["ename"])
        if first or (began and not content):
            manager.interrupt_kernel()
    raise AssertionError("it went on")


def test_an_interrupted_cell_ends_the_run_and_leaves_nothing(tmp_path: Path) -> None:
    env = dict(os.environ) | {"MANYCPU_HOME": str(tmp_path / "home")}
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path), env=env)
    try:
        client.execute(SLOW)
        assert _until_it_raises(manager, client) == "KeyboardInterrupt"
        assert [*(tmp_path / "home" / "runs").iterdir()] == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    until(lambda: not list(processes_of(tmp_path)))


@pytest.mark.long
def test_a_killed_rank_begins_again_with_its_checkpoints(tmp_path: Path) -> None:
    cell = f"""
import os, pathlib, signal
from manycpu.pipeline import notebook_launcher
def training_loop():
    import torch.distributed as dist
    dist.init_process_group()
    saved = pathlib.Path(os.environ["MANYCPU_CHECKPOINTS"], "begun")
    if not saved.exists() and os.environ["RANK"] == "0":
        saved.touch()
        os.kill(os.getpid(), {signal.SIGKILL:d})
    dist.barrier()
    return saved.exists()

notebook_launcher(training_loop, num_processes=2, max_restarts=1, backend="gloo")
"""
    (launched,) = executed([cell], tmp_path, {"MANYCPU_HOME": str(tmp_path / "home")})
    assert launched.value == "True", launched.error
